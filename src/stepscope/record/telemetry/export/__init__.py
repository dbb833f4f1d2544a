"""Telemetry for other tools: each module has `export(telemetry, folder) -> list[Path]`, the files or folders it made.

What could not be had is left out where the format has no word for it; NaN and infinities stay.
"""
