"""`stepscope compare`: its reports, exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.report.comparison import TABLES
from tests.unit.rendered import documents_in
from tests.unit.small_traces import complete, kernel, launch

REPOSITORY = Path(__file__).resolve().parents[3]
HOSTILE = "gemm\x1b[31m<b>|@all"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
    monkeypatch.delenv("COLUMNS", raising=False)


def steps(load_us: int, *, device: bool = True, jitter_us: int = 1) -> list[dict[str, Any]]:
    """Eight steps that load a batch, every second one longer, and compute for 100 us, on the host or on a device."""
    events: list[dict[str, Any]] = []
    time = 0
    for number in range(8):
        begin, load = time, load_us + number % 2 * jitter_us
        events.append(
            complete("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", time, load)
        )
        time += load
        events.append(complete("aten::mm", "cpu_op", time, 5 if device else 100))
        if device:
            events += [launch(time + 1, number), kernel(time + 4, 96, number, name=HOSTILE)]
        time += 100
        events.append(complete(f"ProfilerStep#{number}", "user_annotation", begin, time - begin))
    return events


def write(path: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, **header}))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return str(write(tmp_path / "slow.json", steps(60)))


@pytest.fixture
def fast(tmp_path: Path) -> str:
    return str(write(tmp_path / "fast.json", steps(10)))


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compare", *arguments, "--json", "-"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_text_says_who_is_faster_and_why(slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", slow, fast]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert f"Before {slow}: 8 steps (annotated)" in text
    assert re.search(r"Faster: a step takes 110\.5 us instead of 160\.5 us, 31\.2 % less \(95 % interval: [0-9.]+ % to [0-9.]+ % less\)\.", text)  # fmt: skip  # noqa: E501
    assert "Of 50.0 us less a step, 50.0 us are idle time in which the host was loading data (input)." in text
    assert "One run per side:" in text
    assert "idle: input 60.5 us 10.5 us -50.0 us -31.2 %" in text
    assert "\x1b" not in text


def test_a_trace_against_itself(slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", slow, slow, "--fail-if-slower", "0%"]) == 0

    text = capsys.readouterr().out
    assert "No difference shown: a step takes 160.5 us in both, the same" in text
    assert "No cause of busy or idle time differs by 1 % of a step or more." in text
    assert "- Both sides are the same trace." in text


@pytest.mark.parametrize(
    ("order", "limit", "code"),
    [("slower", "3%", 1), ("slower", "0.03", 1), ("slower", "45%", 1), ("slower", "46%", 0), ("faster", "3%", 0)],
)
def test_exit_codes(
    order: str, limit: str, code: int, slow: str, fast: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes 45.2 % longer in the slow one."""
    paths = [fast, slow] if order == "slower" else [slow, fast]

    assert main(["compare", *paths, "--fail-if-slower", limit]) == code

    said = capsys.readouterr().err
    assert ("is slower by 45.2 %, --fail-if-slower" in said) == (code == 1)


