"""Files that are often taken for a trace, told by their first bytes, and what to do instead."""

from __future__ import annotations

import re
from typing import Final

HEAD_BYTES: Final = 65536
_TAR_AT: Final = 257
_REPORTS_OF_NSIGHT_SYSTEMS: Final = (".nsys-rep", ".qdrep", ".qdstrm")

_BLANK: Final = b" \t\r\n"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BINARY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TELLING_BYTES: Final = 256


def beginning(head: bytes) -> bytes:
    """A file's first bytes by which its format is recognised: of text, without what may stand before it.

    A newline is also how a message of Perfetto or XLA begins; its next bytes are none that text has.
    """
    text = head.removeprefix(_BYTE_ORDER_MARK).lstrip(_BLANK)
    return head if _BINARY.search(text[:_TELLING_BYTES]) else text


_BY_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"PAR1", "a Parquet file, not a trace"),
    (b"PK\x03\x04", "a zip archive: unpack it and give the trace inside"),
    (b"\x7fELF", "a program, not a trace"),
    (b"\x89PNG", "a picture, not a trace"),
    (b"BZh", "packed with bzip2: unpack it, or pack it with gzip or zstd"),
    (b"\xfd7zXZ\0", "packed with xz: unpack it, or pack it with gzip or zstd"),
    (b"\xff\xfe", "text in UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"%PDF", "a PDF document, not a trace"),
)
_BY_TEXT: Final[tuple[tuple[re.Pattern[bytes], str], ...]] = (
    (
        re.compile(rb'\A\{\s*"schema"\s*:\s*"[^"]*chakra|"nodes"\s*:\s*\['),
        "a PyTorch execution trace (a graph of operators without device times), not a profiler trace: "
        "record one with torch.profiler.profile and export_chrome_trace",
    ),
    (
        re.compile(rb"\A\[\s*\[\s*-?\d"),
        "a memory timeline (lists of times and sizes), not a profiler trace: "
        "record one with torch.profiler.profile and export_chrome_trace",
    ),
    (re.compile(rb'"\$schema"\s*:\s*"https://www\.speedscope\.app'), "a speedscope profile, not a trace"),
    (re.compile(rb'\A\{\s*"nbformat"|\A\{\s*"cells"\s*:\s*\['), "a Jupyter notebook, not a trace"),
    (
        re.compile(rb'\A\[\s*\{\s*"metric_name"\s*:'),
        "a metrics file of Intel Gaudi, not a trace: give it beside one, with "
        "stepscope diagnose TRACE --gaudi-metrics FILE",
    ),
    (
        re.compile(rb"^Metric: \w+\s*\n\s+TotalSamples: \d", re.MULTILINE),
        "a metrics report of PyTorch/XLA, not a trace: give it beside one, with "
        "stepscope diagnose TRACE --xla-metrics FILE",
    ),
    (
        re.compile(rb"^(?:Compilation|Execution) Analysis: |^pt-xla-profiler: ", re.MULTILINE),
        "debugging output of PyTorch/XLA, not a trace: give it beside one, with "
        "stepscope diagnose TRACE --xla-debug-log FILE",
    ),
    (
        re.compile(
            rb"^[^\n\"{]{0,200}CPU fallback [\w:.]+ : |^Frequency of op and op name that were executed on CPU",
            re.MULTILINE,
        ),
        "a log of operators that ran on the CPU, not a trace: give it beside one, with "
        "stepscope diagnose TRACE --fallback-log FILE",
    ),
    (re.compile(rb"\A<(?:!doctype|html|\?xml)", re.IGNORECASE), "a web page or XML document, not a trace"),
)


def what_it_is(head: bytes) -> str | None:
    """What a file that is no trace is, from its first unpacked bytes; None where that cannot be told."""
    for magic, name in _BY_MAGIC:
        if head.startswith(magic):
            return name
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return "a tar archive: unpack it and give the trace inside"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b'"traceEvents"' in text:
        return None
    return next((name for pattern, name in _BY_TEXT if pattern.search(text)), None)


def what_its_name_says(name: str, head: bytes) -> str | None:
    """What a binary file is whose first bytes are nowhere described, by the end of its name; None for other names.

    Args:
        name: the file's path.
        head: its first unpacked bytes.
    """
    ends = name.lower().endswith(_REPORTS_OF_NSIGHT_SYSTEMS)
    if not ends or head.startswith(b"SQLite format 3\0") or head.lstrip()[:1] in (b"{", b"["):
        return None
    return (
        "a report of Nsight Systems, which only that program reads: export it with "
        "nsys export --type sqlite --output OUT.sqlite IN.nsys-rep, and give OUT.sqlite"
    )
