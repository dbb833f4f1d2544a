"""Tests that run on the CPU everywhere, and on a CUDA device where there is one."""

from __future__ import annotations

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
"""Parametrises `device`; what only a device has is marked `gpu` and `needs_gpu` itself."""
