"""The folder of results: the state of every item, tables, packed traces, and its limits. Needs the standard library."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

MOST_FILES: Final = 8
MOST_BYTES: Final = 16 * 10**6
PACKS: Final = ("traces-1.zip", "traces-2.zip", "traces-3.zip")
"""The many traces of faults do not take the last one, which keeps room for those of predictions."""
KEPT_STEPS: Final = 3
LARGEST_TRACE: Final = 2 * 10**6
"""Bytes of a packed trace; a larger one is thinned to KEPT_STEPS."""
FORMAT: Final = 1
OVER: Final = ("done", "skipped")
"""Outcomes that are not tried again."""
_LEVEL: Final = 12


@dataclass
class Results:
    """What came of a campaign, as `summary.json` holds it.

    Attributes:
        about: the device, versions, when it began.
        items: by path: outcome ("done", "failed", "skipped", "interrupted"), seconds, result or error.
    """

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, folder: Path) -> Results:
        """The results in this folder, which is made if it is missing.

        Raises:
            ValueError: its summary.json is damaged or of another version.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "summary.json"
        if not path.exists():
            return cls(folder)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"{path} is of format {found['format']}, and this campaign writes {FORMAT}")
            return cls(folder, dict(found["about"]), dict(found["items"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no summary of a campaign: {error!r}") from error

    def is_over(self, path: str) -> bool:
        """Whether this item needs no other try."""
        return self.items.get(path, {}).get("outcome") in OVER

    def note(self, path: str, outcome: str, seconds: float, **more: Any) -> None:
        """Keep what came of an item."""
        self.items[path] = {"outcome": outcome, "seconds": round(seconds, 1), **more}

    def save(self) -> None:
        """Write summary.json; no reader sees a part of it."""
        content = {"format": FORMAT, "about": self.about, "items": self.items}
        write_whole(self.folder / "summary.json", (json.dumps(content, indent=1) + "\n").encode())

    def results(self, part: str) -> dict[str, dict[str, Any]]:
        """What the items of a part that are done gave, by name."""
        return {
            path.partition("/")[2]: item["result"]
            for path, item in self.items.items()
            if path.startswith(f"{part}/") and item["outcome"] == "done"
        }

    def carry(self, path: str, kept: Path) -> list[str]:
        """Take what an item kept into the folder; returns what found no room."""
        left_out = []
        for file in sorted(each for each in kept.rglob("*") if each.is_file()):
            if file.suffix == ".parquet":
                if file.stat().st_size <= MOST_BYTES:
                    shutil.copyfile(file, self.folder / file.name)
                    continue
            elif self._pack(path, file):
                continue
            left_out.append(file.name)
        return left_out

    def _pack(self, path: str, file: Path) -> bool:
        """Add a trace to the first pack that has room for it."""
        name, content = packed(file)
        name = f"{path}/{name}"
        for pack in PACKS[:-1] if path.startswith("faults/") else PACKS[::-1]:
            target = self.folder / pack
            if target.exists() and target.stat().st_size + len(content) + 1000 > MOST_BYTES:
                continue
            if len(content) + 1000 > MOST_BYTES:
                return False
            with zipfile.ZipFile(target, "a") as archive:  # members are packed already
                if name in archive.namelist():  # of an earlier try of a failed item
                    name = name.replace("/", f"/again-{len(archive.namelist())}-", 1)
                archive.writestr(name, content)
            return True
        return False


def packed(file: Path) -> tuple[str, bytes]:
    """A file's name and bytes, packed with zstd (gzip without that module); a large trace is thinned first."""
    content, name = file.read_bytes(), file.name.removesuffix(".gz")
    ending = "zst" if find_spec("zstandard") else "gz"
    if name.endswith(".lines"):  # what the recorder knows, packed already; it is named as its trace
        return name.replace(".gz.lines", f".{ending}.lines"), content
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    result = _compressed(content)
    if len(result) > LARGEST_TRACE:
        result = _compressed(thinned(content, KEPT_STEPS))
    return f"{name}.{ending}", result


def _compressed(content: bytes) -> bytes:
    if find_spec("zstandard") is None:
        return gzip.compress(content, 9)
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(content)


def thinned(content: bytes, steps: int) -> bytes:
    """A Kineto trace with only so many of its marked steps, and what the device did for them; else as it is.

    The first whole steps count: what begins in them, and device work whose launch does, by its correlation number.
    """
    trace = json.loads(content)
    events = trace["traceEvents"]
    marks = sorted(
        (float(each["ts"]), float(each["ts"]) + float(each.get("dur", 0)))
        for each in events
        if each.get("cat") == "user_annotation" and str(each.get("name", "")).startswith("ProfilerStep#")
    )[:steps]
    if not marks:
        return content
    begin, end = marks[0][0], marks[-1][1]
    inside = [begin <= float(each.get("ts", begin)) < end for each in events]
    launched = {
        each["args"]["correlation"]
        for each, is_inside in zip(events, inside, strict=True)
        if is_inside and str(each.get("cat", "")).endswith(("_runtime", "_driver")) and "correlation" in each["args"]
    }

    def is_kept(event: dict[str, Any], is_inside: bool) -> bool:
        correlation = event.get("args", {}).get("correlation") if isinstance(event.get("args"), dict) else None
        is_device = str(event.get("cat", "")) in ("kernel", "gpu_memcpy", "gpu_memset")
        return correlation in launched if is_device else is_inside or event.get("ph") == "M"

    trace["traceEvents"] = [each for each, here in zip(events, inside, strict=True) if is_kept(each, here)]
    return json.dumps(trace, separators=(",", ":")).encode()


def problems(folder: Path) -> Iterator[str]:
    """What breaks the limits of a folder of results, in sentences."""
    files = [each for each in folder.rglob("*") if each.is_file()]
    if len(files) > MOST_FILES:
        yield f"{folder} holds {len(files)} files; at most {MOST_FILES} can be carried away"
    for file in files:
        if file.stat().st_size > MOST_BYTES:
            yield f"{file.name} has {file.stat().st_size:,} bytes; at most {MOST_BYTES:,} can be carried away"
        if file.parent != folder:
            yield f"{file.relative_to(folder)} lies in a folder; results lie side by side"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)
