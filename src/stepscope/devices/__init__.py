"""What accelerators can do: their makers' figures and what was measured, the user's own devices, and finding one.

data/devices.csv has the figures; docs/devices.md says what each means and where it comes from.
"""

from __future__ import annotations

from stepscope.devices.find import find_device, named_device
from stepscope.devices.peaks import NUMBER_TYPES, USUAL_BEST_SHARE, Described, DevicePeaks
from stepscope.devices.table import device_table, forget_devices

__all__ = [
    "NUMBER_TYPES",
    "USUAL_BEST_SHARE",
    "Described",
    "DevicePeaks",
    "device_table",
    "find_device",
    "forget_devices",
    "named_device",
]
