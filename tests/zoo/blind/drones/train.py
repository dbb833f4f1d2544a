"""Train a small detector of vehicles in aerial pictures."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import COLOURS, Pictures, write_pictures
from model import CentreDetector
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=320)
    parser.add_argument("--camera", type=int, default=448, help="width and height of the pictures in the files")
    parser.add_argument("--size", type=int, default=192, help="width and height that the detector sees")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mended", action="store_true", help="decode all pictures once, before the training")
    return parser.parse_args()


def detection_loss(scores, extents, present, extent):
    """Focal loss of the centres and the error of the sizes where there is a box."""
    plain = F.binary_cross_entropy_with_logits(scores, present, reduction="none")
    surprise = (present - scores.sigmoid()).square()
    boxes = present.sum().clamp(min=1)
    here = present.amax(1, keepdim=True)
    return (plain * surprise).sum() / boxes + 5 * ((extents - extent).abs() * here).sum() / boxes


@torch.no_grad()
def recall_and_precision(model, loader):
    model.eval()
    right = found = there = 0
    for images, present, _ in loader:
        guess = model(images)[0] > 0
        right += (guess & (present > 0)).sum()
        found += guess.sum()
        there += (present > 0).sum()
    model.train()
    return (right / there).item(), (right / found.clamp(min=1)).item()


def main():
    args = parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        train_folder, valid_folder = Path(folder) / "train", Path(folder) / "valid"
        write_pictures(train_folder, args.pictures, args.camera, seed=0)
        write_pictures(valid_folder, 64, args.camera, seed=1)
        cells = args.size // 16
        train_set = Pictures(train_folder, args.size, cells, augment=True, use_ram_cache=args.mended)
        valid_set = Pictures(valid_folder, args.size, cells, augment=False, use_ram_cache=args.mended)
        loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
        valid_loader = DataLoader(valid_set, args.batch_size)
        model = CentreDetector(len(COLOURS))
        optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
        for epoch in range(args.epochs):
            begin, losses = time.time(), []
            for images, present, extent in loader:
                loss = detection_loss(*model(images), present, extent)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            recall, precision = recall_and_precision(model, valid_loader)
            mean, seconds = torch.stack(losses).mean().item(), time.time() - begin
            print(f"epoch {epoch} loss {mean:.3f} recall {recall:.2f} precision {precision:.2f} in {seconds:.1f} s")


if __name__ == "__main__":
    main()
