"""Profiles of Nsight Systems, as `nsys export --type sqlite` writes them."""

from stepscope.readers.nsight_systems.reader import NAME, read, recognises

__all__ = ["NAME", "read", "recognises"]
