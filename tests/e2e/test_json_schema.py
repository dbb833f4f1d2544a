"""Every document that a command writes as JSON is as the published schema says, and has no other keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.conftest import run_here
from tests.published_schema import FILE, wrong_in
from tests.simulator.allocator import training
from tests.unit.run_folders import made_run, recording

pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install -e '.[dev]'")
REPOSITORY = Path(__file__).parents[2]
SLOW = str(REPOSITORY / "examples" / "gpt2_per_token_loss_cpu.json.gz")
FAST = str(REPOSITORY / "tests" / "fixtures" / "gpt2_batched_loss_cpu.json.gz")
XLA = str(REPOSITORY / "tests" / "fixtures" / "jax_training_cpu.xplane.pb.gz")
JSON = ("--json", "-")
OF_A_TRACE = (
    ("diagnose", "TRACE", "--all", *JSON),
    ("diagnose", "TRACE", "--redact", *JSON),
    ("lines", "TRACE", *JSON),
    ("modules", "TRACE", *JSON),
    ("whatif", "TRACE", *JSON),
    ("whatif", "TRACE", "--remove", "input", "--critical-path", *JSON),
    ("predict", "TRACE", "--to", "A100-SXM4-40GB,MI300X,L4", *JSON),
    ("predict", "TRACE", "--to", "H100-SXM", "--devices", "1,8", *JSON),
    ("plan", "TRACE", "--iterations", "1e5", *JSON),
    ("energy", "TRACE", "--iterations", "1e5", "--region", "FRA", *JSON),
    ("memory", "TRACE", "--format", "json"),
    ("compare", "TRACE", FAST, *JSON),
    ("batch-size", "TRACE", "TRACE", "--batch", "8,16", "--format", "json"),
)
PUBLIC = (
    *("kineto/v100_resnet50_workers0.json.gz", "kineto/mi300x_vllm_graph_decode.json.gz"),
    *("kineto/cpu_ddp_gloo", "xplane/tpu_x4_inference.xplane.pb", "nsys/two_gpu_before.sqlite"),
)


def wrong_of(trace: str, commands: Iterable[tuple[str, ...]] = OF_A_TRACE) -> list[str]:
    """What is wrong in the documents of a trace; commands that this trace has nothing for are left out."""
    done = [run_here(*(word.replace("TRACE", trace) for word in words)) for words in commands]
    documents = [json.loads(each.out) for each in done if each.code == 0]
    assert len(documents) >= 4
    return [wrong for document in documents for wrong in wrong_in(document)]


def test_the_file_is_made_from_the_code() -> None:
    from tests.json_schema import published

    assert FILE.read_text(encoding="utf-8") == published(), "run scripts/generate_docs"


def test_the_file_is_a_schema_that_any_document_passes_by_itself() -> None:
    from jsonschema import Draft202012Validator

    schema = json.loads(FILE.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)

    whole = Draft202012Validator(schema)
    assert whole.is_valid(json.loads(run_here("modules", SLOW, *JSON).out))
    assert not whole.is_valid({"schema": 1, "stepscope": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("trace", [SLOW, XLA, "input_bound_training", "exposed_all_reduce", "graph_decode"])
def test_documents_of_a_trace(trace: str, simulated: Callable[[str], Path]) -> None:
    assert wrong_of(trace if "/" in trace else str(simulated(trace))) == []


@pytest.mark.traces
@pytest.mark.slow
@pytest.mark.parametrize("trace", PUBLIC)
def test_documents_of_public_traces(trace: str, traces_folder: Path) -> None:
    assert wrong_of(str(traces_folder / trace)) == []


def test_documents_about_runs_and_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    for day in range(12):
        step_ns = 3_000_000 if day < 6 else 4_000_000
        made_run(f"train-{day}", recording([step_ns + 1000 * each for each in range(60)]), day=day)
    snapshot = training().dump(tmp_path / "snapshot.pickle")
    commands = (
        ("history", *JSON),
        ("environment", "--format", "json"),
        ("cache", "compile", "show", *JSON),
        ("memory", str(snapshot), "--fit", "--memory-limit", "1GiB", "--format", "json"),
    )

    assert wrong_of("", commands) == []
