"""Whatever becomes of a file that stepscope keeps, a command that reads it ends well or with one sentence about it."""

from __future__ import annotations

import array
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stepscope.commands import main
from stepscope.errors import StepscopeError
from stepscope.files import with_checksum
from stepscope.machine.devices import forget_devices
from stepscope.predict.cost.prices import PriceStore, shipped_prices
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.telemetry.store import Sample, Series, TelemetryStore
from stepscope.trace.cache import TraceCache
from stepscope.trace.line_records import LineRecords, Location, ThreadLines, write_lines
from stepscope.tune.next_trial import Outcome
from stepscope.tune.search import TuneStudy
from stepscope.tune.study import open_study
from stepscope.tune.sweep.file import parse_sweep
from stepscope.tune.sweep.study import SweepStudy
from stepscope.tune.trials import Configuration, Knob, Proposal, Space
from tests.tries import tries
from tests.unit.run_folders import made_run, recording
from tests.unit.small_traces import complete, kernel, launch
from tests.unit.tune.searches import measured

RUN: Final = (["runs", "show", "one"], ["history"], ["compare", "one", "one"], ["energy", "one"])
READ_BY: Final[dict[str, tuple[list[str], ...]]] = {
    "data/runs/one/run.json": (*RUN, ["runs"], ["diagnose", "one"]),
    "data/runs/one/rank0/recording-1.json": RUN,
    "data/runs/one/rank0/applied-1.json": (["diagnose", "one"],),
    "data/runs/one/rank0/trace-1.json.gz.lines": (["lines", "one"], ["diagnose", "one"]),
    "data/runs/one/rank0/telemetry/1.sqlite": (["telemetry", "one"], ["diagnose", "one"]),
    "data/runs/block/trace-steps.json": (["history"],),
    "data/runs/bench/rank0/steps-1.json": (["history"],),
    "data/runs/sizes/batch-sizes.json": (["history"], ["batch-size", "sizes"]),
    "data/runs.sqlite": (["runs"], ["history"], ["runs", "show", "one"]),
    "data/prices.csv": (["prices"],),
    "config/devices.toml": (["devices"], ["diagnose", "one"]),
    "cache/traces/limit.json": (["cache"], ["diagnose", "one"]),
    "sweep/study.sqlite": (["sweep", "show", "SWEEP"],),
    "tune/study.sqlite": (["tune"],),
}
"""Every kind of file that is kept, and commands that read it."""
STRANGE: Final = (None, True, -1, 2**70, float("nan"), 1e308, "", "x", [], {}, [[]], [None], {"": None}, [2**62] * 3)
BYTES: Final = ("empty", "cut", *["flip"] * tries(2), "zero", "noise", "folder", "other JSON", "deep")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One of everything that is kept, by its own writers."""
    home = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        _live_in(home, patch)
        one = made_run("one", recording([10**7] * 5, [2 * 10**7] * 5, trace="trace-1.json.gz", first_step=6))
        _trace(one)
        energy = {"format": 1, "machine": "m", "counters": [{"kind": "gpu", "device": "0", "method": "counter"}]}
        energy["windows"] = [{"first_step": 1, "steps": 5, "ns": 10**8, "joules": {"gpu 0": 5.0}}]
        left = recording([10**7] * 5, trace="trace-1.json.gz", energy=energy, facts={"versions": {"torch": "2"}})
        write_json(one.rank_folder(0) / "recording-1.json", with_checksum(left))
        said = {"applied": [{"flag": "fuse", "sentence": "fused"}], "not_applied": []}
        write_json(one.rank_folder(0) / "applied-1.json", with_checksum(said))
        store = TelemetryStore(one.rank_folder(0) / "telemetry" / "1.sqlite", {"rank": "0", "process": "7"})
        store.append(
            [Sample(Series("log", "loss"), 1_790_000_000 * 10**9 + at, at, 1.0 / (at + 1)) for at in range(50)]
        )
        store.close()
        bench = made_run("bench", recording())
        ends = {"world_size": 1, "machine": "m", "source": "optimizer", "clock": "host", "complete": True}
        ends |= {"ends_ns": [10**7 * at for at in range(9)], "own_profiler": False, "said": [], "losses": [1.0]}
        write_json(bench.rank_folder(0) / "steps-1.json", with_checksum(ends))
        _trace(made_run("block", recording()))
        sizes = made_run("sizes", recording())
        _trace(sizes)
        rows = [{"batch_size": 8, "exit_code": 0, "traces": ["rank0/trace-1.json.gz"]}]
        write_json(sizes.path / "batch-sizes.json", with_checksum({"runs": rows}))
        PriceStore(home / "data").add(list(shipped_prices())[:3])
        (home / "config").mkdir()
        card = '[[device]]\nname = "Card 7"\nvendor = "ACME"\nmemory_gb = 8\npeak_tflop_s = { fp32 = 2 }\n'
        (home / "config" / "devices.toml").write_text(card)
        assert main(["cache", "limit", "1GiB"]) == 0
        assert main(["history"]) == 0
        sweep = parse_sweep({"program": "a.py", "metric": "loss", "parameters": {"x": [1, 2, 3]}}, default_name="try")
        (home / "sweep").mkdir()
        study = SweepStudy(sweep, home / "sweep" / "study.sqlite", home / "sweep")
        for value in (0.5, 0.25):
            trial = study.begin()
            assert trial is not None
            study.complete(trial, value, 1)
        _tuned(home / "tune" / "study.sqlite")
        missing = [name for name in READ_BY if not (home / name).is_file()]
        assert missing == []
        yield home


def _live_in(home: Path, patch: pytest.MonkeyPatch) -> None:
    for kind in ("data", "config", "cache"):
        patch.setenv(f"STEPSCOPE_{kind.upper()}_DIR", str(home / kind))
    forget_devices()


def _trace(folder: RunFolder) -> None:
    marks = [complete(f"ProfilerStep#{at}", "user_annotation", 1000 * at, 900 + at) for at in range(5)]
    events = [*marks, complete("aten::mm", "cpu_op", 10, 20), launch(12, 1), kernel(20, 30, 1)]
    path = folder.new_trace_path(0)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    since, where = array.array("q", [0, 500]), array.array("i", [0, 0])
    lines = [ThreadLines(2, since.tobytes(), where.tobytes())]
    places = [Location("/home/alice/train.py", 7, "main")]
    write_lines(LineRecords(process=1, start_unix_ns=0, end_unix_ns=10**7, locations=places, threads=lines), path)


def _tuned(place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    study = TuneStudy(open_study(place, "search"))
    study.check_program({"words": ["train.py"]})
    space = study.keep_space(Space((Knob("compile"), Knob("workers", ("1", "2")))))
    with study.claimed(Proposal("screen", Configuration.of({"workers": "2"})), space) as claim:
        assert claim is not None
        claim.tell(Outcome(measured(-0.2)))


def _tune(place: Path) -> int:
    """What `stepscope tune` reads of a study before it runs anything."""
    try:
        study = TuneStudy(open_study(place, "search"))
        study.check_program({"words": ["train.py"]})
        study.space()
        study.trials()
    except StepscopeError:
        return 2
    return 0


def damaged(file: Path, kind: str, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    match kind:
        case "empty":
            content.clear()
        case "cut":
            del content[chance.randrange(1, len(content)) :]
        case "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case "zero":
            at = chance.randrange(len(content))
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        case "noise":
            content = bytearray(chance.randbytes(len(content)))
        case "other JSON":
            content = bytearray(chance.choice((b"[]", b"3", b"null", b'"\xff"', b'{"command": 1e999}', b"{}")))
        case "deep":
            content = bytearray(b"[" * 100_000)
    file.unlink()
    if kind == "folder":
        file.mkdir()
    else:
        file.write_bytes(content)


def strange_values(file: Path, chance: random.Random) -> None:
    """Put something else in place of some value of a JSON file, however deep, with a right checksum."""
    content = json.loads(file.read_bytes())
    content.pop("checksum", None)
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return strange_values(file, chance)
        key = chance.choice(keys)
        inner = place[key]
        if isinstance(inner, (dict, list)) and inner and chance.random() < 0.6:
            place = inner
            continue
        place[key] = chance.choice(STRANGE)
        file.write_text(json.dumps(with_checksum(content)))
        return None


def outcome(words: list[str], home: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    if words == ["tune"]:
        return _tune(file), []
    code = main([str(home / "sweep") if word == "SWEEP" else word for word in words])
    return code, [line for line in capsys.readouterr().err.splitlines() if str(file) in line]


@pytest.mark.parametrize("name", READ_BY)
def test_damage_is_one_sentence(
    name: str, intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(name)
    is_json = name.endswith(".json") and not name.endswith("limit.json")
    more = ["strange"] * tries(6) if is_json else ["flip", "zero"] * tries(3) if name.endswith(".sqlite") else []
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    _indexed(home)
    file = home / name
    shutil.copy2(file, tmp_path / "whole")
    for number, kind in enumerate([*BYTES, *more]):
        capsys.readouterr()
        if kind == "strange":
            strange_values(file, chance)
        else:
            damaged(file, kind, chance)
        commands = READ_BY[name]
        for words in {number: commands[number % len(commands)] for number in (number, number + 1)}.values():
            code, sentences = outcome(words, home, file, capsys)
            assert code in (0, 1, 2), (number, kind, words)
            assert len(sentences) <= 1, (number, kind, words, sentences)
        for each in file.parent.glob(f"{file.name}*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        shutil.copy2(tmp_path / "whole", file)


def _indexed(home: Path) -> None:
    """Have the index name the folders of the copy."""
    (home / "data" / "runs.sqlite").unlink()
    assert main(["runs"]) == 0


def test_what_can_be_read_is_read(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    _indexed(home)
    manifest = home / "data/runs/one/run.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "versions": [1], "exit_code": 5}))
    capsys.readouterr()

    assert main(["runs", "show", "one"]) == 0

    out, err = capsys.readouterr()
    assert RunManifest(tuple(content["command"])).command_line in out
    assert "exit code 5" in out
    assert (len(err.splitlines()), "run.json has changed" in err) == (1, True)


@pytest.mark.parametrize("content", [b"", b"not a database", None])
def test_the_index_comes_back_from_the_folders(
    content: bytes | None,
    intact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    _indexed(home)
    index = home / "data/runs.sqlite"
    whole = capsys.readouterr().out
    before = index.read_bytes()
    # None: another letter in the name of a run
    index.write_bytes(before.replace(b"sizespython", b"sizedpython") if content is None else content)

    assert main(["runs"]) == 0

    out, err = capsys.readouterr()
    assert out == whole
    assert len(err.splitlines()) == (0 if content == b"" else 1)


def test_a_price_that_was_changed_is_said(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    assert main(["prices"]) == 0
    assert capsys.readouterr().err == ""
    prices = home / "data/prices.csv"
    prices.write_text(prices.read_text().replace("9", "8", 1))

    assert main(["prices"]) == 0

    assert "prices.csv has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row[:2],
        lambda row: [*row, "more"],
        lambda row: ["nan" if "." in cell and cell.replace(".", "").isdigit() else cell for cell in row],
        lambda row: ["-1" if "." in cell and cell.replace(".", "").isdigit() else cell for cell in row],
        lambda row: ["1e999" if "." in cell and cell.replace(".", "").isdigit() else cell for cell in row],
    ],
)
def test_a_row_that_is_no_price_is_one_sentence(
    change: Callable[[list[str]], list[str]],
    intact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    prices = home / "data/prices.csv"
    header, first, *others = prices.read_text().splitlines()
    changed = ",".join(change(first.split(",")))
    prices.write_text("\n".join([header, changed, *others]))
    capsys.readouterr()

    assert main(["prices"]) == 2

    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert str(prices) in err


def test_a_step_cannot_take_less_than_no_time(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(intact, home)
    _live_in(home, monkeypatch)
    _indexed(home)
    capsys.readouterr()
    assert main(["history"]) == 0
    right = capsys.readouterr().out
    kept = home / "data/runs/block/trace-steps.json"
    content = json.loads(kept.read_text())
    del content["checksum"]
    kept.write_text(json.dumps(with_checksum({**content, "ns": [-1, *content["ns"][1:]]})))

    assert main(["history"]) == 0

    assert capsys.readouterr().out == right


def test_no_bit_of_the_caches_limit_changes_it_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TraceCache(tmp_path).set_limit(7 * 2**30)
    place = tmp_path / "limit.json"
    right = place.read_bytes()
    flipped = [
        right[:at] + bytes([right[at] ^ 1 << bit]) + right[at + 1 :] for at in range(len(right)) for bit in range(8)
    ]
    for content in [*flipped, *(right[:length] for length in range(len(right)))]:
        place.write_bytes(content)
        caplog.clear()
        assert TraceCache(tmp_path).limit() == 7 * 2**30 or len(caplog.records) == 1, content
