"""Settings of data-parallel training and what they follow from, for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.predict.data_parallel_settings import Reason, SettingsFromTrace
from stepscope.report.format import duration
from stepscope.report.tables import table_lines
from stepscope.report.wrapping import filled

_SIZES: Final[dict[str, type[pl.DataType]]] = {
    "bucket_cap_mb": pl.String,
    "messages": pl.Float64,
    "communication_ns": pl.Float64,
    "exposed_ns": pl.Float64,
}


def data_parallel_text(found: SettingsFromTrace, *, width: int, file: str | None = None) -> str:
    """Each setting with its reason, the sizes of buckets that were tried, and the code.

    Args:
        file: where the settings were written, for the code that reads them.
    """
    lines = [*filled(_head(found), width), ""]
    for reason in found.reasons:
        lines += [f"{reason.setting} = {_value(reason)}", *filled(reason.why, width, "    ", "    ")]
    if found.sizes:
        lines += ["", "Sizes of buckets, the mean step", *table_lines(_sizes(found), width=width)]
    lines += ["", "In the program", *_code(found, file)]
    return "\n".join(lines) + "\n"


def _head(found: SettingsFromTrace) -> str:
    among = f" among {found.ranks} ranks" if found.ranks is not None else ""
    head = f"Recorded steps{among} take {duration(found.step_ns)}."
    if found.latency_ns is not None and found.bandwidth_bytes_s is not None and found.sizes:
        speed = f"{found.bandwidth_bytes_s / 1e9:.2f} GB/s"
        head += f" A message takes {duration(found.latency_ns)}, and its bytes over {speed} each way."
        if found.recorded_ranks < 2:
            head += " Only one rank's trace was given: what it waits for the others counts as part of a message."
    return head


def _value(reason: Reason) -> str:
    if reason.value is None:
        return "(torch's own)" if reason.known else "(not known)"
    return f"{reason.value:g}" if not isinstance(reason.value, bool) else str(reason.value)


def _sizes(found: SettingsFromTrace) -> pl.DataFrame:
    """Sizes in a row that make the same messages share one line: of a small model all large ones do."""
    rows: list[tuple[str, float, float, float]] = []
    first = ""
    for each in found.sizes:
        size = "1, then 25" if each.megabytes is None else str(each.megabytes)
        costs = (each.messages, each.communication_ns, each.exposed_ns)
        if each.megabytes is not None and first and rows[-1][1:] == costs:
            rows[-1] = (f"{first} to {size}", *costs)
        else:
            rows.append((size, *costs))
            first = "" if each.megabytes is None else size
    return pl.DataFrame(rows, schema=dict(_SIZES), orient="row")


def _code(found: SettingsFromTrace, file: str | None) -> Iterator[str]:
    given = found.settings.arguments()
    if not given:
        yield "  " + (
            "nothing to change: torch's own settings are right, as far as the recording tells"
            if any(each.known for each in found.reasons)
            else "nothing to change: the recording does not tell which settings would be right"
        )
        return
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    yield f"  model = DistributedDataParallel(model, {words})"
    yield "or"
    yield "  from stepscope.remedies import DataParallelSettings"
    made = f"DataParallelSettings.load({file!r})" if file is not None else f"DataParallelSettings({words})"
    yield f"  settings = {made}"
    yield "  model = settings.ddp(model)                       # or: Trainer(strategy=settings.lightning_strategy())"


def data_parallel_json(found: SettingsFromTrace) -> dict[str, Any]:
    """The same for programs, and for `DataParallelSettings.load`."""
    written: dict[str, Any] = json.loads(found.settings.to_json())
    return {
        **written,
        "reasons": {each.setting: {"why": each.why, "known": each.known} for each in found.reasons},
        "step_ns": found.step_ns,
        "ranks": found.ranks,
        "recorded_ranks": found.recorded_ranks,
        "latency_ns": found.latency_ns,
        "bandwidth_bytes_s": found.bandwidth_bytes_s,
        "sizes": [
            {
                "bucket_cap_mb": each.megabytes,
                "messages": each.messages,
                "communication_ns": each.communication_ns,
                "exposed_ns": each.exposed_ns,
            }
            for each in found.sizes
        ],
    }
