"""Answer requests for similar products: encode the requested products and search the catalogue."""

import argparse
import logging
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("lookalikes")
FEATURES = 256


class Encoder(nn.Sequential):
    def __init__(self, outputs=64):
        super().__init__(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, outputs))


class Catalogue:
    """Encoded products, and the search among them."""

    def __init__(self, model, products, batch_size=2000):
        with torch.inference_mode():
            self.vectors = torch.cat([F.normalize(model(part), dim=1) for part in products.split(batch_size)])

    def search(self, vectors, k):
        scores = F.normalize(vectors, dim=1) @ self.vectors.T
        return scores.topk(k, dim=1)


def predict(model, x):
    """The vector of one product."""
    model.eval()
    with torch.no_grad():
        return model(x.unsqueeze(0)).squeeze(0)  # planted


def encode(model, products, as_batch):
    if as_batch:
        with torch.inference_mode():
            return model(products)
    return torch.stack([predict(model, product) for product in products])  # planted


def answer(model, catalogue, products, args):
    """The ids and similarities of the k products most similar to each."""
    vectors = encode(model, products, as_batch=args.mended)
    similar, ids = catalogue.search(vectors, args.k)
    return ids.tolist(), similar.tolist()


def requests(products, count, size, seed=1):
    """Carts of products; noise stands for descriptions that differ."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = torch.randint(len(products), (size,), generator=generator)
        yield products[chosen] + 0.1 * torch.randn(size, FEATURES, generator=generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, default=30_000)
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--cart", type=int, default=64, help="products of a request")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--mended", action="store_true", help="encode all products of a request as a batch")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.manual_seed(0)
    products = torch.randn(args.products, FEATURES)
    model = Encoder().eval()
    catalogue = Catalogue(model, products)
    seconds, similarity = [], []
    for cart in requests(products, args.requests, args.cart):
        begin = time.perf_counter()
        _, similar = answer(model, catalogue, cart, args)
        seconds.append(time.perf_counter() - begin)
        similarity.append(statistics.mean(row[0] for row in similar))
    log.info("%d requests, median %.1f ms", len(seconds), statistics.median(seconds) * 1e3)
    log.info("similarity of the best %.4f", statistics.mean(similarity))


if __name__ == "__main__":
    main()
