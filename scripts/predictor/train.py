"""Make the shipped predictor anew from published timings, always the same.

Needs the extra `predictor`. The folder holds the Parquet files that docs/prediction-model.md names:

    OMP_NUM_THREADS=1 python -m scripts.predictor.train FOLDER [memory_times matrix_times ...]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from scripts.predictor import convolution, matrix, memory
from scripts.predictor.model_arrays import arrays_of

DATA: Final = Path(__file__).resolve().parents[2] / "src" / "stepscope" / "data"


MODELS: Final[dict[str, Callable[[Path], object]]] = {
    "memory_times": memory.train,
    "matrix_times": matrix.train,
    "convolution_times": convolution.train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", help=f"only these of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    for name in arguments.models or MODELS:
        path = DATA / f"{name}.npz"
        fresh = path.with_name(f".{name}.npz")
        np.savez(fresh, **arrays_of(MODELS[name](arguments.folder)))
        os.replace(fresh, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
