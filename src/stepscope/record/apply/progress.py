"""Progress bars, which are drawn for people and waited for by the step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying, made_here

DEFAULT_STEPS: Final = "20"
"""As few updates as the Gaudi optimisation guide advises at most."""
FLAGS: Final = (
    Flag(
        "quiet-progress",
        f"draws each bar of tqdm anew after N steps at the earliest ({DEFAULT_STEPS})",
        "no bar of tqdm was made",
        "Only bars of tqdm. A value that the program reads from the device to show it is still read.",
        Value("N", least=1, default=DEFAULT_STEPS),
    ),
)


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the bars that are made from now on draw seldom, also when their texts change."""
    module: Any = sys.modules.get("tqdm.std")  # torch imports it where it is installed
    if module is None:
        applying.could_not("quiet-progress", "tqdm is not installed")
        return
    wanted = int(chosen["quiet-progress"])
    bar = module.tqdm

    def change(arguments: dict[str, Any]) -> int:
        arguments["miniters"] = max(wanted, arguments.get("miniters") or 0)
        return int(arguments["miniters"])

    def say(made: Any, name: str, least: int) -> None:
        if not made.disable:
            applying.did("quiet-progress", f"{made_here('the bar')} is drawn after {least} steps at the earliest")

    def quietly(inner: Any, self: Any, *positional: Any, **named: Any) -> Any:
        bound = inspect.signature(inner).bind(self, *positional, **named)
        bound.arguments["refresh"] = False  # the next drawing shows it
        return inner(*bound.args, **bound.kwargs)

    applying.replace_constructor(bar, ["quiet-progress"], change, say)
    for name in ("set_postfix", "set_postfix_str", "set_description", "set_description_str"):
        applying.wrap(bar, name, quietly)
