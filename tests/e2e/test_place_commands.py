"""`stepscope lines`, `stepscope modules` and flame graphs, as users run them on real recordings."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BATCHED, PER_TOKEN, Stepscope
from tests.unit.rendered import documents_in

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the example, recorded with lines as `stepscope run` records by default."""
    pytest.importorskip("torch")
    from tests.e2e.conftest import run_stepscope

    folder = tmp_path_factory.mktemp("runs")
    options = ["--steps", "2", "--warmup", "1", "--exit-after", "--no-diagnose", "--no-telemetry"]
    program = [str(EXAMPLES / "gpt2_training.py"), "--loss", "batched", "--steps", "6", "--device", "cpu"]
    outcome = run_stepscope("run", "--folder", str(folder), "--name", "gpt2", *options, *program)
    assert outcome.code == 0, outcome.err
    return folder / "gpt2"


def of(run: Stepscope, *words: str) -> Any:
    return run(*words, "--json", "-").json()


def test_the_costliest_line_is_the_loss_and_its_backward(run: Stepscope) -> None:
    report = of(run, "lines", PER_TOKEN)

    assert report["attributed_ns"] >= 0.95 * report["total_ns"]
    assert sum(line["total_ns"] for line in report["lines"]) == report["total_ns"]
    first = report["lines"][0]
    assert first["function"] == "per_token_loss"
    assert first["backward_ns"] > first["forward_ns"] > 0


def test_with_recorded_lines_nearly_everything_has_its_line_and_modules_their_names(
    run: Stepscope, recorded: Path
) -> None:
    lines, modules = of(run, "lines", str(recorded)), of(run, "modules", str(recorded))

    assert lines["steps"] >= 1
    assert lines["attributed_ns"] >= 0.99 * lines["total_ns"]
    assert all(line["exact_line"] for line in lines["lines"] if line["file"])
    optimizer = max(lines["lines"], key=lambda line: int(line["optimizer_ns"]))
    source = (EXAMPLES / "gpt2_training.py").read_text().splitlines()
    assert source[optimizer["line"] - 1].strip() == "optimizer.step()"
    assert sum(module["self_ns"] for module in modules["modules"]) == modules["total_ns"] == lines["total_ns"]
    by_name = {module["module"]: module for module in modules["modules"]}
    assert {"GPT2", "GPT2.blocks.0.attention", "GPT2.head"} <= set(by_name)
    assert by_name["GPT2.head"]["calls"] == modules["steps"]
    assert by_name["GPT2.head"]["backward_ns"] > 0


def test_a_file_with_its_costs(run: Stepscope, recorded: Path, tmp_path: Path) -> None:
    text = run("lines", str(recorded), "gpt2_training.py").out
    whole = run("lines", str(recorded), "gpt2_training.py", "--all").out
    elsewhere = run("lines", PER_TOKEN, "gpt2_training.py", "--source-root", str(EXAMPLES)).out
    lost = run("lines", PER_TOKEN, "gpt2_training.py", "--source-root", str(tmp_path)).out

    step = next(line for line in text.splitlines() if line.endswith(" optimizer.step()"))
    assert step.split()[1] in ("ms", "us", "s")
    assert len(whole.splitlines()) > len(text.splitlines())
    assert "def per_token_loss" in elsewhere
    assert "the file was not found" in lost.splitlines()[0]


