"""Secrets planted in everything that a trace can hold, and looked for in everything that is written with --redact."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from stepscope.commands import main
from stepscope.report.redaction import Redactor
from tests.property.test_every_format import FORMATS, Format
from tests.simulator import Machine, write_kineto
from tests.simulator.programs import PROGRAMS

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
    ("predict", "TRACE", "--device", "H100-SXM5-80GB", "--json", "OUT/p.json"),
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


def leaks(trace: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Where which secret was found, of every command that knows --redact."""
    found = {}
    said = 0
    for number, command in enumerate(COMMANDS):
        place = out / str(number)
        place.mkdir()
        words = [word.replace("TRACE2", str(trace)).replace("TRACE", str(trace)) for word in command]
        words = [word.replace("OUT", str(place)) for word in words]
        capsys.readouterr()
        code = main([*words, "--redact"])
        screen = capsys.readouterr()
        assert code in (0, 2), (command, screen.err)
        if code == 2:  # what this format cannot answer
            continue
        said += 1
        for name, content in [("", screen.out.encode()), *written(place)]:
            secrets = found_in(content)
            if secrets:
                found[" ".join((*command, name))] = secrets
    assert said > len(COMMANDS) // 2
    return found


@pytest.mark.parametrize("dress", FORMATS, ids=[each.name for each in FORMATS])
def test_every_format_and_every_output(
    dress: Format, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = dress.write(planted_machine(), folder / f"{dress.name}{dress.suffix}")
    out = tmp_path / "out"
    out.mkdir()
    assert leaks(trace, out, capsys) == {}


def test_every_text_of_a_chrome_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert leaks(trace, out, capsys) == {}


def test_without_redact_the_secrets_are_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_kineto(planted_machine(), folder / "planted.json")
    assert main(["query", str(trace), SQL, "--format", "csv"]) == 0
    assert set(found_in(capsys.readouterr().out.encode())) == set(SECRETS)
