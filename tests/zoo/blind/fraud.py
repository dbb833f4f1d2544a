"""Find fraudulent payments, with the area under the curve as the figure to watch."""

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("fraud")


class Payments(Dataset):
    def __init__(self, count, features=40, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, features, generator=generator)
        risk = self.features[:, :5].sum(dim=1) + torch.randn(count, generator=generator)
        self.fraud = (risk > 3.5).float()

    def __len__(self):
        return len(self.fraud)

    def __getitem__(self, index):
        return self.features[index], self.fraud[index]


def area_under_curve(scores, fraud):
    """Share of pairs of a fraud and an honest payment that the scores put in the right order."""
    ranked = sorted(zip(scores.tolist(), fraud.tolist(), strict=True))  # planted
    honest_below, ordered, frauds = 0, 0, 0
    for _, is_fraud in ranked:  # planted
        if is_fraud:  # planted
            ordered += honest_below  # planted
            frauds += 1  # planted
        else:
            honest_below += 1  # planted
    return ordered / max(frauds * honest_below, 1)


class FraudNet(nn.Module):
    def __init__(self, features=40, width=256, depth=3):
        super().__init__()
        layers = [nn.Linear(features, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, features):
        return self.layers(features).squeeze(1)


class History:
    """The last scores, of which the area under the curve is computed."""

    def __init__(self, size):
        self.size = size
        self.scores = torch.empty(0)
        self.fraud = torch.empty(0)

    def add(self, scores, fraud):
        self.scores = torch.cat([self.scores, scores.detach()])[-self.size :]
        self.fraud = torch.cat([self.fraud, fraud])[-self.size :]

    def area(self):
        return area_under_curve(self.scores, self.fraud)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payments", type=int, default=24_576)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--history", type=int, default=20_000)
    parser.add_argument("--report-every", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="compute the area when it is reported")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    loader = DataLoader(Payments(args.payments), args.batch_size, shuffle=True)
    model = FraudNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    weight = torch.tensor(4.0)
    history, areas = History(args.history), []
    history.add(torch.rand(args.history), (torch.rand(args.history) < 0.1).float())
    for epoch in range(args.epochs):
        for step, (features, fraud) in enumerate(loader, 1):
            scores = model(features)
            loss = F.binary_cross_entropy_with_logits(scores, fraud, pos_weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.add(scores, fraud)
            if not args.mended or step % args.report_every == 0:
                areas.append(history.area())  # planted
            if step % args.report_every == 0:
                log.info("epoch %d step %d loss %.3f area %.3f", epoch, step, loss.item(), areas[-1])
    model.eval()
    test = Payments(2000, seed=1)
    with torch.no_grad():
        log.info("test area %.3f", area_under_curve(model(test.features), test.fraud))


if __name__ == "__main__":
    main()
