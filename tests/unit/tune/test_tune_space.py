"""Which knobs are tried where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.diagnosis.finding import Evidence, Finding, Remedy
from stepscope.errors import UsageError
from stepscope.machine.observed import Machine
from stepscope.readers import open_trace
from stepscope.record.apply import all_flags
from stepscope.tune.space import Surroundings, chosen_space, program_hash, search_space, surroundings_of
from stepscope.tune.trials import ON, code_of, user_knob

PER_TOKEN = Path(__file__).parents[3] / "examples" / "gpt2_per_token_loss_cpu.json.gz"

PROCESSOR = Surroundings(
    cores=8, accelerator=False, cuda=False, half=False, tf32=False, loader=True, optimizer=True, ranks=1
)
CUDA = Surroundings(
    cores=8,
    accelerator=True,
    cuda=True,
    half=True,
    tf32=True,
    loader=True,
    optimizer=True,
    ranks=2,
    allocators=("jemalloc",),
)


def finding(rule: str, saving_ns: int, *words: str, code: str = "") -> Finding:
    return Finding(
        rule, f"{rule} is slow", "high", saving_ns, 0.1, "replayed", "high", Evidence(), Remedy("do it", code, words)
    )


def names(around: Surroundings, *findings: Finding) -> list[str]:
    return [knob.name for knob in search_space(findings, (), around).knobs]


def test_without_an_accelerator_nothing_of_one_is_tried() -> None:
    found = names(PROCESSOR)
    assert {"batched-loss", "fuse-optimizer", "workers", "compile", "threads", "zero-grad"} <= set(found)
    assert {"pin-memory", "tf32", "bf16", "fp16", "cudnn-benchmark", "bucket-mb", "allocator"}.isdisjoint(found)
    said = search_space((), (), PROCESSOR).said
    assert "deferred-logging, pin-memory and non-blocking were left out: the program uses no accelerator" in said
    assert "bucket-mb, gradient-view and static-graph were left out: the program is one process" in said
    assert "allocator was left out: neither jemalloc nor tcmalloc is installed" in said


def test_on_a_device_all_of_it_is() -> None:
    found = search_space((), (), CUDA)
    assert {"pin-memory", "tf32", "bf16", "channels-last", "bucket-mb", "allocator"} <= {k.name for k in found.knobs}
    assert found.knob("compile").values == (ON, "reduce-overhead")
    assert found.knob("allocator").values == ("jemalloc",)
    assert "fp16" not in {knob.name for knob in found.knobs}  # bf16 needs no scaling


def test_counts_follow_the_cores() -> None:
    found = search_space((), (), PROCESSOR)
    assert found.knob("workers").values == ("1", "2", "4", "8")
    assert found.knob("threads").values == ("1", "4", "8")
    assert "threads" not in names(Surroundings(cores=1))


def test_findings_come_first_by_their_promise_then_the_users_knobs() -> None:
    findings = (
        finding("small", 5, "zero-grad"),
        finding("large", 9, "workers=3", "prefetch=8", code="DataLoader(...)"),
    )
    found = search_space(findings, (user_knob("--fused"),), PROCESSOR)
    assert [knob.name for knob in found.knobs][:4] == ["workers", "zero-grad", "prefetch", "--fused"]
    workers = found.knob("workers")
    assert workers.values == ("3", "1", "2", "4", "8")
    assert (workers.promised_ns, workers.code, workers.why) == (9, "DataLoader(...)", "large: large is slow")
    assert (found.knob("prefetch").values, found.knob("prefetch").needs) == (("8", "4"), "workers")


def test_a_word_that_nothing_applies_is_left_out() -> None:
    assert "no-such-flag" not in names(PROCESSOR, finding("odd", 5, "no-such-flag"))
    assert "workers" in names(PROCESSOR, finding("odd", 5, "workers=none"))
    found = search_space((finding("host-allocator", 5, "allocator=jemalloc"),), (), PROCESSOR)
    assert "allocator" not in {knob.name for knob in found.knobs}
    assert "allocator was left out: neither jemalloc nor tcmalloc is installed" in found.said


def test_only_and_skip() -> None:
    space = search_space((), (user_knob("--fused"),), PROCESSOR)
    assert [knob.name for knob in chosen_space(space, ("workers",), ()).knobs] == ["--fused", "workers"]
    assert "workers" not in [knob.name for knob in chosen_space(space, None, ("workers",)).knobs]
    with pytest.raises(UsageError, match="there is no knob 'worker'; the knobs are --fused, allocator"):
        chosen_space(space, None, ("worker",))


def test_what_a_recording_tells_of_the_program() -> None:
    trace = open_trace(str(PER_TOKEN))
    around = surroundings_of(trace, {"versions": {"torch": "2.13.0"}}, 1)
    assert (around.accelerator, around.cuda, around.loader, around.optimizer) == (False, False, True, True)
    around = surroundings_of(None, {}, 1)
    assert (around.accelerator, around.loader) == (None, None)


@pytest.mark.parametrize(("flags", "half"), [("fpu avx512f avx512_bf16", True), ("fpu avx2", False)])
def test_whether_the_processor_multiplies_bf16(tmp_path: Path, flags: str, half: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: {flags}\n")
    trace = open_trace(str(PER_TOKEN))
    assert surroundings_of(trace, {}, 1, Machine(root=tmp_path)).half is half


def test_every_flag_has_its_code() -> None:
    missing = [flag.name for flag in all_flags() if not code_of(flag.name, "2")]
    assert missing == []
    assert code_of("compile", "") == 'model = torch.compile(model, mode="default")'


def test_a_changed_script_is_another_program(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    first = program_hash(["python", str(script), "--x"])
    script.write_text("pass # changed")
    assert first != program_hash(["python", str(script), "--x"]) != ""
    assert program_hash(["python", "-m", "train"]) == ""


def test_standard_knobs_that_act_on_most_of_the_step_come_first() -> None:
    loading = replace(PROCESSOR, loader=True, optimizer=True, cores=4, shares={"input": 0.6, "optimizer": 0.2})
    stepping = replace(loading, shares={"optimizer": 0.6, "input": 0.2})

    assert names(loading)[0] == "workers"
    assert names(stepping)[:2] == ["fuse-optimizer", "clip-in-one-pass"]
