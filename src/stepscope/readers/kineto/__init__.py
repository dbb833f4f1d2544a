"""The PyTorch profiler's Chrome-trace JSON, as Kineto writes it for CUDA, ROCm, MTIA and the CPU."""

from stepscope.readers.kineto.reader import read, recognises

NAME = "kineto"
__all__ = ["NAME", "read", "recognises"]