def test_what_is_not_shown_fails_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given steps that differ so much that a third more may be chance."""
    paths = [str(write(tmp_path / f"{load}.json", steps(load, jitter_us=100))) for load in (10, 60)]

    assert main(["compare", *paths, "--fail-if-slower", "3%"]) == 0

    assert "No difference shown: a step takes 210.0 us instead of 160.0 us, 31.2 % more" in capsys.readouterr().out


def test_the_json(slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys, slow, fast)

    assert report["schema"] == 1
    (found,) = report["comparisons"]
    assert found["verdict"] == found["samples"]["verdict"] == "faster"
    assert (found["before"]["step_count"], found["before"]["total_ns"]) == (8, 8 * 160_500)
    assert found["difference_ns"] == -50_000
    assert sum(row["before_total_ns"] for row in found["causes"]) == found["before"]["total_ns"]
    assert sum(row["after_total_ns"] for row in found["causes"]) == found["after"]["total_ns"]
    assert sum(row["difference_ns"] for row in found["causes"]) == pytest.approx(-50_000)
    assert found["kernels"][0]["name"] == HOSTILE


def test_every_key_of_the_json_is_documented(slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "compare.md").read_text()
    report = reported(capsys, slow, fast)

    keys = {*report, *report["comparisons"][0]}
    for part in ("before", "samples", "causes", "operators", "kernels", "lines", "modules"):
        rows = report["comparisons"][0][part]
        keys |= set(rows if isinstance(rows, dict) else rows[0])
    keys -= {"before_calls", "after_calls"}  # "calls"
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_top_cuts_the_tables_but_not_the_causes(slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = reported(capsys, slow, fast, "--top", "1")["comparisons"]

    assert all(len(found[name]) <= 1 for name in TABLES if name not in ("causes", "settings"))
    assert len(found["causes"]) == found["causes_count"] >= 2


def test_the_markdown(slow: str, fast: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "comparison.md"

    assert main(["compare", fast, slow, "--markdown", str(target)]) == 0

    page = target.read_text()
    assert "**Slower: a step takes 160.5 us instead of 110.5 us, 45.2 % more" in page
    assert page.count("<details>") == page.count("</details>") >= 2
    assert "<summary>What the difference of a step is made of</summary>\n\n| cause |" in page
    assert "\x1b" not in page
    assert "<b>" not in page
    assert "@all" not in page
    assert "Slower" in capsys.readouterr().out  # the text is printed all the same


def test_several_against_the_first(slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", slow, fast, slow, "--fail-if-slower", "1%"]) == 0

    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["run", "step", "change", "verdict"]
    assert re.search(r"160\.5 us +the baseline", text)
    assert re.search(r"110\.5 us +31\.2 % less +faster", text)
    assert re.search(r"160\.5 us +the same +no difference shown", text)
    assert "(97.5 % interval:" in text  # of both together 95 %


def test_a_device_against_a_host(slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = str(write(tmp_path / "host.json", steps(60, device=False)))

    assert main(["compare", slow, host]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "No device was recorded after: " in text
    assert "busy: computing" in text
    assert "host: compute" in text


def test_traces_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [complete("aten::mm", "cpu_op", 0, 100)]
    path = str(write(tmp_path / "nosteps.json", one))

    assert main(["compare", path, path]) == 0

    text = capsys.readouterr().out
    assert "Too few steps: there are no steps before and after." in text
    assert "No steps were found before" in text


def test_folders_of_ranks_and_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, load in (("before", 60), ("after", 10)):
        for rank in range(2):
            ranks = {"distributedInfo": {"rank": rank, "world_size": 2}}
            write(tmp_path / folder / f"rank{rank}.json", steps(load), **ranks)
    (tmp_path / "after" / "rank9.json").write_text("")

    (found,) = reported(capsys, str(tmp_path / "before"), str(tmp_path / "after"))["comparisons"]

    assert (found["before"]["ranks"], found["after"]["ranks"]) == (2, 2)
    assert (found["samples"]["before_runs"], found["samples"]["before_steps"]) == (1, 8)
    assert found["before"]["step_count"] == 16
    assert any(note.startswith("Skipped: ") and "rank9.json" in note for note in found["notes"])


def test_what_was_not_read_of_a_side_is_said(slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(Path(slow).read_text()[:-400])

    (found,) = reported(capsys, slow, f"{cut},{cut}")["comparisons"]

    assert found["before"]["warnings"] == []
    assert {warning["kind"]: warning["count"] for warning in found["after"]["warnings"]}["truncated"] == 2
    (note,) = [note for note in found["notes"] if note.startswith("After, while reading: ")]
    assert "the file is truncated within its list of events; the events before that were read (2)" in note
    assert not any(note.startswith("Before, while reading") for note in found["notes"])


def run_folder(tmp_path: Path, name: str, load_us: int, workers: int) -> str:
    command = ("python", "train.py", "--workers", str(workers), "--api-key", "***")
    manifest = RunManifest(command, versions={"torch": "2.9"}, git={"commit": f"{workers}" * 40, "dirty": False})
    folder = RunFolder.create(tmp_path, name, manifest)
    write(folder.rank_folder(0) / "trace-1.json", steps(load_us))
    return str(folder.path)


def test_runs_differ_in_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [run_folder(tmp_path, name, load, workers) for name, load, workers in (("a", 60, 0), ("b", 10, 4))]

    (found,) = reported(capsys, *paths)["comparisons"]

    assert found["settings"] == [
        {"name": "git commit", "before": "000000000000", "after": "444444444444"},
        {"name": "option --workers", "before": "0", "after": "4"},
    ]


def test_several_runs_a_side(tmp_path: Path, slow: str, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(write(tmp_path / "other.json", steps(62)))

    (found,) = reported(capsys, f"{slow},{other}", f"{fast},{fast}")["comparisons"]

    assert (found["before"]["runs"], found["after"]["runs"]) == (2, 2)
    assert found["before"]["paths"] == [slow, other]
    assert found["samples"]["before_ns"] == 161_500


def test_steps_timed_without_the_profiler_that_say_the_opposite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a run whose recorded steps are longer, and whose other steps are shorter than the other run's."""
    paths = []
    for name, load, unprofiled_us in (("a", 60, 100), ("b", 10, 200)):
        place = run_folder(tmp_path, name, load, 0)
        folder = RunFolder.open(place)
        times = [
            {"first_step": 1, "recorded": False, "ns": [unprofiled_us * 1000 + number % 3 for number in range(40)]}
        ]
        folder.write_manifest(replace(folder.manifest(), recordings=({"rank": 0, "step_times": times},)))
        paths.append(place)

    assert main(["compare", *paths]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "Contradictory: timed without the profiler, a step takes 200.0 us instead of 100.0 us, 100.0 % more" in text
    assert "A recorded step takes 110.5 us instead of 160.5 us." in text
    assert "Slower" not in text
    assert "The verdict is about steps that ran without the profiler" in text


def test_redact_takes_out_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(write(tmp_path / "home" / "alice" / f"{load}.json", steps(load))) for load in (60, 10)]

    assert main(["compare", *places, "--redact", "--markdown", "-"]) == 0

    page = capsys.readouterr().out
    assert "alice" not in page
    assert str(tmp_path) not in page
    assert "60.json" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ONE"], "name two things to compare: stepscope compare BEFORE AFTER"),
        (["ONE", "missing.json"], "there is no file missing.json"),
        (["ONE", "EMPTY"], "empty.json is empty"),
        (["ONE", "BROKEN"], "broken.json is not a trace"),
        (["ONE", ",ONE"], "has an empty name between commas or at an end"),
        (["ONE", "nobody,ONE"], "there is no file, folder or run 'nobody'"),
        (["-", "-"], "standard input can be only one side of a comparison"),
        (["ONE", "ONE", "--json", "-", "--markdown", "-"], "only one report can go to standard output"),
        (["ONE", "ONE", "--fail-if-slower", "3"], "'3' is not a share of a step: write 10% or 0.1"),
        (["ONE", "ONE", "--fail-if-slower", "-1%"], "--fail-if-slower"),
        (["ONE", "ONE", "--top", "x"], "'x' is not a whole number of rows"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], said: str, slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "broken.json").write_text("no trace")
    places = {"ONE": slow, "EMPTY": str(tmp_path / "empty.json"), "BROKEN": str(tmp_path / "broken.json")}

    assert main(["compare", *(places.get(word, word) for word in arguments)]) == 2

    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_the_workflow_in_the_guide_is_the_example_and_fits_the_action() -> None:
    yaml = pytest.importorskip("yaml")
    example = (REPOSITORY / "examples" / "compare_workflow.yml").read_text()
    page = (REPOSITORY / "docs" / "how-to" / "pull-requests.md").read_text()
    assert f"```yaml\n{example}```\n" in page

    inputs = yaml.safe_load((REPOSITORY / "action.yml").read_text())["inputs"]
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(inputs)
    [used] = [
        step for step in yaml.safe_load(example)["jobs"]["compare"]["steps"] if "stepscope" in step.get("uses", "")
    ]
    assert used["with"].keys() <= inputs.keys()


