"""How many inputs a property is tried with: few by default, `STEPSCOPE_TIMES` as many where there is time."""

from __future__ import annotations

import os
from typing import Final

TIMES: Final = int(os.environ.get("STEPSCOPE_TIMES", "1"))


def tries(count: int) -> int:
    return TIMES * count
