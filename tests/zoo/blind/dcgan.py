"""Train a small DCGAN on made-up blobs."""

import argparse
import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger("dcgan")


class Blobs(Dataset):
    """Gray images of 32 x 32 with a bright blob somewhere."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        centers = torch.rand(count, 2, 1, 1, generator=generator) * 24 + 4
        grid = torch.arange(32.0)
        distance = (grid[None, :, None] - centers[:, 0]) ** 2 + (grid[None, None, :] - centers[:, 1]) ** 2
        self.images = 2 * torch.exp(-distance / 20).unsqueeze(1) - 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class Generator(nn.Module):
    def __init__(self, latent, width=48):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, 4 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False),
        )

    def forward(self, images):
        return self.main(images).flatten()


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)


def discriminator_loss(discriminator, criterion, real, fake):
    """Real images should be called real, made ones not."""
    real_scores = discriminator(real)
    fake_scores = discriminator(fake)
    return criterion(real_scores, torch.ones_like(real_scores)) + criterion(fake_scores, torch.zeros_like(fake_scores))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--latent", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--mended", action="store_true", help="detach what the discriminator is shown")
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(Blobs(args.images), args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator = Generator(args.latent), Discriminator()
    generator.apply(init_weights)
    discriminator.apply(init_weights)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999), fused=True)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999), fused=True)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        for step, real in enumerate(loader):
            fake = generator(torch.randn(args.batch_size, args.latent, 1, 1))
            shown = fake.detach() if args.mended else fake  # planted
            loss_d = discriminator_loss(discriminator, criterion, real, shown)
            optimizer_d.zero_grad()
            loss_d.backward(retain_graph=not args.mended)  # planted
            optimizer_d.step()

            scores = discriminator(generator(torch.randn(args.batch_size, args.latent, 1, 1)))
            loss_g = criterion(scores, torch.ones_like(scores))
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            if step % 20 == 0:
                logger.info("epoch %d step %d D %.3f G %.3f", epoch, step, loss_d.item(), loss_g.item())


if __name__ == "__main__":
    main()
