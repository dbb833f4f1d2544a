"""A comparison for a browser: the verdict, both steps drawn on one scale, what the difference is made of, tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from stepscope.analysis.host import CAUSES
from stepscope.analysis.picture import StepPicture
from stepscope.compare.comparison import Comparison, SideSummary
from stepscope.compare.statistics import SampleComparison
from stepscope.report.comparison import (
    advice,
    change_words,
    detectable_sentences,
    interval_words,
    settings_table,
    share_of,
    shown_tables,
    side_sentence,
    verdict_sentence,
    where_sentences,
)
from stepscope.report.comparison_formats import overview
from stepscope.report.format import duration, printable, share
from stepscope.report.html.page import page
from stepscope.report.html.picture import View, cause_view, picture_view, table_view
from stepscope.report.tables import showing

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

Pictures = tuple[StepPicture | None, StepPicture | None]


def html_comparison(comparisons: Sequence[Comparison], pictures: Sequence[Pictures], *, top: int) -> bytes:
    """The page of one or more programs beside the same baseline; works offline, and no name in it is ever markup.

    Args:
        pictures: for each comparison a step of either side.
        top: rows of each table, 0 for all.

    Raises:
        ValueError: there is no comparison, or not one pair of pictures for each.
    """
    if not comparisons:
        raise ValueError("a page needs at least one comparison")
    views = [_view(number, *each, top) for number, each in enumerate(zip(comparisons, pictures, strict=True))]
    several = len(views) > 1
    return page(
        "compare.html.j2",
        title=f"{views[0]['before']} and {f'{len(views)} others' if several else views[0]['after']}",
        comparisons=views,
        overview=table_view(overview(comparisons)) if several else None,
    )


def _view(number: int, comparison: Comparison, pictures: Pictures, top: int) -> View:
    samples = comparison.samples
    tables = [
        {
            "id": f"c{number}-{position}",
            "title": shown.title,
            "showing": showing(shown.frame.height, shown.total, shown.things),
            **table_view(shown.frame),
        }
        for position, shown in enumerate(shown_tables(comparison, top))
    ]
    return {
        "id": f"c{number}",
        "before": _short(comparison.before),
        "after": _short(comparison.after),
        "sides": [side_sentence(comparison.before), side_sentence(comparison.after)],
        "verdict": samples.verdict.split(" ")[0],
        "headline": verdict_sentence(samples),
        "where": [*where_sentences(comparison), *advice(comparison)],
        "tiles": list(_tiles(samples)),
        "keep": [printable(each) for each in (*detectable_sentences(samples), *samples.caveats, *comparison.notes)],
        "steps": _steps(f"c{number}", comparison, pictures),
        "causes": _causes(comparison),
        "tables": tables,
        "starred": bool(comparison.lines["exact_line"].eq(False).any()),
        "settings": table_view(settings_table(comparison)) if comparison.settings.height else None,
    }


def _short(side: SideSummary) -> str:
    """The last part of a path, which is what tells two sides apart, most often."""
    return printable(side.name).replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def _tiles(samples: SampleComparison) -> Iterator[View]:
    """The numbers to see first: both steps, the change, each with its interval."""
    sides = (
        ("Step before", samples.before_ns, samples.before_low_ns, samples.before_high_ns),
        ("Step after", samples.after_ns, samples.after_low_ns, samples.after_high_ns),
    )
    for label, ns, low_ns, high_ns in sides:
        if ns is not None:
            interval = (
                f"{duration(low_ns)} to {duration(high_ns)}" if low_ns is not None and high_ns is not None else ""
            )
            yield {"label": label, "value": duration(ns), "note": interval}
    if samples.change is not None:
        low, high = samples.change_low, samples.change_high
        interval = interval_words(low, high) if low is not None and high is not None else "one step tells no interval"
        yield {
            "label": f"Change, {share_of(samples.confidence)} interval",
            "value": change_words(samples.change),
            "note": interval,
        }


def _steps(number: str, comparison: Comparison, pictures: Pictures) -> list[View]:
    """Both pictures on the scale of the longer one."""
    longest = max((picture.duration_ns for picture in pictures if picture is not None), default=0)
    names = zip(("Before", "After"), (comparison.before, comparison.after), pictures, strict=True)
    return [
        {
            "id": f"{number}-{side.lower()}",
            "side": side,
            "name": _short(summary) + _rank(summary),
            "note": _note(summary),
            **picture_view(picture, scale_ns=longest),
        }
        for side, summary, picture in names
        if picture is not None
    ]


def _rank(side: SideSummary) -> str:
    """Which of several ranks is drawn."""
    rank = side.trace.metadata.rank
    return f", rank {rank}" if side.ranks > 1 and rank is not None else ""


def _note(side: SideSummary) -> str:
    if side.step_source == "none":
        return "everything that was recorded: no steps were found"
    return f"{duration(side.step_ns)} in the mean" if side.step_count > 1 else ""


def _causes(comparison: Comparison) -> View:
    """Each cause's time before and after; as bars on one scale, and the differences around a middle line."""
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
        "device": comparison.basis != "host",
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