def test_lines_are_found_again_in_a_file_that_has_changed(run: Stepscope, recorded: Path, tmp_path: Path) -> None:
    source = (EXAMPLES / "gpt2_training.py").read_text()
    edited = source.replace("optimizer.step()", "optimizer.step()  # slow").replace("loss.backward()\n", "pass\n")
    (tmp_path / "gpt2_training.py").write_text("# one more line\n" + edited)
    report = of(run, "lines", str(recorded))

    whole = ["--all", "--source-root", str(tmp_path)]
    text = run("lines", str(recorded), "gpt2_training.py", *whole).out.splitlines()
    lost = run("lines", str(recorded), "gpt2_training.py", "--source-root", str(tmp_path.parent / "none")).err
    (tmp_path / "empty").mkdir()
    kept = run("lines", str(recorded), "gpt2_training.py", "--source-root", str(tmp_path / "empty")).out.splitlines()

    optimizer = max(report["lines"], key=lambda line: int(line["optimizer_ns"]))
    step = next(line for line in text if line.endswith("optimizer.step()  # slow"))
    assert f"{optimizer['line'] + 1}~" in step.split()
    assert "changed since" in text[0]
    assert "is not a folder" in lost
    assert any(line.endswith(" optimizer.step()") for line in kept)


def test_tables_on_the_terminal(run: Stepscope) -> None:
    lines, modules = run("lines", PER_TOKEN, "--top", "2").out, run("modules", PER_TOKEN, "--depth", "1").out

    assert lines.splitlines()[2].split()[:4] == ["line", "function", "total", "share"]
    assert "showing 2 of " in lines
    assert modules.splitlines()[-1].startswith("(outside of modules)")


def test_what_is_outside_of_modules_is_never_cut_off(run: Stepscope) -> None:
    modules = run("modules", PER_TOKEN, "--top", "3").out.splitlines()

    assert modules[0].endswith("; 5.0 % of it in modules.")
    assert modules[-3].startswith("(outside of modules)")
    assert modules[-1].startswith("showing 4 of ")


def test_csv_holds_the_same_sums(run: Stepscope) -> None:
    rows = list(csv.DictReader(io.StringIO(run("lines", BATCHED, "--csv", "-").out)))

    assert [int(row["total_ns"]) for row in rows] == [line["total_ns"] for line in of(run, "lines", BATCHED)["lines"]]


def test_what_is_not_the_users_belongs_to_the_line_that_called_it(run: Stepscope) -> None:
    files = {line["file"] for line in of(run, "lines", PER_TOKEN, "--user-code", "torch/optim")["lines"]}
    none = of(run, "lines", PER_TOKEN, "--not-user-code", "*.py")

    assert any("torch/optim" in (file or "") for file in files)
    assert none["attributed_ns"] == 0
    assert "its Python frames are those of libraries" in run("lines", PER_TOKEN, "--not-user-code", "*.py").out


@pytest.mark.parametrize("command", ["lines", "modules"])
def test_redacted_output_has_no_folders(command: str, run: Stepscope, recorded: Path) -> None:
    assert str(EXAMPLES) not in run(command, str(recorded), "--json", "-", "--redact").out
    assert str(recorded) not in run(command, str(recorded), "--json", "-", "--redact").out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lines", PER_TOKEN, "nix.py"], "nothing in this trace belongs to 'nix.py'"),
        (["lines", PER_TOKEN, "--all"], "need a FILE"),
        (["lines", PER_TOKEN, "--json", "x", "--csv", "y"], "not allowed with argument"),
        (["modules", PER_TOKEN, "--depth", "0"], "--depth: '0' is "),
        (["lines", PER_TOKEN, "--user-code", ""], "the pattern of files is empty"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: list[str], told: str, run: Stepscope) -> None:
    assert told in run(*words).mistake()


def test_flame_graphs(run: Stepscope, tmp_path: Path) -> None:
    page, flame = tmp_path / "report.html", tmp_path / "flame.json"

    stacks = run("export", PER_TOKEN, "-", "--format", "folded").out.splitlines()
    run("export", PER_TOKEN, str(flame), "--format", "speedscope")
    run("diagnose", PER_TOKEN, "--html", str(page))

    document = json.loads(flame.read_bytes())
    total = sum(int(stack.rsplit(" ", 1)[1]) for stack in stacks)
    assert document["profiles"][0]["endValue"] == total
    assert any("per_token_loss;backward;" in stack for stack in stacks)
    assert documents_in(page.read_text(encoding="utf-8"))["flame"]["total_ns"] == total
