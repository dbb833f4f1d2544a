"""Loaders tuned by trial, copies ahead of the step, batches of similar length."""

from __future__ import annotations

from remedy_measurements import Measurement

_READ = """
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    "Samples that take 4 ms to come, as from a disk far away."
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((256,), float(index))

def compute(batch):
    "A step of 50 ms of an accelerator, in which the processors have nothing to do."
    time.sleep(0.05)
"""
_STEPS = """
batches = iter(loader)
measured(lambda: compute(next(batches)), warmup=8, steps=20)
"""

_LENGTHS = """
from torch.utils.data import DataLoader

lengths = torch.randint(16, 513, (1600,)).tolist()
samples = [torch.randint(1, 1000, (length,)) for length in lengths]
embedding = torch.nn.Embedding(1000, 128, padding_idx=0)
layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
"""
_TRAIN = """
batches = iter(loader)

def step():
    "Eight batches, because their lengths differ."
    for _ in range(8):
        layer(embedding(next(batches))).mean().backward()

measured(step, warmup=2, steps=4)
"""

_COPIES = """
from torch.utils.data import DataLoader, TensorDataset

images = torch.randn(256, 3, 224, 224)
weight = torch.randn(4096, 4096, device="cuda")

def compute(batch):
    total = batch.sum()
    for _ in range(6):
        total = total + (weight @ weight).sum()
    return total

loader = DataLoader(TensorDataset(images), batch_size=64)

def endless(loader):
    while True:
        yield from loader
"""

MEASUREMENTS = (
    Measurement(
        "tune_loader",
        "16 samples of 4 ms each, a step of 50 ms; read in the training process, and as it chose in 5 s",
        _READ + "loader = DataLoader(Files(), batch_size=16)" + _STEPS,
        _READ
        + "from stepscope.remedies import tune_loader\n"
        + "loader = tune_loader(Files(), 50, batch_size=16, budget_s=5).loader()"
        + _STEPS,
    ),
    Measurement(
        "LengthBucketSampler",
        "one encoder layer of width 128, batches of 16 of 16 to 512 tokens, forward and backward of 8",
        _LENGTHS
        + "from stepscope.remedies import PadCollate\n"
        + "loader = DataLoader(samples, batch_size=16, shuffle=True, collate_fn=PadCollate(multiple=64))"
        + _TRAIN,
        _LENGTHS
        + "from stepscope.remedies import LengthBucketSampler, PadCollate\n"
        + "sampler = LengthBucketSampler(lengths, 16)\n"
        + "loader = DataLoader(samples, batch_sampler=sampler, collate_fn=PadCollate(multiple=64))"
        + _TRAIN,
    ),
    Measurement(
        "prefetch_to_device",
        "64 images of 224 x 224 a step, copied from pageable memory in the step",
        _COPIES
        + "batches = endless(loader)\nmeasured(lambda: compute(next(batches)[0].to('cuda')), warmup=4, steps=20)",
        _COPIES
        + "from stepscope.remedies import prefetch_to_device\n"
        + "batches = endless(prefetch_to_device(loader))\n"
        + "measured(lambda: compute(next(batches)[0]), warmup=4, steps=20)",
        needs="cuda",
    ),
)
