"""Semi-supervised learning with a mean teacher: an averaged copy of the model labels what has no label."""

import argparse
import copy
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("mean_teacher")


class Mixer(nn.Module):
    """Patches mixed by MLPs over places and over channels."""

    def __init__(self, patches=16, width=48, depth=12, classes=6):
        super().__init__()
        self.embed = nn.Linear(48, width)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(
                nn.ModuleDict(
                    {
                        "norm_places": nn.LayerNorm(width),
                        "places": nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches)),
                        "norm_channels": nn.LayerNorm(width),
                        "channels": nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)),
                    }
                )
            )
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.embed(F.unfold(images, 4, stride=4).transpose(1, 2))
        for layer in self.layers:
            x = x + layer["places"](layer["norm_places"](x).transpose(1, 2)).transpose(1, 2)
            x = x + layer["channels"](layer["norm_channels"](x))
        return self.head(x.mean(dim=1))


class Averager:
    """An exponential moving average of a model's weights."""

    def __init__(self, model, decay, fused):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.fused = fused

    @torch.no_grad()
    def update(self, student):
        if self.fused:
            torch._foreach_lerp_(list(self.model.parameters()), list(student.parameters()), 1 - self.decay)
            return
        state = copy.deepcopy(student.state_dict())  # planted
        averaged = self.model.state_dict()  # planted
        for name in state:  # planted
            averaged[name] = self.decay * averaged[name] + (1 - self.decay) * state[name]  # planted
        self.model.load_state_dict(averaged)  # planted


def make_images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (count,), generator=generator)
    images = torch.rand(count, 3, 16, 16, generator=generator)
    images += labels[:, None, None, None] * torch.linspace(0, 0.1, 16)
    return TensorDataset(images, labels)


def noisy(images):
    return images + 0.1 * torch.randn_like(images)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labeled", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--decay", type=float, default=0.99)
    parser.add_argument("--consistency", type=float, default=5.0)
    parser.add_argument("--mended", action="store_true", help="average all weights in place at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    labeled = DataLoader(make_images(args.labeled, 0), args.batch_size, shuffle=True)
    unlabeled = DataLoader(make_images(args.labeled, 1), args.batch_size, shuffle=True)
    student = Mixer()
    teacher = Averager(student, args.decay, fused=args.mended)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        for (images, labels), (others, _) in zip(labeled, unlabeled, strict=True):
            scores = student(noisy(torch.cat([images, others])))
            with torch.no_grad():
                wanted = teacher.model(noisy(others)).softmax(dim=1)
            supervised = F.cross_entropy(scores[: len(images)], labels)
            consistent = F.mse_loss(scores[len(images) :].softmax(dim=1), wanted)
            loss = supervised + args.consistency * consistent
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            teacher.update(student)
        log.info("epoch %d loss %.3f teacher %.3f", epoch, loss.item(), accuracy(teacher.model, labeled))


if __name__ == "__main__":
    main()
