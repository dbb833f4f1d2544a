import polars as pl
import pytest

from stepscope.analysis.serving import (
    ITERATION_SCHEMA,
    drafting_ranges,
    engine_called,
    engine_of,
    iteration_costs,
    iteration_table,
    serving_summary,
    tokens_gained,
    work_launched_in,
)
from stepscope.analysis.steps import step_table
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ModelCallFacts, ProgramFacts
from tests.unit.recording import Recording


def iterations(recording: Recording, *columns: str) -> list[tuple[object, ...]]:
    return iteration_table(recording.trace()).select(columns).rows()


def test_an_empty_trace_has_no_iterations() -> None:
    table = iteration_table(Recording().trace())
    assert table.is_empty()
    assert table.schema == pl.Schema(ITERATION_SCHEMA)
    assert serving_summary(Recording().trace()) is None


@pytest.mark.parametrize(
    ("name", "phase", "requests", "tokens", "engine"),
    [
        ("execute_context_1(888_788544)_generation_0(0)", "prefill", 1, 888, "vLLM"),
        ("ProcessRequests resnet50_0_0", None, None, None, "Triton Inference Server"),
        ("Run detector_0_1_gpu1", None, None, None, "Triton Inference Server"),
        ("execute_context_5(10)_generation_3(8)", "mixed", 8, 18, "vLLM"),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)",
            "decode",
            32,
            32,
            "vLLM",
        ),
        ("execute_new_2_cached_0", "prefill", 2, None, "vLLM"),
        ("execute_new_0_cached_7", "decode", 7, 7, "vLLM"),
        ("step[DECODE bs=32]", "decode", 32, 32, "SGLang"),
        ("step[EXTEND bs=15 toks=15360]", "prefill", 15, 15360, "SGLang"),
        ("step[MIXED bs=8 toks=100]", "mixed", 8, 100, "SGLang"),
        ("step[TARGET_VERIFY bs=4]", "decode", 4, None, "SGLang"),
        ("step[SOMETHING bs=4]", None, 4, None, "SGLang"),
        ("[Executor] _forward_step 7: 2 ctx reqs, 300 ctx tokens, 0 gen reqs", "prefill", 2, 300, "TensorRT-LLM"),
        ("[Executor] _forward_step 8: 1 ctx reqs, 31 gen reqs", "mixed", 32, None, "TensorRT-LLM"),
        ("_forward_step: 0 ctx reqs, 64 gen reqs", "decode", 64, 64, "TensorRT-LLM"),
    ],
)
def test_names_of_ranges_tell_phase_requests_and_tokens(
    name: str, phase: str | None, requests: int, tokens: int | None, engine: str
) -> None:
    recording = Recording()
    recording.annotation(0, 10, name)
    found = iterations(recording, "phase", "requests", "tokens", "engine")
    assert found == [(phase, requests, tokens, engine)]


def test_idle_iterations_and_ranges_inside_others_are_left_out() -> None:
    recording = Recording()
    recording.annotation(0, 10, "step[IDLE bs=0]")
    recording.annotation(20, 30, "execute_context_0(0)_generation_4(4)")
    recording.annotation(25, 10, "step[DECODE bs=4]")
    assert iterations(recording, "start_ns", "duration_ns") == [(20, 30)]


def test_other_ranges_are_no_iterations() -> None:
    recording = Recording()
    for name in (
        "ProfilerStep#3",
        "capture_output",
        "execute_context",
        "step[1]",
        "forward_step",
        "Run epoch_3",
        "draft",
    ):
        recording.annotation(0, 10, name)
    assert not iterations(recording, "phase")


def test_captures_and_warm_up_are_put_aside() -> None:
    recording = Recording()
    recording.frame(0, 100, "vllm/v1/worker/gpu_worker.py(500): compile_or_warm_up_model")
    recording.annotation(5, 10, "execute_context_0(0)_generation_8(8)")
    recording.annotation(20, 10, "capture_8_FULL")
    recording.annotation(40, 10, "execute_context_0(0)_generation_4(4)")
    recording.launch(42, 1, 1, name="cudaStreamBeginCapture", kind="other")
    recording.annotation(200, 10, "execute_context_0(0)_generation_2(2)")
    found = iterations(recording, "phase", "captured_size")
    assert found == [("warm_up", None), ("capture", 8), ("capture", None), ("decode", None)]
    summary = serving_summary(recording.trace())
    assert summary is not None
    assert [(each.phase, each.count) for each in summary.phases] == [("decode", 1)]
    assert [(each.phase, each.count) for each in summary.put_aside] == [("capture", 2), ("warm_up", 1)]
    assert summary.captured_sizes == (8,)


