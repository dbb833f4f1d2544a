"""How long operations take on a device: what was learned of their kind, else the roofline over its usual share."""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.devices import DevicePeaks
from stepscope.predict.convolution_times import CONVOLUTION_KINDS, convolution_times
from stepscope.predict.matrix_times import matrix_times
from stepscope.predict.memory_times import MEMORY_KINDS, memory_times
from stepscope.predict.operations import Operations
from stepscope.predict.roofline_times import OperationTimes, roofline_times

_LEARNED: Final = (
    (MEMORY_KINDS, memory_times),
    (("matrix",), matrix_times),
    (CONVOLUTION_KINDS, convolution_times),
)
"""The kinds of operations that were learned, and what predicts them."""


def operation_times(operations: Operations, device: DevicePeaks) -> OperationTimes:
    """Predict each operation's time on a device.

    Unknown are operations whose traffic or arithmetic is not a number, and those of a number type in which the device
    has no peak; operations on nothing take what any kernel takes.
    """
    times = roofline_times(operations, device)
    for kinds, learned in _LEARNED:
        mine = np.isin(operations.kind, kinds)
        if mine.any():
            times = times.replaced(mine, learned(operations.select(mine), device))
    return times
