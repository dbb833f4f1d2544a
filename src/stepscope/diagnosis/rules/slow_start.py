"""# What it finds
A program that takes a long time to reach its first step.

# Why it costs time
Every start costs time: imports, building the model, loading weights, compiling. During experiments, and when jobs are
often restarted or scaled, it is a large part of the total. It makes no step slower, so the finding is a note.

# How it is measured
The time from the start of the process, according to the operating system, to the end of the first step seen, and the
time that torch.compile took until then, according to torch. Both are known only for programs that `stepscope run`
started.

# Known false positives
A long evaluation before training counts as part of the start.

# What to do
Keep the compiler's cache between runs, load weights directly to the device, and prepare data once.

# Reference
PyTorch: "Compile time caching in torch.compile".
"""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View

_WORTH_SAYING_NS: Final = 1_000_000_000


def check(view: View, limits: Limits) -> Answers:
    first = view.program.start.get("first_step_ns")
    limit = limits["start"]
    if first is None or first < limit or first < limits["steps"] * view.step_ns:
        return
    imported = view.program.start.get("torch_imported_ns")
    recording = view.program.start.get("recording_ns", first)
    begun_ns = (view.trace.metadata.origin_unix_ns or 0) - recording
    early = [
        each
        for each in view.program.compilations
        if each.duration_ns and each.start_unix_ns is not None and each.start_unix_ns <= begun_ns + first
    ]
    compiling = sum(each.duration_ns or 0 for each in early)
    figures = [Figure("time to the first step", first, "ns", limit), Figure("one step", view.step_ns, "ns")]
    if imported is not None:
        figures.append(Figure("until torch was imported", imported, "ns"))
    if early:
        figures.append(Figure("of it compiling", compiling, "ns"))
    where = tuple(
        Location(each.file, each.line, each.function, min((each.duration_ns or 0) / max(compiling, 1), 1.0))
        for each in sorted(early, key=lambda each: -(each.duration_ns or 0))[:3]
        if each.file is not None and each.line is not None
    )
    by_compiler = compiling > first / 3
    yield Found(
        f"the first step ended after {first / 1e9:,.0f} s"
        + (f", {compiling / 1e9:,.0f} s of them compiling" if compiling >= _WORTH_SAYING_NS else ""),
        0,
        basis="the start makes no step slower",
        confidence="high",
        severity="note",
        figures=figures,
        remedy=_COMPILER if by_compiler else _OTHER,
        where=where if by_compiler else (),
    )


_COMPILER: Final = Remedy(
    "Most of it is compilation: keep the compiler's cache where it survives the job, and compile the block that "
    "repeats instead of the whole model.",
    'os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/a/folder/that/stays"\n'
    "for block in model.blocks:\n    block.compile()        # the same code is compiled once",
)
_OTHER: Final = Remedy(
    "See what the program does before its first step: imports, weights, data.",
    "python -X importtime train.py 2> imports.txt\n"
    'with torch.device("cuda"):\n    model = Model()        # made on the device, not on the host and copied\n'
    'state = torch.load(path, map_location="cuda", mmap=True)',
)


RULE: Final = Rule(
    id="slow-start",
    title="The program takes long to reach its first step",
    thresholds={
        "start": Threshold(60_000_000_000, "ns", "time to the first step above which a start is slow"),
        "steps": Threshold(100, "count", "number of steps that the start must outweigh"),
    },
    check=check,
)