def test_served_iterations_are_the_steps_and_captures_are_not() -> None:
    recording = Recording()
    recording.annotation(0, 50, "capture_8_FULL")
    for start in (100, 120, 140):
        recording.annotation(start, 10, "step[DECODE bs=8]")
    steps = step_table(recording.trace())
    assert steps["start_ns"].to_list() == [100, 120, 140]
    assert steps["source"].unique().to_list() == ["annotation"]


def test_a_short_iteration_at_an_end_is_complete() -> None:
    recording = Recording()
    recording.annotation(0, 500, "step[EXTEND bs=1 toks=900]")
    recording.annotation(600, 10, "step[DECODE bs=1]")
    assert step_table(recording.trace())["complete"].to_list() == [True, True]


def test_marked_steps_that_hold_one_iteration_each_stay_the_steps() -> None:
    recording = Recording()
    for number in range(3):
        recording.step(100 * number, 100, number)
        recording.annotation(100 * number + 10, 50, "step[DECODE bs=8]")
    assert step_table(recording.trace())["duration_ns"].to_list() == [100, 100, 100]


def test_a_marked_step_that_holds_many_iterations_gives_way_to_them() -> None:
    recording = Recording()
    recording.step(0, 100, 0)
    for start in (0, 30, 60):
        recording.annotation(start, 20, "step[DECODE bs=8]")
    assert step_table(recording.trace())["duration_ns"].to_list() == [20, 20, 20]


def called(*calls: tuple[int, int, int, int], steps: int = 0) -> Trace:
    """Calls of the model that the recorder saw, each in a step of 100 ns or in none."""
    program = ProgramFacts(model_calls=ModelCallFacts(files=("serve.py",), calls=calls))
    recording = Recording(metadata=Metadata(program=program, origin_unix_ns=1000))
    recording.operator(0, 400, "aten::linear")
    for number in range(steps):
        recording.step(200 * number, 200, number)
    return recording.trace()


CALLS = ((1000, 2, 2, 20), (1100, 3, 1, 12), (1200, 3, 0, 3), (1300, 1, 0, 1))


def test_the_calls_that_the_recorder_saw_are_iterations() -> None:
    rows = iteration_table(called(*CALLS))

    assert rows.select("start_ns", "duration_ns", "phase", "requests", "tokens").rows() == [
        (0, 100, "prefill", 2, 20),
        (100, 100, "mixed", 3, 12),
        (200, 100, "decode", 3, 3),
        (300, 100, "decode", 1, 1),
    ]


def test_calls_without_a_continuation_are_no_iterations() -> None:
    assert iteration_table(called((1000, 2, 2, 20), (1100, 2, 2, 20))).is_empty()


def test_steps_that_stepscope_marked_stay_the_steps() -> None:
    assert step_table(called(*CALLS, steps=2))["duration_ns"].to_list() == [200, 200]
    assert step_table(called(*CALLS))["duration_ns"].to_list() == [100, 100, 100, 100]


def test_a_training_that_generates_keeps_its_steps() -> None:
    recording = Recording()
    recording.step(0, 100, 0)
    for start in (0, 30, 60):
        recording.annotation(start, 20, "step[DECODE bs=8]")
    recording.operator(90, 5, "autograd::engine::evaluate_function: MmBackward0")
    assert step_table(recording.trace())["duration_ns"].to_list() == [100]


def test_a_recording_of_captures_has_no_steps() -> None:
    recording = Recording()
    recording.step(0, 100, 134)
    recording.annotation(2, 95, "capture_32_DECODE")
    assert step_table(recording.trace()).is_empty()


def test_times_per_token_are_medians_between_starts() -> None:
    recording = Recording()
    recording.annotation(0, 80, "step[EXTEND bs=4 toks=4000]")
    for start in (100, 120, 140, 170):
        recording.annotation(start, 10, "step[DECODE bs=4]")
    summary = serving_summary(recording.trace())
    assert summary is not None
    assert summary.time_to_first_token_ns == 100
    assert summary.time_per_output_token_ns == 20
    assert [(each.fewest_requests, each.most_requests) for each in summary.phases] == [(4, 4), (4, 4)]


