"""Memory snapshots of torch: `torch.cuda.memory._dump_snapshot()` as a pickle, or the same as JSON."""

from stepscope.readers.torch_snapshot.reader import read, recognises

NAME = "torch_snapshot"
__all__ = ["NAME", "read", "recognises"]
