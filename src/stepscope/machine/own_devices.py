"""Names that moved to `machine.devices`."""

from stepscope.machine.devices import NUMBER_TYPES, USUAL_BEST_SHARE, DevicePeaks

__all__ = ["NUMBER_TYPES", "USUAL_BEST_SHARE", "DevicePeaks"]