class TestThePageAsAFile:
    @pytest.fixture
    def traces(self, tmp_path: Path) -> list[str]:
        """Two files of three steps, in which a frame names a folder of alice's."""
        paths = []
        for name, length_us in (("slow", 200), ("fast", 100)):
            events = [
                event
                for number in range(3)
                for event in (
                    complete(f"ProfilerStep#{number}", "user_annotation", length_us * number, length_us),
                    complete("/home/alice/secret/train.py(3): f", "python_function", length_us * number + 1, 50),
                    complete("aten::mm", "cpu_op", length_us * number + 5, 20),
                )
            ]
            paths.append(str(write(tmp_path / f"{name}.json", events)))
        return paths

    def test_it_has_what_differs_and_a_step_of_each_side(self, traces: list[str], tmp_path: Path) -> None:
        assert main(["compare", *traces, traces[0], "--html", str(tmp_path / "page.html")]) == 0

        found = documents_in((tmp_path / "page.html").read_text())
        assert found["session"]["documents"] == ["compare"]
        assert found["session"]["others"] == ["fast.json", "slow.json"]
        assert found["compare"]["comparisons"][0]["after"]["name"] == traces[1]
        assert found["compare?with=1"]["comparisons"][0]["after"]["name"] == traces[0]
        drawn = [found[f"timeline{which}"] for which in ("", "?other=0", "?other=1")]
        assert [each["end"] - each["start"] for each in drawn] == [200_000, 100_000, 200_000]
        assert [len(found[f"steps{which}"]) for which in ("", "?other=0")] == [3, 3]

    def test_redacted_it_names_nobody(self, traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *traces, "--html", "-", "--redact"]) == 0

        page = capsys.readouterr().out
        assert page.startswith("<!doctype html>")
        assert "train.py(3): f" in page
        assert "alice" not in page
        assert "secret" not in page

    def test_only_one_report_goes_to_standard_output(
        self, traces: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["compare", *traces, "--html", "-", "--json", "-"]) == 2
        assert capsys.readouterr().err == "stepscope: only one report can go to standard output\n"
