"""Write captions for a folder's images, a batch at a time."""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

import torch
from network import Captioner

log = logging.getLogger("captions")
WORDS = ["<start>", "<end>", *(f"{a}{b}" for a in ("red", "big", "old", "wet") for b in ("cat", "dog", "car", "cup"))]
WORDS += [f"word{number}" for number in range(500 - len(WORDS))]


def load_images(count, size):
    """Stands for decoded photos."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator)


def load_captioner(path):
    model = Captioner(len(WORDS))
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


@torch.inference_mode()
def caption(model, images, longest, encode_once):
    """Greedy captions as (images, words)."""
    word = torch.zeros(len(images), dtype=torch.long)
    state = torch.zeros(len(images), model.width)
    places = model.encode(images) if encode_once else None
    captions = []
    for _ in range(longest):
        scores, state = model.next_word(images, word, state, places)  # planted
        scores[:, 0] = -torch.inf  # no second start
        word = scores.argmax(dim=1)
        captions.append(word)
    return torch.stack(captions, dim=1)


def sentences(captions):
    texts = []
    for row in captions.tolist():
        end = row.index(1) if 1 in row else len(row)
        texts.append(" ".join(WORDS[number] for number in row[:end]))
    return texts


def handle(model, images, args):
    """A batch: normalise, caption, make sentences."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return sentences(caption(model, images - mean, args.longest, encode_once=args.mended))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=12, help="words of a caption")
    parser.add_argument("--mended", action="store_true", help="encode the images once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        weights = Path(folder) / "captioner.pt"
        torch.save(Captioner(len(WORDS)).state_dict(), weights)
        model = load_captioner(weights)
        texts, seconds = [], []
        for images in load_images(args.images, args.size).split(args.batch_size):
            begin = time.perf_counter()
            texts += handle(model, images, args)
            seconds.append(time.perf_counter() - begin)
        (Path(folder) / "captions.txt").write_text("\n".join(texts))
    log.info("%d captions, the first: %s", len(texts), texts[0])
    log.info("median %.3f s a batch", statistics.median(seconds))


if __name__ == "__main__":
    main()
