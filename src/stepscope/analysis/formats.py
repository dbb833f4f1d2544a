"""Formats that analyses must know apart, by `Metadata.format`."""

from __future__ import annotations

from typing import Final

XLA_FORMATS: Final = ("xplane", "xla_json")
"""Of XLA's profiler, for JAX, PyTorch/XLA and TensorFlow: operators are the runtime's own events, and the host runs far
ahead of the devices."""