def test_the_engine_follows_from_files_before_ranges() -> None:
    recording = Recording()
    recording.frame(0, 100, "/work/sglang/python/sglang/srt/managers/scheduler.py(10): run_batch")
    recording.annotation(0, 100, "execute_32_context_0(sq0sk0)_generation_32(sq32sk99)")
    assert iterations(recording, "engine") == [("SGLang",)]
    assert engine_of(Recording().trace()) == ""
    assert "cuda-graph" in engine_called("SGLang").options["graphs"]
    assert not engine_called("").options


def lookup(recording: Recording, start: int, shape: list[int]) -> None:
    recording.operator(start, 2, "aten::embedding", input_shapes=f"[[50257, 768], {shape}, [], [], []]")


def test_calls_of_the_model_in_generate_are_iterations_until_the_next() -> None:
    recording = Recording()
    recording.frame(0, 100, "transformers/generation/utils.py(2000): generate")
    for start, length in ((10, 17), (40, 1), (60, 1), (80, 1)):
        recording.frame(start, 10, "nn.Module: GPT2LMHeadModel_0", module="GPT2LMHeadModel_0")
        recording.frame(start + 1, 5, "nn.Module: Embedding_0", module="Embedding_0")
        lookup(recording, start + 2, [4, length])
    found = iterations(recording, "start_ns", "duration_ns", "phase", "requests", "tokens", "engine")
    assert found == [
        (10, 30, "prefill", 4, 68, "Transformers"),
        (40, 20, "decode", 4, 4, "Transformers"),
        (60, 20, "decode", 4, 4, "Transformers"),
        (80, 20, "decode", 4, 4, "Transformers"),  # 10 in the call and 10 behind it, as usual
    ]
    assert step_table(recording.trace())["source"].unique().to_list() == ["inferred"]


def test_passes_of_a_diffusion_are_iterations_without_what_comes_before_and_after() -> None:
    recording = Recording()
    recording.frame(0, 300, "diffusers/pipelines/flux/pipeline_flux.py(700): __call__")
    calls = [(10, 20, "CLIPTextModel_0"), *[(start, 30, "Transformer2DModel_0") for start in (40, 80, 120)]]
    for start, length, module in [*calls, (170, 100, "AutoencoderKL_0")]:
        recording.frame(start, length, f"nn.Module: {module}", module=module)
    found = iterations(recording, "start_ns", "duration_ns", "phase", "engine")
    assert found == [(start, 40, None, "Diffusers") for start in (40, 80, 120)]


def test_later_calls_decode_whatever_they_compute_again() -> None:
    recording = Recording()
    for begin in (0, 100):
        recording.frame(begin, 90, "transformers/generation/utils.py(2000): generate")
        for number, start in enumerate((10, 40, 60)):
            recording.frame(begin + start, 10, "nn.Module: GPT2LMHeadModel_0", module="GPT2LMHeadModel_0")
            lookup(recording, begin + start + 2, [1, 17 + number])
    assert [phase for (phase,) in iterations(recording, "phase")] == ["prefill", "decode", "decode"] * 2


def test_lookups_of_one_token_after_a_prompt_are_a_loop_that_generates() -> None:
    recording = Recording()
    for start, length in ((0, 9), (20, 1), (40, 1), (60, 1)):
        lookup(recording, start, [1, length])
        recording.operator(start + 5, 10, "aten::mm")
    found = iterations(recording, "start_ns", "duration_ns", "phase", "tokens", "engine")
    assert found == [
        (0, 20, "prefill", 9, ""),
        (20, 20, "decode", 1, ""),
        (40, 20, "decode", 1, ""),
        (60, 15, "decode", 1, ""),
    ]


@pytest.mark.parametrize("trained", [True, False])
def test_lookups_of_a_training_or_of_whole_sequences_are_no_loop(trained: bool) -> None:
    recording = Recording()
    for start in (0, 20, 40, 60):
        lookup(recording, start, [8, 1 if trained and start else 9])
    if trained:
        recording.operator(80, 5, "autograd::engine::evaluate_function: MmBackward0")
    assert not iterations(recording, "phase")


def test_work_counts_for_the_iteration_that_launched_it() -> None:
    recording = Recording()
    for start in (0, 20):
        recording.annotation(start, 10, "step[DECODE bs=8]")
    recording.launched(2, 5, 10, "first", 1)
    recording.launched(4, 12, 10, "overlaps", 2)
    recording.launch(21, 2, 3, name="cudaGraphLaunch", kind="graph_launch")
    for start in (30, 40):
        recording.work(start, 7, "in a graph", 3)
    recording.launched(60, 61, 10, "of no iteration", 4)
    costs = iteration_costs(recording.trace(), iteration_table(recording.trace()))
    assert costs.select("launches", "graph_launches", "device_ns").rows() == [(2, 0, 17), (1, 1, 14)]
    summary = serving_summary(recording.trace())
    assert summary is not None
    assert (summary.phases[0].graph_share, summary.phases[0].host_ns) == (0.5, 10)


