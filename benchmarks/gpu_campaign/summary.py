"""summary.md: what came of the campaign, the most important first. Needs the standard library."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.gpu_campaign.plan import PARTS, Item
from benchmarks.gpu_campaign.results import Results, write_whole

_MOST_ERRORS: Final = 40
_EXCEPTION: Final = re.compile(r"[\w.]+(?:Error|Exception|Exit|Failed)\b")


def write(results: Results, items: Sequence[Item]) -> None:
    """Write the page anew."""
    write_whole(results.folder / "summary.md", ("\n".join(lines(results, items)) + "\n").encode())


def lines(results: Results, items: Sequence[Item]) -> Iterator[str]:
    """The page."""
    machine = results.results("environment").get("machine", {})
    dry = " (dry run: the figures mean nothing)" if results.about.get("is_dry") else ""
    yield f"# Campaign on {machine.get('device', results.about.get('device', 'an unknown device'))}{dry}"
    yield ""
    yield from _state(results, items)
    yield ""
    yield from _versions(results, machine)
    for part, told in (
        ("tests", _tests),
        ("faults", _faults),
        ("remedies", _remedies),
        ("prediction", _prediction),
        ("overhead", _overhead),
    ):
        if found := results.results(part):
            yield from ("", f"## {part.capitalize()}", "")
            try:
                yield from list(told(found))
            except Exception as error:  # the campaign goes on, and summary.json has the figures
                yield f"This part could not be put into words: {type(error).__name__}: {error}."
    yield from _troubles(results)


def _state(results: Results, items: Sequence[Item]) -> Iterator[str]:
    yield "| part | done | failed | skipped | not reached | seconds |"
    yield "|---|---:|---:|---:|---:|---:|"
    for part in PARTS:
        paths = dict.fromkeys([item.path for item in items if item.part == part])
        paths |= dict.fromkeys(path for path in results.items if path.startswith(f"{part}/"))
        if not paths:
            continue
        entries = [results.items[path] for path in paths if path in results.items]
        count = Counter(entry["outcome"] for entry in entries)
        open_items = len(paths) - len(entries) + count["interrupted"]
        seconds = sum(entry["seconds"] for entry in entries)
        yield f"| {part} | {count['done']} | {count['failed']} | {count['skipped']} | {open_items} | {seconds:.0f} |"


def _versions(results: Results, machine: dict[str, Any]) -> Iterator[str]:
    about = results.about
    yield f"Begun {about.get('began')}, stepscope at commit {about.get('commit') or 'unknown'}."
    if machine:
        packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
        cuda = machine.get("cuda") or "none"
        yield f"Python {machine.get('python')} on {machine.get('system')}, CUDA {cuda}; {packages}."
    if driver := machine.get("driver"):
        yield f"\n    {driver.replace(chr(10), chr(10) + '    ')}"


def _tests(found: dict[str, Any]) -> Iterator[str]:
    total = {key: sum(each[key] for each in found.values()) for key in ("passed", "failed", "skipped")}
    yield f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped."
    for each in found.values():
        for name, text in each["failures"].items():
            last = text.strip().splitlines()[-1] if text.strip() else ""
            yield f"- {name}: {last}"


def _faults(found: dict[str, Any]) -> Iterator[str]:
    yield faults_sentence(found)
    yield ""
    yield from faults_table(found)


def faults_sentence(found: dict[str, Any]) -> str:
    """How often the planted fault came first, and how far promises were off."""
    judged = [each for each in found.values() if each["rules"]]
    first = sum(bool(each["is_first"]) for each in judged)
    quiet = sum(not each["alarms"] for each in found.values())
    errors = [
        abs(each["promised_share"] - each["gained_share"]) / each["gained_share"]
        for each in judged
        if each["promised_share"] is not None and each["gained_share"] > 0
    ]
    error = f"{statistics.median(errors):.0%}" if errors else "unknown"
    return (
        f"The planted fault was the first finding in {first} of {len(judged)} programs; {quiet} of {len(found)} clean "
        f"twins raised nothing above 5 % of the step; the median relative error of promised savings was {error}."
    )


def faults_table(found: dict[str, Any]) -> Iterator[str]:
    """A row for each program."""
    yield "| program | expected | first finding | line named | promised | gained | step, ms | clean, ms | its alarms |"
    yield "|---|---|---|---|---:|---:|---:|---:|---|"
    for name, each in found.items():
        first = each["first"] or "-"
        mark = "" if each["is_first"] in (True, None) else " (not expected)"
        named = {True: "yes", False: "no", None: "-"}[each["line_named"]]
        promised = "-" if each["promised_share"] is None else f"{each['promised_share']:.0%}"
        alarms = ", ".join(f"{rule} {share:.0%}" for rule, share, _ in each["alarms"]) or "-"
        yield (
            f"| {name} | {' or '.join(each['rules']) or 'none'} | {first}{mark} | {named} | {promised} "
            f"| {each['gained_share']:.0%} | {each['fault_ns'] / 1e6:.2f} | {each['clean_ns'] / 1e6:.2f} | {alarms} |"
        )


def _remedies(found: dict[str, Any]) -> Iterator[str]:
    yield from gains_table(found)
    tuned = found.get("tune")
    if tuned:
        yield ""
        yield f"`stepscope tune` on gpt2: {tuned_sentence(tuned)}"


def gains_table(found: dict[str, Any]) -> Iterator[str]:
    """A row for each remedy of each workload."""
    yield "| workload | applied | step without, ms | with, ms | times faster (95 % interval) | outcome |"
    yield "|---|---|---:|---:|---:|---|"
    for name, each in found.items():
        for flag, gain in each.get("gains", {}).items():
            before, after = gain["before_ns"], gain["after_ns"]
            if before is None or after is None:
                continue
            low, high = gain["change_low"], gain["change_high"]
            interval = "" if low is None or high is None else f" ({1 / (1 + high):.2f} to {1 / (1 + low):.2f})"
            applied = "; ".join(sorted({str(outcome.get("sentence", "")) for outcome in gain["applied"]}))
            times = f"{before / 1e6:.2f} | {after / 1e6:.2f} | {before / after:.2f}{interval}"
            yield f"| {name} | `{flag}` | {times} | {applied} |"


def tuned_sentence(tuned: dict[str, Any]) -> str:
    """What tune found."""
    best, proof = tuned.get("best"), (tuned.get("proof") or {}).get("measured")
    kept = f"; {', '.join(best['settings'])}" if best else ""
    times = f": step {proof['before_ns'] / 1e6:.2f} ms -> {proof['after_ns'] / 1e6:.2f} ms" if proof else ""
    return f"{tuned['outcome']}{kept}{times}."


def _prediction(found: dict[str, Any]) -> Iterator[str]:
    sweep = found.get("sweep")
    if sweep:
        yield f"{sweep['rows']:,} operators timed (sweep.parquet)."
        for what, count in sweep["failures"].items():
            yield f"- {count} times: {what}"
    phases = found.get("power", {}).get("phases", {})
    if any(phases.values()):
        yield from power_table(phases)
    elif phases:
        yield "No power was read: NVML answered nothing (is nvidia-ml-py there?)."
    workloads = [name for name in found if name not in ("sweep", "power")]
    if workloads and phases:
        yield ""
    if workloads:
        yield f"Recorded, with traces: {', '.join(workloads)}."


def power_table(phases: dict[str, Any]) -> Iterator[str]:
    """A row for each phase."""
    yield "\n| phase | power, W | clock, MHz | temperature, °C | reasons of a lower clock |"
    yield "|---|---:|---:|---:|---|"
    for name, counters in phases.items():

        def cell(counter: str, counters: dict[str, Any] = counters) -> str:
            found = counters.get(counter)
            return "-" if found is None else f"{found['median']:.0f} ({found['low']:.0f} to {found['high']:.0f})"

        reasons = [reason for reason in counters.get("throttle_reasons", {}).get("seen", []) if reason]
        masks = ", ".join(f"{reason:#x}" for reason in reasons) or "-"
        yield f"| {name} | {cell('power_w')} | {cell('sm_clock_mhz')} | {cell('temperature_c')} | {masks} |"


def _overhead(found: dict[str, Any]) -> Iterator[str]:
    yield from overhead_table(found)


def overhead_table(found: dict[str, Any]) -> Iterator[str]:
    """A row for each way of recording, a column for each step."""
    yield f"| ms a step | {' | '.join(f'bound by the {name}' for name in found)} |"
    yield "|---|" + "---:|" * len(found)
    for kind in next(iter(found.values()))["ms"]:
        yield f"| {kind} | {' | '.join(format(each['ms'][kind], '.2f') for each in found.values())} |"


def reason(error: str) -> str:
    """The line of an error that says what went wrong: the last that names an exception, else the last."""
    found = [line for line in error.strip().splitlines() if line.strip()]
    named = [line for line in found[1:] if _EXCEPTION.match(line)]
    return (named or found or [""])[-1].strip()


def _troubles(results: Results) -> Iterator[str]:
    """What failed, was skipped or found no room, with the reason."""
    told = {path: item for path, item in results.items.items() if "error" in item or "left_out" in item}
    if told:
        yield from ("", "## Not done, or not kept", "")
    for path, item in list(told.items())[:_MOST_ERRORS]:
        why = reason(str(item.get("error", "")))
        left = [f"no room for {', '.join(item['left_out'])}"] if "left_out" in item else []
        outcome = [f"{item['outcome']}: {why[:300]}"] if why else []
        yield f"- {path}: {'; '.join([*outcome, *left])}"
    if len(told) > _MOST_ERRORS:
        yield f"- {len(told) - _MOST_ERRORS} more: summary.json has all, with the ends of their logs"
