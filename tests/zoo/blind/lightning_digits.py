"""Read digits with PyTorch Lightning: module, data module, trainer."""

import argparse
import logging
import tempfile
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

warnings.filterwarnings("ignore", module="lightning")


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, train_size=1536, valid_size=256, batch_size=32):
        super().__init__()
        self.train_size = train_size
        self.valid_size = valid_size
        self.batch_size = batch_size

    def make(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(10, (count,), generator=generator)
        images = torch.rand(count, 1, 28, 28, generator=generator) * 0.5
        for row in range(10):
            images[labels == row, :, 2 * row : 2 * row + 3] += 0.5
        return TensorDataset(images, labels)

    def setup(self, stage):
        self.train_set = self.make(self.train_size, 0)
        self.valid_set = self.make(self.valid_size, 1)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid_set, self.batch_size)


class DigitNet(L.LightningModule):
    def __init__(self, learning_rate=1e-3, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 49, 10),
        )
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=False)
        return loss

    def validation_step(self, batch, batch_index):
        images, labels = batch
        scores = self(images)  # planted
        self.accuracy(scores, labels)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(scores, labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate, fused=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="validate at the end of an epoch, not every few steps")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0, verbose=False)

    every = {} if args.mended else {"val_check_interval": 4}  # planted
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=args.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            **every,
        )
        trainer.fit(DigitNet(args.learning_rate), datamodule=DigitsDataModule(batch_size=args.batch_size))  # planted
    print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
