"""Values of a decoded file as typed records; what does not fit is one kind of error."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def converted(value: Any, kind: type[_T]) -> _T:
    """Convert with msgspec.

    Raises:
        msgspec.ValidationError: the value does not fit, holds half of a surrogate pair, or is nested too deep.
    """
    try:
        return msgspec.convert(value, kind)
    except UnicodeEncodeError as error:
        raise msgspec.ValidationError(f"it holds text that is not Unicode: {error.object!r:.60}") from error
    except RecursionError as error:
        raise msgspec.ValidationError("its values are nested too deep") from error
