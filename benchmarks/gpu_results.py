"""Keep the results of a campaign on a GPU, and renew the pages that quote them.

    python benchmarks/gpu_results.py FOLDER    keep what scripts/gpu_campaign wrote there, then renew the pages
    python benchmarks/gpu_results.py           renew the pages from what is kept

What is kept of a device lies in benchmarks/results/DEVICE, 2 MB at most: its summary with date and versions, its row of
the device table, the accuracy table and the other tables, without traces. A later campaign replaces an earlier one.
Pages quote them between `<!-- gpu: NAME -->` and `<!-- /gpu -->`; `BLOCKS` lists the names.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

import polars as pl  # noqa: E402

from benchmarks.gpu_campaign import summary  # noqa: E402
from benchmarks.gpu_campaign.results import Results, problems, write_whole  # noqa: E402

MOST_BYTES: Final = 2 * 10**6
NONE: Final = "Nothing is kept of a campaign on a GPU yet; [scripts/gpu_campaign]({up}gpu-campaign.md) makes it."
_FOLDERS: Final = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")
_ERROR: Final = 300
_BLOCK: Final = re.compile(r"(<!-- gpu: (\w+) -->\n).*?(<!-- /gpu -->)", re.DOTALL)


def keep(folder: Path, kept: Path) -> Path:
    """Keep what came of a campaign; returns the device's folder.

    Raises:
        ValueError: the folder holds no results of a device, or breaks their limits.
    """
    if not (folder / "summary.json").is_file():
        raise ValueError(f"{folder} holds no summary.json: it is no folder of results")
    if broken := list(problems(folder)):
        raise ValueError("; ".join(broken))
    results = Results.opened(folder)
    machine = results.results("environment").get("machine")
    if machine is None:
        raise ValueError(f"{folder} does not say which device it is of: run scripts/gpu_campaign --only environment")
    target = kept / (re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-") or "device")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for item in results.items.values():
        item.pop("log", None)
        if "error" in item:
            item["error"] = _FOLDERS.sub(".../", summary.reason(str(item["error"])))[:_ERROR]
    Results(target, results.about, results.items).save()
    summary.write(Results(target, results.about, results.items), ())
    devices = results.results("environment").get("devices")
    if devices:
        write_whole(target / "device.toml", devices["toml"].encode())
    if faults := results.results("faults"):
        accuracy_table(faults).write_parquet(target / "faults.parquet", compression="zstd")
    for table in sorted(folder.glob("*.parquet"), key=lambda file: file.stat().st_size):
        if taken(target) + table.stat().st_size > MOST_BYTES:
            print(f"{table.name} is left out: {MOST_BYTES:,} bytes are kept of a device at most")
            continue
        shutil.copyfile(table, target / table.name)
    if taken(target) > MOST_BYTES:
        raise ValueError(f"{target} takes {taken(target):,} bytes; at most {MOST_BYTES:,} are kept")
    return target


def taken(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def accuracy_table(faults: dict[str, Any]) -> pl.DataFrame:
    """One row for each program: what was planted, found, promised and gained; shares are of the step."""
    columns = ("first", "is_first", "line_named", "promised_share", "gained_share", "fault_ns", "clean_ns")
    rows = [
        {"program": name, "rules": each["rules"], **{key: each[key] for key in columns}, "alarms": len(each["alarms"])}
        for name, each in faults.items()
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def of_devices(kept: Path) -> list[Results]:
    """What is kept, by device."""
    return [Results.opened(path.parent) for path in sorted(kept.glob("*/summary.json"))]


def heading(results: Results) -> str:
    """The device, the date, and the versions that matter."""
    machine = results.results("environment")["machine"]
    packages = machine.get("packages", {})
    date = str(results.about.get("began"))[:10]
    dry = ", a dry run whose figures mean nothing" if results.about.get("is_dry") else ""
    return (
        f"**{machine['device']}**, {date}: PyTorch {packages.get('torch')}, CUDA {machine.get('cuda')}, stepscope at "
        f"commit {results.about.get('commit')}{dry}."
    )


def _faults(results: Results) -> Iterator[str]:
    if found := results.results("faults"):
        yield summary.faults_sentence(found)
        yield ""
        yield from summary.faults_table(found)


def _remedies(results: Results) -> Iterator[str]:
    if found := results.results("remedies"):
        yield from summary.gains_table(found)


def _overhead(results: Results) -> Iterator[str]:
    if found := results.results("overhead"):
        yield from summary.overhead_table(found)


def _power(results: Results) -> Iterator[str]:
    phases = results.results("prediction").get("power", {}).get("phases", {})
    if any(phases.values()):
        yield from summary.power_table(phases)


def _sweep(results: Results) -> Iterator[str]:
    sweep = results.folder / "sweep.parquet"
    if sweep.exists():
        counts = pl.read_parquet(sweep).group_by("kind").len().sort("kind")
        yield "| timed | cases |"
        yield "|---|---:|"
        yield from (f"| {kind} | {count:,} |" for kind, count in counts.iter_rows())


BLOCKS: Final[dict[str, Callable[[Results], Iterator[str]]]] = {
    "faults": _faults,
    "remedies": _remedies,
    "overhead": _overhead,
    "power": _power,
    "sweep": _sweep,
}


def block(name: str, devices: list[Results], up: str) -> str:
    """What stands between a page's marks."""
    parts = []
    for results in devices:
        lines = list(BLOCKS[name](results))
        if lines:
            parts.append("\n".join([heading(results), "", *lines]).replace("\n\n\n", "\n\n"))
    return "\n\n".join(parts or [NONE.format(up=up)])


def renewed(text: str, devices: list[Results], up: str) -> str:
    """A page with its blocks made anew; `up` leads from its folder to that of the pages."""
    return _BLOCK.sub(lambda found: f"{found[1]}{block(found[2], devices, up)}\n{found[3]}", text)


def renew(docs: Path, kept: Path) -> list[Path]:
    """Renew the pages; returns those that changed."""
    devices, changed = of_devices(kept), []
    for page in sorted(docs.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = renewed(text, devices, "../" * (len(page.relative_to(docs).parts) - 1))
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def main() -> None:
    """Keep and renew as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?")
    parser.add_argument("--kept", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results stay")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="whose pages are renewed")
    options = parser.parse_args()
    try:
        if options.folder is not None:
            is_dry = Results.opened(options.folder).about.get("is_dry")
            if is_dry and options.kept == parser.get_default("kept"):
                raise ValueError(f"{options.folder} is of a dry run, whose figures mean nothing: name another --kept")
            print(f"kept in {keep(options.folder, options.kept)}")
        for page in renew(options.docs, options.kept):
            print(f"renewed {page}")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
