"""rocprofv3 JSON (`rocprofv3 --output-format json`), which the rocprofiler-sdk tool writes for programs on AMD GPUs."""

from stepscope.readers.rocprof.reader import read, recognises

NAME = "rocprof"
__all__ = ["NAME", "read", "recognises"]
