"""Classify blood panels from several laboratories, whose instruments read a little differently."""

import argparse
import time

import torch
from torch import nn

LABS = 40


def make_panels(count, markers, classes, seed):
    """Panels around a class's typical values, shifted by what a laboratory's instruments add."""
    fixed = torch.Generator().manual_seed(99)
    typical = torch.randn(classes, markers, generator=fixed)
    shift = 0.8 * torch.randn(LABS, markers, generator=fixed)
    own = torch.Generator().manual_seed(seed)
    disease = torch.randint(classes, (count,), generator=own)
    lab = torch.randint(LABS, (count,), generator=own)
    noise = 2.0 * torch.randn(count, markers, generator=own)
    return typical[disease] + shift[lab] + noise, lab, disease


def batches(panels, size, shuffled):
    """Panels, laboratories and diseases of `size` samples at a time."""
    count = len(panels[0])
    order = torch.randperm(count) if shuffled else torch.arange(count)
    for chosen in order.split(size):
        yield tuple(part[chosen] for part in panels)


class LabOffset(nn.Module):
    """Adds a learned vector to a sample's features, one for each laboratory."""

    def __init__(self, width, vectorized):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(LABS, width))
        self.vectorized = vectorized

    def forward(self, x, lab):
        if self.vectorized:
            return x + self.offset.index_select(0, lab)
        out = x.clone()  # planted
        for row in range(len(x)):  # planted
            out[row] = out[row] + self.offset[lab[row]]  # planted
        return out  # planted


class PanelNet(nn.Module):
    def __init__(self, markers, classes, width, vectorized):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(markers, width), nn.GELU())
        self.calibrate = LabOffset(width, vectorized)
        self.body = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
            nn.GELU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, panel, lab):
        return self.head(self.body(self.calibrate(self.stem(panel), lab)))


@torch.no_grad()
def accuracy(model, panels, size=512):
    model.eval()
    hits = [(model(panel, lab).argmax(1) == disease).float() for panel, lab, disease in batches(panels, size, False)]
    model.train()
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--panels", type=int, default=12800)
    parser.add_argument("--markers", type=int, default=96)
    parser.add_argument("--classes", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--mended", action="store_true", help="add the offsets of the whole batch at once")
    args = parser.parse_args()
    torch.manual_seed(0)

    train_set = make_panels(args.panels, args.markers, args.classes, seed=0)
    test_set = make_panels(1024, args.markers, args.classes, seed=1)
    model = PanelNet(args.markers, args.classes, args.width, args.mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(args.epochs):
        begin = time.time()
        for step, (panel, lab, disease) in enumerate(batches(train_set, args.batch_size, True)):
            loss = criterion(model(panel, lab), disease)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch}: accuracy {accuracy(model, test_set):.3f}, {time.time() - begin:.1f} s")


if __name__ == "__main__":
    main()
