"""Transfer learning: keep a pretrained backbone as it is and train a new head for flowers."""

import argparse
import logging

import torch
from backbone import pretrained_resnet
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("transfer")


class Flowers(Dataset):
    def __init__(self, count, classes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=generator)
        self.images = torch.rand(count, 3, 32, 32, generator=generator)
        self.images[:, 0] += self.labels[:, None, None] / classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class FlowerClassifier(nn.Module):
    """The backbone without its last layer, and a head."""

    def __init__(self, classes, freeze):
        super().__init__()
        self.backbone = pretrained_resnet()
        features = self.backbone.fc.in_features
        self.backbone.fc = nn.Identity()
        if freeze:
            self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, classes))

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()  # its statistics stay those of the pretraining
        return self

    def forward(self, images):
        return self.head(self.backbone(images))  # planted


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    model.train()
    return right.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="ask no gradients of the backbone")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    model = FlowerClassifier(args.classes, freeze=args.mended)
    torch.manual_seed(0)
    train_loader = DataLoader(Flowers(640, args.classes, 0), args.batch_size, shuffle=True)
    test_loader = DataLoader(Flowers(64, args.classes, 1), args.batch_size)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for images, labels in train_loader:
            model.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()  # planted
            optimizer.step()
            total += loss.detach()
        log.info("epoch %d: loss %.4f", epoch, total.item() / len(train_loader))
    log.info("accuracy %.3f", evaluate(model, test_loader))


if __name__ == "__main__":
    main()
