"""Perfetto traces: protobuf packets of track events."""
