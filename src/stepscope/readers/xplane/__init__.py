"""XLA's profiles, `.xplane.pb`: what JAX, PyTorch/XLA and TensorFlow record on TPU, GPU and CPU."""

from stepscope.readers.xplane.reader import NAME, read, recognises

__all__ = ["NAME", "read", "recognises"]
