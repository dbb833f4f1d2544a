"""Draw a comparison's page: both steps on one scale, and each cause's time before and after."""

from __future__ import annotations

from typing import Any, Final

from stepscope.analysis.host import CAUSES
from stepscope.analysis.picture import StepPicture
from stepscope.compare.comparison import Comparison
from stepscope.compare.record import SideSummary
from stepscope.report.format import duration, share
from stepscope.report.html.picture import View, cause_view, picture_view
from stepscope.report.words.common import file_name

_BUSY_COLOURS: Final = {
    "communication": "var(--k-communication)",
    "copies": "var(--k-copy)",
    "other work": "var(--k-other)",
}
_WHOSE: Final = {
    "device": "What the device did, and why it did nothing",
    "host": "What the main thread did",
    "mixed": "What the device did, and why it did nothing; where there is none, what the main thread did",
}
_BUSY_MEANINGS: Final = {
    "computing": "the device computed",
    "communication": "the device only communicated",
    "copies": "the device only copied",
    "other work": "the device did other work",
    "compute": "the host was computing",
}


def steps_view(key: str, comparison: Comparison, pictures: tuple[StepPicture | None, StepPicture | None]) -> View:
    """Both step pictures on the scale of the longer one."""
    longest = max((picture.duration_ns for picture in pictures if picture is not None), default=0)
    names = zip(("Before", "After"), (comparison.before, comparison.after), pictures, strict=True)
    steps = [
        {
            "id": f"{key}-{side.lower()}",
            "side": side,
            "name": file_name(summary.name) + _rank(summary),
            "note": _note(summary),
            **picture_view(picture, scale_ns=longest),
        }
        for side, summary, picture in names
        if picture is not None
    ]
    legend = {cause["label"]: cause for step in steps for cause in step["legend"]}
    kinds = sorted({kind for step in steps for kind in step["kinds"]})
    is_device = comparison.basis != "host"
    return {"id": key, "steps": steps, "legend": list(legend.values()), "kinds": kinds, "device": is_device}


def _rank(side: SideSummary) -> str:
    rank = side.trace.metadata.rank
    return f", rank {rank}" if side.ranks > 1 and rank is not None else ""


def _note(side: SideSummary) -> str:
    if side.step_source == "none":
        return "everything that was recorded: no steps were found"
    return f"{duration(side.step_ns)} in the mean" if side.step_count > 1 else ""


def changes_view(comparison: Comparison) -> View:
    """Each cause's time before and after as bars on one scale, and the differences around a centre line."""
    steps_ns = (comparison.before.step_ns, comparison.after.step_ns)
    whole = max(*steps_ns, 1.0)
    rows = comparison.causes.rows(named=True)
    widest = max((abs(row["difference_ns"]) for row in rows), default=0.0) or 1.0
    views = [_cause(row, whole, widest, comparison.basis == "mixed") for row in rows]
    order = sorted(views, key=lambda view: (view["kind"] != "busy" and not view["computing"], -view["most"]))
    bars = [
        {
            "label": side,
            "time": duration(ns),
            "width": 100 * ns / whole,
            "segments": [
                {**view, "width": view["widths"][place], "time": view["times"][place]}
                for view in order
                if view["widths"][place] > 0
            ],
        }
        for place, (side, ns) in enumerate(zip(("Before", "After"), steps_ns, strict=True))
    ]
    total = comparison.difference_ns
    return {
        "rows": views,
        "bars": bars,
        "legend": order,
        "total": {
            "times": [duration(ns) for ns in steps_ns],
            "difference": _signed(total),
            "share": _signed_share(total / max(steps_ns[0], 1.0)),
        },
        "whose": _WHOSE[comparison.basis],
    }


def _cause(row: dict[str, Any], whole: float, widest: float, mixed: bool) -> View:
    kind, name = row["kind"], row["name"]
    computing = kind == "busy" or name == "compute"
    view = cause_view(name)
    if computing:
        colour = _BUSY_COLOURS.get(name, "var(--busy)")
        view.update(colour=colour, hatched=False, ink="var(--ink)", meaning=_BUSY_MEANINGS.get(name, ""))
        view["label"] = "computing" if name == "compute" else view["label"]
    if kind == "idle":
        view["label"] = f"idle: {view['label']}"
    elif kind == "host" and mixed:
        view["label"] = f"host: {view['label']}"
    view["meaning"] = view["meaning"] or CAUSES.get(name, "")
    return {
        **view,
        "kind": kind,
        "computing": computing,
        "times": [duration(row["before_ns"]), duration(row["after_ns"])],
        "widths": [100 * row["before_ns"] / whole, 100 * row["after_ns"] / whole],
        "most": max(row["before_ns"], row["after_ns"]),
        "difference": _signed(row["difference_ns"]),
        "share": _signed_share(row["share"]),
        "more": row["difference_ns"] > 0,
        "reach": 50 * abs(row["difference_ns"]) / widest,
    }


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else '−' if ns < 0 else ''}{duration(abs(ns))}"


def _signed_share(part: float) -> str:
    words = share(abs(part))
    return words if words.startswith("<") or not part else f"{'+' if part > 0 else '−'}{words}"
