"""Report what logs of collectives show: who does not come, what does not match, who comes late; text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import polars as pl

from stepscope.analysis.desync import Desync, Mismatch, Unfinished
from stepscope.readers.collective_logs import CollectiveLogs
from stepscope.report.document import Block, Document, Items, Section, Table, Text, section_if, stamped
from stepscope.report.format import count, duration, file_name, share

_MOST_NAMED: Final = 8
_SECOND_NS: Final = 1_000_000_000
_TELLING: Final = 0.6
"""Share of all lateness that one rank must cause to be named."""


def _ranks(logs: CollectiveLogs, processes: Sequence[int]) -> str:
    """Such as "rank 3", or "ranks 0, 1, 2 and 5 more"."""
    names = [logs.processes[each].name for each in processes]
    if len(names) == 1:
        return names[0]
    if all(logs.processes[each].rank is not None for each in processes):
        return f"ranks {_listed([str(logs.processes[each].rank) for each in processes])}"
    return _listed(names)


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMED:
        return f"{', '.join(words[:_MOST_NAMED])} and {count(len(words) - _MOST_NAMED)} more"
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _verb(processes: Sequence[int], one: str, several: str) -> str:
    return one if len(processes) == 1 else several


def headline(logs: CollectiveLogs, found: Desync) -> str:
    """What holds the job up, in one sentence; the first mismatch counts more than who waits, which it explains."""
    if found.mismatches:
        return f"{_mismatch(logs, found.mismatches[0])}."
    causes = [each for each in found.unfinished if each.is_cause]
    if found.unfinished and not causes:
        return "Ranks wait for each other in different groups: they call the groups' collectives in different orders."
    if causes:
        first = max(causes, key=lambda each: (bool(each.missing), len(each.waiting)))
        return f"{_unfinished(logs, found, first)}."
    return _latest(logs, found) or _all_is_well(logs)


def _all_is_well(logs: CollectiveLogs) -> str:
    here = {each.rank for each in logs.processes}
    unlogged = sorted({rank for ranks in logs.members.values() for rank in ranks} - here)
    without = f"; of {_numbers(unlogged)} there is no log" if unlogged else ""
    if logs.calls.is_empty():
        return f"No call is logged, so that nothing can be compared{without}."
    calls = count(logs.calls.height)
    return f"All {calls} logged calls match and are done, and no rank comes late more than others{without}."


def _latest(logs: CollectiveLogs, found: Desync) -> str:
    whole = int(found.arrivals["late_ns"].sum()) if found.arrivals.height else 0
    if not whole:
        return ""
    process, calls, last, late, _ = found.arrivals.row(0)
    if late < _TELLING * whole or last * 2 < calls:
        return ""
    name = logs.processes[process].name
    return (
        f"The others wait for {name}: it comes last to {share(last / calls)} of its {count(calls)} collectives, "
        f"{duration(late / max(last, 1))} after the rank before it in the mean."
    )


def _call(name: str, number: int, group: str) -> str:
    return f"{name} number {count(number)} of group {group}"


def _mismatch(logs: CollectiveLogs, found: Mismatch) -> str:
    said = "; ".join(
        f"{_ranks(logs, processes)} {_verb(processes, 'has', 'have')} {what or 'none'}"
        for what, processes in found.ranks.items()
    )
    if found.what == "call":
        return f"Ranks make different calls at number {count(found.number)} of group {found.group}: {said}"
    called = _call(found.name, found.number, found.group)
    return f"Ranks call {called} with a different {found.what}: {said}"


def _unfinished(logs: CollectiveLogs, found: Desync, one: Unfinished) -> str:
    names = dict.fromkeys(name for name, _ in one.calls.values())
    called = _call(" or ".join(names) or one.name, one.number, one.group)
    if one.missing:
        said = f"{_ranks(logs, one.missing)} {_verb(one.missing, 'has', 'have')} not come to {called}"
        text = said[0].upper() + said[1:]
        if one.waiting:
            text += f", in which {_ranks(logs, one.waiting)} {_verb(one.waiting, 'waits', 'wait')}"
        causes = [each for each in one.missing if each in found.causes]
        if causes and len(causes) < len(one.missing):
            text += f"; {_ranks(logs, causes)} {_verb(causes, 'waits', 'wait')} in no other group, so look there first"
        return text
    text = f"{_ranks(logs, one.waiting)} {_verb(one.waiting, 'is', 'are')} in {called}, which is not done"
    text = text[0].upper() + text[1:]
    if len(names) > 1:
        return f"{text}: their calls do not match"
    if one.not_started:
        behind = _ranks(logs, one.not_started)
        return f"{text}: on {behind} the device has not begun it, as on the others, so that earlier work holds it up"
    if one.unlogged is None:
        whether = f", nor whether it waits for {_ranks(logs, found.causes)}" if found.causes else ""
        return f"{text}; who else is in the group is not logged{whether}"
    if one.unlogged:
        return f"{text}: of {_numbers(one.unlogged)} there is no log"
    return f"{text}, though every logged rank has come to it"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_listed([str(rank) for rank in ranks])}"


def desync_blocks(logs: CollectiveLogs, found: Desync, *, headed: bool = False) -> Iterator[Block]:
    """Sections of what the logs show; `headed` by one that says it in a sentence."""
    if headed:
        yield Section(f"What the logs of collectives say ({', '.join(logs.kinds)})", (Text(headline(logs, found)),))
    yield from section_if(
        "What does not match",
        *_items([f"{_mismatch(logs, each)}.{_at(*each.places.values())}" for each in found.mismatches]),
    )
    has_cause = any(each.is_cause for each in found.unfinished)

    def follows(one: Unfinished) -> bool:
        return has_cause and bool(one.missing) and not one.is_cause

    waits = [
        f"{_unfinished(logs, found, each)}{', which follows from the others' if follows(each) else ''}."
        f"{_where(logs, each)}{_since(found, each)}"
        for each in sorted(found.unfinished, key=lambda each: not each.is_cause)
    ]
    yield from section_if("Who waits for whom", *_items([*waits, *_last_calls(logs, found)]))
    yield from section_if("What to do", *_items(list(advice(logs, found))))
    yield Section("Ranks", (Table(ranks_table(logs, found), "ranks"), *_by(found)))
    if found.rates.height:
        slow = [
            f"{kind.replace('_', '-')} of {count(size)} bytes: group {group} carries {low:,.1f} GB/s on each link, the "
            f"median of like groups {median:,.1f} GB/s. Compare its links, switches and hosts with the others'."
            for kind, size, group, low, median in found.slow
        ]
        rates = found.rates if (found.rates["algorithm"] != "").any() else found.rates.drop("algorithm")
        table = Table(rates, "exchanges", brief=tuple(rates.columns))
        yield Section("How fast data moves once the last rank has come", (table, *_items(slow)))
    yield from section_if(
        "Not in this report", *_items([f"{reason.removesuffix('.')}." for _, reason in logs.unreadable])
    )


def _by(found: Desync) -> tuple[Text, ...]:
    if not found.by:
        return ()
    why = (
        "the rank whose device spends least time in a collective came to it last"
        if found.by == "time on the device"
        else "by the times of the calls, on the hosts' clocks"
    )
    return (Text(f"Who comes last: {why}."),)


def _at(*places: str) -> str:
    known = list(dict.fromkeys(place for place in places if place))
    return f" {'It is' if len(places) == 1 else 'They are'} called at {_listed(known)}." if known else ""


def _where(logs: CollectiveLogs, one: Unfinished) -> str:
    """What each rank calls and where, once where all do the same."""
    by: dict[tuple[str, str], list[int]] = {}
    for waiting, call in one.calls.items():
        by.setdefault(call, []).append(waiting)
    if len(by) == 1:
        return _at(*(place for _, place in by))
    said = [
        f"{_ranks(logs, ranks)} {_verb(ranks, 'calls', 'call')} {name}" + (f" at {place}" if place else "")
        for (name, place), ranks in by.items()
    ]
    text = "; ".join(said)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _since(found: Desync, one: Unfinished) -> str:
    """Since when it waits, and how long by the latest call of any rank, the only later moment that dumps have."""
    if one.since_ns is None:
        return ""
    moment = datetime.fromtimestamp(one.since_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    least = waited_ns(found, one)
    words = f", for at least {duration(least)}" if least is not None and least >= _SECOND_NS else ""
    return f" It has waited since {moment}{words}."


def waited_ns(found: Desync, one: Unfinished) -> int | None:
    """How long a collective had waited at the latest call of any rank; None where no call came later."""
    if one.since_ns is None or found.latest_ns is None or found.latest_ns <= one.since_ns:
        return None
    return found.latest_ns - one.since_ns


def _last_calls(logs: CollectiveLogs, found: Desync) -> Iterator[str]:
    """Where the ranks were last for which others wait."""
    for process in found.causes[:_MOST_NAMED]:
        name, last = logs.processes[process].name, found.last_calls.get(process)
        if last is None:
            yield f"The log of {name} has no call."
            continue
        at = f" at {last.place}" if last.place else ""
        done = "is done" if last.is_done else "is not done"
        yield f"The last call of {name} is {_call(last.name, last.number, last.group)}{at}, which {done}."


def advice(logs: CollectiveLogs, found: Desync) -> Iterator[str]:
    """What to do about what holds the job up, a sentence or two for each kind of it."""
    for one in found.mismatches:
        if one.what == "call":
            yield (
                "Compare the lines of the calls that do not match: every rank has to make a group's calls in the same "
                "order, so look for a branch, a loop or a thread that differs between the ranks."
            )
        else:
            yield (
                f"Print the shape and number type of the tensor before {_call(one.name, one.number, one.group)} on "
                f"every rank: its {one.what} has to be the same everywhere."
            )
    if found.causes:
        ranks = _ranks(logs, found.causes)
        yield (
            f"Look at the end of the log of {ranks} for an error, and if its process still runs, at its stack: "
            "py-spy dump --pid PID, on its machine. The cause is what it does after its last call."
        )
    elif found.unfinished and not found.mismatches and not any(each.is_cause for each in found.unfinished):
        yield "Have all ranks call the collectives of different groups in one order."
    for each in found.unfinished:
        if each.not_started and each.is_cause:
            yield (
                f"Find what {_ranks(logs, each.not_started)} {_verb(each.not_started, 'has', 'have')} queued on the "
                f"device before {_call(each.name, each.number, each.group)}: a trace of it, or cuda-gdb, shows it."
            )
        elif each.unlogged and each.is_cause:
            yield f"Collect the dump of {_numbers(each.unlogged)}, and look whether the process still runs."


def _items(sentences: Sequence[str]) -> tuple[Items, ...]:
    return (Items(tuple(sentences)),) if sentences else ()


def ranks_table(logs: CollectiveLogs, found: Desync) -> pl.DataFrame:
    """Columns rank, host, calls, last_call, last (how often it came last), late_ns, waits_ns."""
    arrivals = {row[0]: row[1:] for row in found.arrivals.iter_rows()}
    rows, has_groups = [], logs.calls["group"].n_unique() > 1
    for index, process in enumerate(logs.processes):
        last_call = found.last_calls.get(index)
        calls = 0 if last_call is None else last_call.calls
        called = "" if last_call is None else f"{last_call.name} {last_call.number}"
        if last_call is not None and has_groups:
            called += f" of group {last_call.group}"
        _, last, late, waits = arrivals.get(index, (None, None, None, None))
        rows.append((process.name, process.host, calls, called, last, late, waits))
    schema = {"rank": pl.String, "host": pl.String, "calls": pl.Int64, "last_call": pl.String, "times_last": pl.Int64,
              "late_ns": pl.Int64, "waits_ns": pl.Int64}  # fmt: skip
    table = pl.DataFrame(rows, schema=schema, orient="row")
    return table.drop(
        [
            name
            for name in ("host", "times_last", "late_ns", "waits_ns")
            if not table[name].cast(pl.String).replace("", None).count()
        ]
    )


def desync_document(path: str, logs: CollectiveLogs, found: Desync) -> Document:
    """The report of logs without traces."""
    name = file_name(path)
    head = Section(name, (Text(headline(logs, found), "headline"),), style="summary", is_quiet=True)
    return Document(name, (head, *desync_blocks(logs, found)), whole="--json -")


def desync_record(path: str, logs: CollectiveLogs, found: Desync) -> dict[str, Any]:
    """What logs of collectives show, as JSON: ranks by their names, times in nanoseconds."""

    def names(processes: Sequence[int]) -> list[str]:
        return [logs.processes[each].name for each in processes]

    return {
        "path": path,
        "headline": headline(logs, found),
        "kinds": logs.kinds,
        "causes": names(found.causes),
        "mismatches": [
            {
                "group": each.group,
                "number": each.number,
                "name": each.name,
                "differs": each.what,
                "ranks": {what: names(processes) for what, processes in each.ranks.items()},
                "where": each.places,
            }
            for each in found.mismatches
        ],
        "unfinished": [
            {
                "group": each.group,
                "number": each.number,
                "name": each.name,
                "waiting": names(each.waiting),
                "missing": names(each.missing),
                "not_started": names(each.not_started),
                "unlogged_ranks": each.unlogged,
                "is_cause": each.is_cause,
                "calls": [
                    {"rank": logs.processes[process].name, "name": name, "where": place}
                    for process, (name, place) in each.calls.items()
                ],
                "since_unix_ns": each.since_ns,
                "waited_ns_at_least": waited_ns(found, each),
            }
            for each in found.unfinished
        ],
        "advice": [*advice(logs, found)],
        "ranks": ranks_table(logs, found),
        "exchanges": found.rates,
        "slow_groups": [
            {"kind": kind, "bytes": size, "group": group, "bus_gb_per_s": low, "median_gb_per_s": median}
            for kind, size, group, low, median in found.slow
        ],
        "unreadable": [{"path": path, "reason": reason} for path, reason in logs.unreadable],
    }


def desync_json(path: str, logs: CollectiveLogs, found: Desync) -> dict[str, Any]:
    return stamped(collectives=desync_record(path, logs, found))
