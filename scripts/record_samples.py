#!/usr/bin/env python3
"""Record the samples that the repository holds: profiles of examples/gpt2_training.py, made fit to share.

    .venv/bin/python scripts/record_samples.py

Needs PyTorch; where it finds a CUDA device, it also records the same samples there.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
# The loss that the example computes -> where its profile is kept; `scripts/demo` diagnoses the slow one.
SAMPLES = {
    "per-token": "examples/gpt2_per_token_loss_{device}.json.gz",
    "batched": "tests/fixtures/gpt2_batched_loss_{device}.json.gz",
}
LIMIT_BYTES = 600_000
# What torch.profiler writes beside the events and what a shared file need not tell.
PRIVATE_KEYS = ("host_name", "traceName", "trace_id")
ABSOLUTE_PATH = re.compile(r"(?<![\w.)-])(?:/[\w.+-]+){2,}|[A-Za-z]:\\")


def main() -> None:
    for device in ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]:
        for loss, pattern in SAMPLES.items():
            target = REPOSITORY / pattern.format(device=device)
            written = compress(shareable(record(loss, device)))
            if len(written) > LIMIT_BYTES:
                raise SystemExit(f"{target.name} would take {len(written)} bytes, more than {LIMIT_BYTES}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(written)
            print(f"{target.relative_to(REPOSITORY)}: {len(written)} bytes")


def record(loss: str, device: str) -> dict[str, Any]:
    """Profile the example in a process of its own and return the trace as torch.profiler wrote it.

    It runs as a module, so that its frames read examples/gpt2_training.py, and on one thread, so that a step
    takes about as long each time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        command = [sys.executable, "-m", "examples.gpt2_training", "--loss", loss, "--profile", str(path)]
        command += ["--device", "cuda" if device == "gpu" else "cpu"]
        subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})
        trace: dict[str, Any] = json.loads(path.read_bytes())
    return trace


def shareable(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace without what tells of the machine it was recorded on; raises SystemExit if a path is left."""
    trace = {key: value for key, value in trace.items() if key not in PRIVATE_KEYS}
    left = sorted({text for text in texts(trace) if ABSOLUTE_PATH.search(text)})
    if left:
        raise SystemExit(f"the trace still names {len(left)} paths of this machine, such as {left[0]!r}")
    return trace


def texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def compress(trace: dict[str, Any]) -> bytes:
    """gzip with neither a file name nor a time inside: the same trace gives the same bytes."""
    text = json.dumps(trace, separators=(",", ":"), ensure_ascii=False)
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


if __name__ == "__main__":
    main()
