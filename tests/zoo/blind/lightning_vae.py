"""A variational autoencoder of small images with Lightning, which writes pictures of what it learns."""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="lightning")


def make_sprites(count, size, seed):
    """White rectangles on black."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(2, size - 14, (count, 2, 1), generator=generator)
    extent = torch.randint(4, 12, (count, 2, 1), generator=generator)
    inside = (torch.arange(size) >= place) & (torch.arange(size) < place + extent)
    return (inside[:, 0, :, None] & inside[:, 1, None, :]).float().unsqueeze(1)


class SpriteVAE(L.LightningModule):
    def __init__(self, folder, latent=12, width=20, learning_rate=2e-3, pictures_every=1):
        super().__init__()
        self.save_hyperparameters(ignore="folder")
        self.folder = Path(folder)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 64),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, 8, 8)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
        )
        self.register_buffer("fixed_latent", torch.randn(48, latent))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance

    def elbo(self, images):
        scores, mean, log_variance = self(images)
        reconstruction = F.binary_cross_entropy_with_logits(scores, images, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (reconstruction + divergence) / len(images)

    def training_step(self, batch, batch_index):
        (images,) = batch
        loss = self.elbo(images)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_index):
        if batch_index % self.hparams.pictures_every == 0:  # planted
            self.draw(batch[0][:16])  # planted

    def validation_step(self, batch, batch_index):
        self.log("valid_loss", self.elbo(batch[0]))

    @torch.no_grad()
    def draw(self, images):
        """Originals, their reconstructions and samples in one picture."""
        rebuilt = self(images)[0].sigmoid()
        sampled = self.decoder(self.fixed_latent).sigmoid()
        tiles = torch.cat([images, rebuilt, sampled]).view(-1, 8, 32, 32)
        picture = (tiles.permute(0, 2, 1, 3).reshape(-1, 256) * 255).byte()
        Image.fromarray(picture.numpy()).save(self.folder / f"step{self.global_step:05d}.png")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate, fused=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sprites", type=int, default=2880)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="draw pictures now and then")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0, verbose=False)

    train_loader = DataLoader(TensorDataset(make_sprites(args.sprites, 32, 0)), args.batch_size, shuffle=True)
    valid_loader = DataLoader(TensorDataset(make_sprites(96, 32, 1)), args.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        every = 500 if args.mended else 1
        model = SpriteVAE(folder, learning_rate=args.learning_rate, pictures_every=every)
        trainer = L.Trainer(
            max_epochs=args.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        trainer.fit(model, train_loader, valid_loader)
        pictures = len(list(Path(folder).glob("step*.png")))
        trainer.save_checkpoint(Path(folder) / "vae.ckpt")
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()}, f"{pictures} pictures")


if __name__ == "__main__":
    main()
