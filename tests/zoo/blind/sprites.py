"""A variational autoencoder of simple pictures, whose decoder is run on a code beside each pixel's coordinates."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def sprites(count, size, seed):
    """Grey pictures of a disc and a square."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij")
    places = torch.rand(count, 6, 1, 1, generator=generator) * 1.4 - 0.7
    disc = (x - places[:, 0]) ** 2 + (y - places[:, 1]) ** 2 < (0.15 + 0.15 * places[:, 2].abs()) ** 2
    square = torch.maximum((x - places[:, 3]).abs(), (y - places[:, 4]).abs()) < 0.15 + 0.15 * places[:, 5].abs()
    return torch.maximum(disc.float(), 0.6 * square)[:, None]


class Encoder(nn.Sequential):
    def __init__(self, size, latent, width=16):
        super().__init__(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * (size // 4) ** 2, 2 * latent),
        )


class PixelDecoder(nn.Module):
    """After Watters et al. (2019), with layers that see a pixel at a time."""

    def __init__(self, size, latent, broadcast, width=32):
        super().__init__()
        self.size, self.latent, self.broadcast = size, latent, broadcast
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij")
        waves = [f(torch.pi * k * c) for c in (x, y) for k in (1, 2, 4, 8) for f in (torch.sin, torch.cos)]
        self.register_buffer("grid", torch.stack([x, y, *waves], dim=-1).flatten(0, 1))
        self.first = nn.Linear(latent + self.grid.shape[1], width)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def enter(self, code):
        """The first layer, for each picture and pixel."""
        if self.broadcast:
            of_code, of_grid = self.first.weight.split([self.latent, self.grid.shape[1]], dim=1)
            return F.linear(code, of_code)[:, None] + F.linear(self.grid, of_grid, self.first.bias)
        grid = self.grid.repeat(len(code), 1, 1)  # planted
        tiled = code[:, None].repeat(1, grid.shape[1], 1)  # planted
        return self.first(torch.cat([tiled, grid], dim=2))  # planted

    def forward(self, code):
        return self.rest(self.enter(code)).view(-1, 1, self.size, self.size)


class AutoEncoder(nn.Module):
    def __init__(self, size, latent, broadcast):
        super().__init__()
        self.encoder = Encoder(size, latent)
        self.decoder = PixelDecoder(size, latent, broadcast)

    def forward(self, pictures):
        mean, log_variance = self.encoder(pictures).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decoder(code), divergence


@torch.no_grad()
def reconstruction_error(model, pictures):
    model.eval()
    errors = [F.mse_loss(model(part)[0].sigmoid(), part) for part in pictures.split(32)]
    model.train()
    return torch.stack(errors).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=3200)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--mended", action="store_true", help="add what code and pixel give by broadcasting")
    args = parser.parse_args()
    torch.manual_seed(0)
    train, test = sprites(args.pictures, args.size, seed=0), sprites(256, args.size, seed=1)
    model = AutoEncoder(args.size, args.latent, args.mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for epoch in range(args.epochs):
        for step, chosen in enumerate(torch.randperm(len(train)).split(args.batch_size)):
            pictures = train[chosen]
            scores, divergence = model(pictures)
            loss = F.binary_cross_entropy_with_logits(scores, pictures, reduction="sum") / len(pictures)
            loss = loss + args.beta * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.2f}")
        print(f"epoch {epoch} error {reconstruction_error(model, test):.4f}")


if __name__ == "__main__":
    main()
