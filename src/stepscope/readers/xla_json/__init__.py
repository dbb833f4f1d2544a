"""XLA's profiles as the Chrome trace that it writes beside the `.xplane.pb`: HOST.trace.json.gz."""

from stepscope.readers.xla_json.reader import read, recognises

NAME = "xla_json"
__all__ = ["NAME", "read", "recognises"]
