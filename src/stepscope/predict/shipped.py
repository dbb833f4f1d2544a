"""What was learned and comes with the package, as arrays."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt


def shipped_arrays(name: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of data/NAME.npz by their names; nothing in it is unpickled."""
    with files("stepscope").joinpath(f"data/{name}.npz").open("rb") as file, np.load(file) as arrays:
        return dict(arrays)
