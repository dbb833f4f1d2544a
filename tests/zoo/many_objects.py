"""A recommender whose records lie in memory as Python objects.

Planted: Python's collector walks through all of them again and again, because each batch is parsed into new ones.
Expected: garbage-collection
"""

import gc
import json

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.zoo import command
from tests.zoo.models import Recommender

BATCH = 512
TABLES = 8


def main() -> None:
    options = command.options(__doc__)
    users = [{"user": number, "history": [number], "friends": [number + 1]} for number in range(60_000)]
    events = [[number, number + 1] for number in range(60)]
    record = {"numbers": [0.5] * 13, "categories": [[number] * 4 for number in range(TABLES)], "events": events}
    line = json.dumps(record)
    model = Recommender(TABLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if not options.fault:
        gc.collect()
        gc.freeze()
    records = []
    for _ in range(options.steps):
        records = [json.loads(line) for _ in range(BATCH)]  # planted
        numbers = torch.tensor([record["numbers"] for record in records])
        categories = torch.tensor([record["categories"] for record in records])
        loss = binary_cross_entropy_with_logits(model(numbers, categories), (numbers[:, 0] > 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(len(users), len(records))


if __name__ == "__main__":
    main()
