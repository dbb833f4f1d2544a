"""Intel Gaudi's traces: what torch.profiler writes on HPU, and hardware traces (.hltv) that are JSON."""

from stepscope.readers.gaudi.reader import read, recognises

NAME = "gaudi"
__all__ = ["NAME", "read", "recognises"]
