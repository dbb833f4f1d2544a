"""A service that embeds images for search: requests come from a queue, one worker answers them."""

import argparse
import logging
import queue
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("embedder")


class Embedder(nn.Module):
    def __init__(self, width=48, outputs=256):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.ReLU(),
        )
        self.project = nn.Sequential(nn.Linear(4 * width * 64, 512), nn.ReLU(), nn.Linear(512, outputs))

    def forward(self, images):
        return F.normalize(self.project(self.convolutions(images).flatten(1)), dim=1)


def save_weights(path):
    """What a training has left."""
    torch.manual_seed(1)
    torch.save(Embedder().state_dict(), path)


def load_model(path):
    model = Embedder()  # planted
    model.load_state_dict(torch.load(path, weights_only=True))  # planted
    return model.eval()


class Service:
    """Answers requests with embeddings and keeps them in an index."""

    def __init__(self, path, keep_model):
        self.path = path
        self.model = load_model(path) if keep_model else None
        self.index = []

    @torch.inference_mode()
    def embed(self, images):
        model = self.model or load_model(self.path)  # planted
        mean = images.mean(dim=(2, 3), keepdim=True)
        std = images.std(dim=(2, 3), keepdim=True)
        return model((images - mean) / (std + 1e-5))

    def nearest(self, vectors, count=3):
        """The indexed vectors that are most similar."""
        if not self.index:
            return torch.empty(len(vectors), 0, dtype=torch.long)
        known = torch.cat(self.index)
        return (vectors @ known.T).topk(min(count, len(known)), dim=1).indices


def answer(service, request):
    """One request: embed, search, index. Returns the seconds it took."""
    begin = time.perf_counter()
    vectors = service.embed(request["images"])
    found = service.nearest(vectors)
    service.index.append(vectors)
    seconds = time.perf_counter() - begin
    if request["number"] % 10 == 0:
        log.info("request %d: %s in %.3f s", request["number"], tuple(found.shape), seconds)
    return seconds


def incoming(count, images, size):
    requests = queue.Queue()
    for number in range(count):
        requests.put({"number": number, "images": torch.rand(images, 3, size, size)})
    return requests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--mended", action="store_true", help="load the model when the service starts")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "embedder.pt"
        save_weights(path)
        service = Service(path, keep_model=args.mended)
        requests = incoming(args.requests, args.images, args.size)
        latencies = []
        while not requests.empty():
            latencies.append(answer(service, requests.get()))
    log.info("median %.3f s, slowest %.3f s", statistics.median(latencies), max(latencies))


if __name__ == "__main__":
    main()
