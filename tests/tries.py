"""How many inputs a property is tried with: few by default, `STEPSCOPE_TIMES` as many where there is time.

CI, which tries the same inputs each time, tries half as many.
"""

from __future__ import annotations

import os
from typing import Final

TIMES: Final = int(os.environ.get("STEPSCOPE_TIMES", "1"))
_IS_CI: Final = bool(os.environ.get("CI")) and TIMES == 1


def tries(count: int) -> int:
    return max(count // 2, 1) if _IS_CI else TIMES * count