def test_functions_of_one_phase_tell_it() -> None:
    recording = Recording()
    root = "sglang/srt/model_executor"
    for start, inner in (
        (0, f"{root}/model_runner.py(3003): forward_extend"),
        (20, f"{root}/cuda_graph_runner.py(9): replay"),
    ):
        recording.frame(start, 10, "sglang/srt/managers/tp_worker.py(445): forward_batch_generation")
        recording.frame(start + 2, 5, inner)
    recording.frame(40, 10, "sglang/srt/managers/tp_worker.py(445): forward_batch_generation")
    assert iterations(recording, "phase", "requests") == [("prefill", None), ("decode", None), (None, None)]


def test_models_of_a_recording_without_frames_name_the_library() -> None:
    recording = Recording()
    recording.module(0, 10, "GPT2LMHeadModel")
    assert engine_of(recording.trace()) == "Transformers"


def test_functions_that_divide_an_iteration_are_told() -> None:
    recording = Recording()
    for start in (0, 200):
        recording.annotation(start, 100, "step[DECODE bs=8]")
        recording.frame(start, 98, "engine.py(1): run")
        recording.frame(start + 1, 30, "engine.py(9): prepare")
        recording.frame(start + 2, 28, "engine.py(20): copy")
        recording.frame(start + 40, 50, "nn.Module: Model_0", module="Model_0")
        recording.frame(start + 92, 2, "engine.py(30): little")
    recording.frame(120, 50, "engine.py(40): between")
    summary = serving_summary(recording.trace())
    assert summary is not None
    assert [(each.function, each.file, each.share) for each in summary.functions] == [
        ("Model", "", 0.5),
        ("prepare", "engine.py", 0.3),
    ]


def test_numbers_that_no_engine_writes_are_unknown() -> None:
    recording = Recording()
    recording.annotation(0, 10, f"step[DECODE bs={'9' * 30}]")
    recording.operator(0, 5, "aten::embedding", input_shapes=f"[[{'9' * 30}, 8], [1, {'9' * 30}]]")
    assert iterations(recording, "phase", "requests", "engine") == [(None, None, "SGLang")]
    lookups = Recording()
    for start in range(0, 100, 20):
        lookup(lookups, start, [10**30, 1])
    assert not iterations(lookups, "phase")


def test_drafting_is_no_iteration_nor_what_is_inside() -> None:
    recording = Recording()
    recording.annotation(0, 20, "draft")
    recording.annotation(5, 10, "step[DECODE bs=2]")
    recording.annotation(20, 30, "step[TARGET_VERIFY bs=2]")
    recording.annotation(50, 10, "step[DRAFT_EXTEND bs=2]")
    recording.annotation(60, 30, "step[TARGET_VERIFY bs=2]")
    assert iterations(recording, "start_ns", "phase") == [(20, "decode"), (60, "decode")]
    assert drafting_ranges(recording.trace())["start_ns"].to_list() == [0, 50]


def test_the_context_tells_how_many_tokens_were_gained() -> None:
    recording = Recording()
    for start, requests, tokens, keys in ((0, 2, 8, 108), (10, 2, 8, 112), (20, 2, 8, 130), (30, 1, 4, 60)):
        recording.annotation(start, 9, f"execute_context_0(sq0sk0)_generation_{requests}(sq{tokens}sk{keys})")
    assert iterations(recording, "context") == [(100,), (104,), (122,), (56,)]
    gained = tokens_gained(iteration_table(recording.trace()))
    assert gained.select("start_ns", "gained").rows() == [(0, 4)]  # then more than was processed, then fewer requests


def test_work_knows_the_range_in_which_it_was_launched() -> None:
    recording = Recording()
    recording.annotation(0, 20, "draft")
    recording.annotation(50, 20, "draft")
    recording.launched(5, 30, 10, "first", 1)
    recording.launched(25, 40, 10, "outside", 2)
    recording.launch(55, 2, 3, name="cudaGraphLaunch", kind="graph_launch")
    recording.work(60, 10, "second", 3)
    recording.work(70, 10, "third", 3)
    found = work_launched_in(recording.trace(), drafting_ranges(recording.trace()))
    assert found.select("name", "iteration", "in_graph").rows() == [
        ("first", 0, False),
        ("second", 1, True),
        ("third", 1, True),
    ]
