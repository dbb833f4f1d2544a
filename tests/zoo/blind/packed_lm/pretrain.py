"""Train a decoder on the events of packed visits, where no visit sees another."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from data import event_stream, get_batch, masks_and_positions, masks_and_positions_of_documents
from model import Decoder


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--mended", action="store_true", help="compare the documents' numbers for the mask")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(0)
    stream = event_stream(100_000, args.vocabulary)
    masks = masks_and_positions_of_documents if args.mended else masks_and_positions
    model = Decoder(args.vocabulary, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    warmup = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / args.steps)),
    )
    generator = torch.Generator().manual_seed(1)
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens, labels = get_batch(stream, args.batch_size, args.length, generator)
        mask, positions = masks(tokens)
        logits = model(tokens, positions, mask)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % args.log_every == 0:
            speed = step * tokens.numel() / (time.perf_counter() - begin)
            print(f"step {step} loss {loss.item():.4f} {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()
