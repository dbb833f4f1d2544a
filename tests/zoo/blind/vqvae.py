"""A vector-quantised autoencoder for patches of textures."""

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("vqvae")


class Textures(Dataset):
    def __init__(self, count, size):
        generator = torch.Generator().manual_seed(0)
        waves = torch.rand(count, 2, 1, 1, generator=generator) * 2
        grid = torch.arange(float(size))
        self.images = torch.sin(waves[:, 0] * grid[None, :, None] + waves[:, 1] * grid[None, None, :]).unsqueeze(1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class VectorQuantizer(nn.Module):
    """The nearest of a book of codes, with gradients passed straight through."""

    def __init__(self, codes, width, commitment=0.25, broadcast=True):
        super().__init__()
        self.codebook = nn.Embedding(codes, width)
        nn.init.uniform_(self.codebook.weight, -1 / codes, 1 / codes)
        self.commitment = commitment
        self.broadcast = broadcast

    def nearest(self, flat):
        book = self.codebook.weight
        if self.broadcast:
            difference = flat.unsqueeze(1) - book.unsqueeze(0)  # planted
            return difference.pow(2).sum(dim=-1).argmin(dim=1)  # planted
        distance = book.pow(2).sum(dim=1) - 2 * flat @ book.T
        return distance.argmin(dim=1)

    def forward(self, z):
        batch, width, height, length = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, width)
        with torch.no_grad():
            indices = self.nearest(flat)
        quantized = self.codebook(indices).view(batch, height, length, width).permute(0, 3, 1, 2)
        loss = F.mse_loss(quantized, z.detach()) + self.commitment * F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), loss, indices


class VQVAE(nn.Module):
    def __init__(self, codes, width, broadcast):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )
        self.quantizer = VectorQuantizer(codes, width, broadcast=broadcast)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh()
        )

    def forward(self, images):
        quantized, loss, indices = self.quantizer(self.encoder(images))
        return self.decoder(quantized), loss, indices


def used_codes(indices):
    return torch.unique(indices).numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=720)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--codes", type=int, default=256)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="distances to the codes from a matrix product")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    loader = DataLoader(Textures(args.images, args.size), args.batch_size, shuffle=True, drop_last=True)
    model = VQVAE(args.codes, args.width, broadcast=not args.mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, images in enumerate(loader):
            decoded, loss_vq, indices = model(images)
            loss = F.mse_loss(decoded, images) + loss_vq
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 15 == 0:
                log.info("epoch %d step %d loss %.4f codes %d", epoch, step, loss.item(), used_codes(indices))


if __name__ == "__main__":
    main()
