"""Sentences for a terminal's width."""

from __future__ import annotations

import re
import textwrap
from typing import Final

_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|x|[num]?s|min|h|days|[KMGT]iB|B|GB/s|W|[mk]?J|kWh|k?g|times)(?!\w))")
_KEPT: Final = "\xa0"
"""No-break space: it keeps a number and its unit on one line while lines are made."""


def filled(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """The text as lines of at most so many characters; longer words stay whole, and so do numbers with their unit.

    Args:
        first, following: what the first line and the others begin with.
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(_KEPT, text),
        width,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines]
