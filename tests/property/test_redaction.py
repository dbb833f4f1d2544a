"""Secrets planted in everything that a trace can hold, and looked for in everything that is written with --redact."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import polars as pl
import pytest

from stepscope.commands import main, parsers
from stepscope.report.redaction import Redactor
from tests.property.test_every_format import FORMATS, Format
from tests.simulator import Machine, write_kineto
from tests.simulator.allocator import SimulatedAllocator
from tests.simulator.gaudi import gaudi_bytes
from tests.simulator.programs import PROGRAMS
from tests.unit.readers.test_xla_json import profile

USER, HOST = "jane.roe", "node77"
PLANTED = (
    f"/home/{USER}/My Secretproject/Quarterlyplan/net.py(7): forward",
    f"triton_/home/{USER}/Secretproject/kernel.py",
    f"C:\\Users\\{USER}\\My Secretproject\\net.py(7): forward",
    "\\\\secretserver\\Secretshare\\net.py",
    f"file:///home/{USER}/Secretproject/x.json",
    f"/mnt/Secretproject/team data/net.py of {USER} on {HOST}.secretcluster.example",
    f"{USER}@secretcompany.example",
    "API_TOKEN=s3cr3tvalue train.py --password s3cr3tvalue --wandb-key=s3cr3tvalue",
    "Authorization: Bearer s3cr3tvalues3cr3tvalue",
    "hf_s3cr3tvalues3cr3tvalue and ghp_s3cr3tvalues3cr3tvalue",
    "https://someone:s3cr3tvalue@site.example/x",
    f"kernel_{USER}_{HOST}_fused",
    f"/home/{USER}",
)
SECRETS = ("jane", "roe", HOST, "secret", "s3cr3t", "quarterlyplan", "team data")
SQL = "select name as x from operators union select name from device_work union select name from annotations"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("diagnose", "TRACE", "--all", "--json", "OUT/d.json", "--markdown", "OUT/d.md", "--html", "OUT/d.html"),
    ("diagnose", "TRACE", "--all"),
    ("compare", "TRACE", "TRACE2", "--json", "OUT/c.json", "--markdown", "OUT/c.md", "--html", "OUT/c.html"),
    ("compare", "TRACE", "TRACE2"),
    ("whatif", "TRACE", "--json", "OUT/w.json"),
    ("predict", "TRACE", "--to", "H100-SXM", "--json", "OUT/p.json"),
    ("energy", "TRACE", "--json", "OUT/e.json"),
    ("operators", "TRACE", "--format", "csv"),
    ("operators", "TRACE"),
    ("kernels", "TRACE", "--format", "json"),
    ("kernels", "TRACE", "--format", "parquet", "--output", "OUT/k.parquet"),
    ("idle", "TRACE", "--format", "csv"),
    ("steps", "TRACE", "--format", "csv"),
    ("input", "TRACE"),
    ("roofline", "TRACE", "--format", "csv"),
    ("lines", "TRACE", "--json", "OUT/l.json"),
    ("lines", "TRACE"),
    ("modules", "TRACE", "--csv", "OUT/m.csv"),
    ("memory", "TRACE"),
    ("query", "TRACE", SQL, "--format", "csv"),
    ("query", "TRACE", "select * from lanes", "--format", "json"),
    ("query", "TRACE", "select process_name as x, thread, name as y from lanes", "--format", "csv"),
    ("query", "TRACE", "select * from frames", "--format", "csv"),
    ("query", "TRACE", "select * from idle", "--format", "csv"),
    *(
        ("export", "TRACE", f"OUT/{form}.out", "--format", form)
        for form in ("timeline", "chrome", "perfetto", "speedscope", "folded", "openmetrics")
    ),
    *(("export", "TRACE", f"OUT/{form}", "--format", form) for form in ("tensorboard", "csv", "parquet")),
)


OF_A_READER: Final = (
    *COMMANDS[:1],
    *(each for each in COMMANDS if each[0] == "query"),
    *(each for each in COMMANDS if each[0] in ("kernels", "memory") and len(each) < 5),
    ("export", "TRACE", "OUT/chrome.out", "--format", "chrome"),
)
"""Enough for a format of which another reader makes the tables that all commands redact."""


@pytest.mark.parametrize("text", PLANTED)
def test_each_in_a_table(text: str) -> None:
    frame = pl.DataFrame({"name": [text, f"a {text}", f"{text} b", f'{{"x": "{text}"}}']})
    assert found_in(repr(Redactor([USER, HOST]).redact(frame).to_dicts()).encode()) == []


@pytest.fixture(autouse=True)
def _on_that_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: HOST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "Secretproject of jane"
    made.mkdir()
    return made


def planted_machine() -> Machine:
    """A machine whose hosts, calls, frames, ranges and kernels are called what must not be told."""
    machine = PROGRAMS["input_bound_training"]()
    number = 0
    for host in machine.hosts:
        for each in host.slices:
            if not each.name.startswith("ProfilerStep#") and each.category in ("operator", "frame", "annotation"):
                each.name = PLANTED[number % len(PLANTED)] if each.category != "frame" else PLANTED[number % 3]
                number += 1
    for work in machine.works:
        if work.kind == "compute":
            object.__setattr__(work, "name", PLANTED[number % len(PLANTED)])
            number += 1
    return machine


def found_in(content: bytes) -> list[str]:
    """The secrets in these bytes, however they are packed."""
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    plain = content.lower().replace(b"\0", b"")
    return [secret for secret in SECRETS if secret.encode() in plain]


def written(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        yield path.name, path.name.encode()
        if path.suffix == ".parquet":
            yield path.name, repr(pl.read_parquet(path).to_dicts()).encode()  # its pages are packed
        elif path.is_file():
            yield path.name, path.read_bytes()


def leaks(
    trace: Path, out: Path, capsys: pytest.CaptureFixture[str], commands: tuple[tuple[str, ...], ...] = OF_A_READER
) -> dict[str, list[str]]:
    """Where which secret was found, of these commands that know --redact."""
    found = {}
    said = 0
    for number, command in enumerate(commands):
        place = out / str(number)
        place.mkdir()
        words = [word.replace("TRACE2", str(trace)).replace("TRACE", str(trace)) for word in command]
        words = [word.replace("OUT", str(place)) for word in words]
        capsys.readouterr()
        code = main([*words, "--redact"])
        screen = capsys.readouterr()
        assert code in (0, 2), (command, screen.err)
        secrets = found_in(screen.err.encode())
        if secrets:
            found[f"{command} on standard error"] = secrets
        if code == 2:  # what this format cannot answer
            continue
        said += 1
        for name, content in [("", screen.out.encode()), *written(place)]:
            secrets = found_in(content)
            if secrets:
                found[" ".join((*command, name))] = secrets
    assert said > len(commands) // 4
    return found


@pytest.mark.parametrize("dress", FORMATS, ids=[each.name for each in FORMATS])
def test_every_format(dress: Format, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = dress.write(planted_machine(), folder / f"{dress.name}{dress.suffix}")
    out = tmp_path / "out"
    out.mkdir()
    assert leaks(trace, out, capsys) == {}


def test_every_text_of_a_chrome_trace_and_every_output(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_kineto(planted_machine(), tmp_path / "plain.json")
    document = json.loads(plain.read_text())
    taken = iter(range(10**9))

    def planted() -> str:
        return PLANTED[next(taken) % len(PLANTED)]

    document |= {"hostName": f"{HOST}.secretcluster.example", "traceName": planted(), "command": planted()}
    document["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 2, "hostname": HOST, "note": planted()}
    for event in document["traceEvents"]:
        arguments = event.setdefault("args", {})
        if event["ph"] == "M":
            for name in ("name", "labels"):
                if name in arguments:
                    arguments[name] = planted()
        else:
            arguments |= {"Call stack": planted(), "Module Hierarchy": planted(), "Concrete Inputs": [planted()]}
            arguments |= {"Process Group Name": planted(), "Process Group Description": planted()}
    trace = folder / "planted.json"
    trace.write_text(json.dumps(document))
    out = tmp_path / "out"
    out.mkdir()
    assert leaks(trace, out, capsys, COMMANDS) == {}


def test_without_redact_the_secrets_are_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_kineto(planted_machine(), folder / "planted.json")
    assert main(["query", str(trace), SQL, "--format", "csv"]) == 0
    assert set(found_in(capsys.readouterr().out.encode())) == set(SECRETS)


def _gaudi(path: Path) -> None:
    machine = planted_machine()
    for work in machine.works:
        if work.kind == "compute" and len(work.name) > 30:  # of recipes, Gaudi's traces hold the first letters only
            object.__setattr__(work, "name", f"k_/home/{USER}/secret/k.py")
    path.write_bytes(gaudi_bytes(machine))


def _xla_json(path: Path) -> None:
    events = profile()
    for number, event in enumerate(each for each in events if each.get("ph") == "X"):
        arguments = event.setdefault("args", {})
        if "step_num" not in arguments:
            event["name"] = PLANTED[number % len(PLANTED)]
        arguments |= {"long_name": PLANTED[number % 7], "source": f"/home/{USER}/Secretproject/a.py:1"}
        arguments["tf_op"] = PLANTED[(number + 1) % len(PLANTED)]
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))


def _snapshot(path: Path) -> None:
    allocator = SimulatedAllocator()
    for text in PLANTED:
        allocator.allocate(4096, (f"/home/{USER}/Secretproject/net.py", 3, text), (f"{text}.py", 4, "forward"))
    path.write_text(json.dumps(allocator.snapshot()))


@pytest.mark.parametrize("write", [_gaudi, _xla_json, _snapshot])
def test_the_other_formats(
    write: Callable[[Path], None], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = folder / "trace.json"
    write(trace)
    out = tmp_path / "out"
    out.mkdir()
    assert leaks(trace, out, capsys) == {}


SECRET_FILE = f"/home/{USER}/My Secretproject/net.py"
SIDE_FILES = {
    "--xla-metrics": f"Counter: aten::{PLANTED[1]}\n  Value: 5\nCounter: MarkStep\n  Value: 11\n",
    "--xla-debug-log": f"Compilation Analysis: =====\nCompilation Analysis: Compilation Cause\n"
    f"Compilation Analysis:   {USER} in {SECRET_FILE}\nCompilation Analysis: Graph Info:\n"
    f"Python Frames:\n  forward ({SECRET_FILE}:7)\n\n"
    "pt-xla-profiler: CompileTime too frequent: 21 counts during 11 steps\n",
    "--gaudi-metrics": json.dumps(
        [{"metric_name": "cpu_fallback", "statistics": {"TotalNumber": 3, "FallbackOps": {PLANTED[1]: 3}}}]
    ),
    "--fallback-log": f"CPU fallback aten::op : self={PLANTED[1]}\n",
    "--compile-log": "V1128 03:50:48.913000 1 torch/_dynamo/utils.py:2009] "
    + json.dumps(
        {"compilation_metrics": {"co_name": "f", "co_filename": SECRET_FILE, "co_firstlineno": 3}, "frame_id": 0}
    ).replace("}, ", '}, "frame_compile_id": 0, ')
    + "\n",
}


@pytest.mark.parametrize("option", SIDE_FILES)
def test_side_files(option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_kineto(PROGRAMS["input_bound_training"](), folder / "trace.json")
    beside = folder / "beside"
    beside.write_text(SIDE_FILES[option])
    words = ["diagnose", str(trace), "--all", option, str(beside)]
    assert main([*words, "--json", "-"]) == 0
    assert found_in(capsys.readouterr().out.encode())
    reports = [word.replace("OUT", str(tmp_path / "out")) for word in COMMANDS[0][3:]]
    (tmp_path / "out").mkdir()
    assert main([*words, *reports, "--redact"]) == main([*words, "--redact"]) == 0
    screen = capsys.readouterr()
    outputs = [("screen", (screen.out + screen.err).encode()), *written(tmp_path / "out")]
    assert {name: found_in(content) for name, content in outputs if found_in(content)} == {}


@pytest.mark.parametrize("kind", ["missing", "empty", "damaged", "folder"])
@pytest.mark.parametrize("command", ["diagnose", "steps", "compare", "predict", "export", "prices", "lines", "plan"])
def test_refusals_and_warnings(command: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder.parent / "home" / USER / "My Secretproject" / "trace.json"
    file.parent.mkdir(parents=True)
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_text('{"traceEvents": [}' if kind == "damaged" else "")
    words = {
        "compare": [file, file],
        "predict": [file, "--device", "A40"],
        "export": [file, f"/home/{USER}/x", "--format", "csv"],
        "prices": ["import", file],
        "plan": ["--trace", file],
    }.get(command, [file])
    assert main([command, *map(str, words), "--redact"]) == 2
    screen = capsys.readouterr()
    assert screen.err
    assert found_in((screen.out + screen.err).encode()) == []


def test_a_warning_about_a_file_and_without_redact_all_of_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_kineto(planted_machine(), folder / "trace.json")
    beside = folder / "metrics-rank3.json"
    beside.write_text('[{"metric_name": "recipe_cache", "statistics": {"TotalHit": 18}}]')
    words = ["diagnose", str(folder), "--gaudi-metrics", str(beside)]
    with_redact, without = [], []
    for said, more in ((with_redact, ["--redact"]), (without, [])):
        main([*words, *more])
        said.append(capsys.readouterr().err)
    assert trace.exists()
    assert found_in(with_redact[0].encode()) == []
    assert "metrics-rank3.json" in with_redact[0]
    assert str(beside) in without[0]


def test_the_commands_with_the_option_are_those_of_the_security_page() -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    listed = page.partition("These commands have it: ")[2].partition(".")[0].split()
    _, commands = parsers()
    known = {name for name, parser in commands.items() if "--redact" in parser.format_help()}
    assert {word.strip("`,") for word in listed if "`" in word} == known
