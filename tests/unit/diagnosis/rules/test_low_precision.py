"""low-precision: numbers are wider than they need to be."""

from __future__ import annotations

import dataclasses

import pytest

from stepscope.diagnosis.rules import low_precision
from stepscope.diagnosis.rules.low_precision import RULE as rule
from stepscope.machine.devices import device_table
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    the_finding,
    with_capability,
)
from tests.unit.recording import Recording
from tests.unit.shaped import Shaped

TF32 = "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1"


def multiplying(kernel: str = "ampere_sgemm_128x64_nn", capability: str | None = "8.0", length_us: int = 400) -> Trace:
    """One matrix product and another kernel in a step of 1000 us, whose end waits for the device."""
    recording = Recording()
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(12): step")
    recording.launched(5 * US, 10 * US, length_us * US, kernel, 101)
    after = (10 + length_us) * US
    recording.launched(
        15 * US, after, 980 * US - after, "void at::native::vectorized_elementwise_kernel<4, float>", 102
    )
    recording.launch(20 * US, 970 * US, 103, name="cudaDeviceSynchronize", kind="synchronise")
    return with_capability(recording.trace(), capability)


def computing(
    *types: str, casts: bool = False, optimizer: bool = False, classes: int = 64, default: str | None = None
) -> Trace:
    """A matrix product of 10,000 ns on each type in a step of 100,000 ns."""
    step = Shaped(facts=ProgramFacts(torch={"default_dtype": default}) if default else None)
    for kind in types:
        if casts:
            with step.inside("aten::to", 2_000, (64, 64), types="float"):
                step.call("aten::copy_", 1_000, (64, 64), (64, 64), types=[kind, "float"])
        step.call("aten::mm", 10_000, (64, 64), (64, classes), types=kind)
    if optimizer:
        step.recording.operator(
            90_000, 4_000, "aten::_fused_adam_", input_shapes="[[[64, 64]], [[64, 64]]]",
            input_types='["TensorList", "TensorList"]',
        )  # fmt: skip
    return step.trace()


def mixed(double_rows: int) -> Trace:
    """An operator on 64 rows in float32 and some in float64."""
    step = Shaped()
    step.call("CompiledFunction", 50_000, (64, 64), (double_rows // 4, 64), types=["float", "double"])
    return step.trace()


def scoring_in_double() -> Trace:
    """A loss over 4,000 classes in float64, of which large-logits tells."""
    step = Shaped()
    step.call("aten::linear", 3_000, (64, 32), (4000, 32), number=1)
    with step.inside("aten::to", 2_000, (64, 4000), number=2):
        step.call("aten::copy_", 1_900, (64, 4000), (64, 4000), types=["double", "float"])
    step.call("aten::_log_softmax", 20_000, (64, 4000), types="double", number=3)
    step.gradient("LogSoftmaxBackward0", 20_000, 3)
    return step.trace()


def decoding(
    kernel: str = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
    device: str = "NVIDIA H100 80GB HBM3",
    mode: str = "DECODE",
) -> Trace:
    """Three iterations of 100 us, whose kernel takes 60 us beside 30 us of others."""
    recording = Recording(Metadata(devices=(Device("0", name=device),)))
    for number in range(3):
        begin = 100 * US * number
        recording.annotation(begin, 100 * US, f"step[{mode} bs=8 toks=8]")
        recording.launched(begin + US, begin + 5 * US, 60 * US, kernel, 2 * number + 1)
        recording.launched(begin + 3 * US, begin + 66 * US, 30 * US, "rms_norm", 2 * number + 2)
    return recording.trace()


FIRES: Cases = {
    "tokens with weights of 16 bits": decoding,
    "tf32": lambda: multiplying(TF32),
    "float64": lambda: computing("float", "double"),
    "mostly in double": lambda: mixed(256),
    "float64 throughout": lambda: computing("double", optimizer=True),
    "ampere": multiplying,
    "volta": lambda: multiplying("volta_sgemm_64x64_nt", "7.0"),
    "convolution": lambda: multiplying("cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1", "7.0"),
    "cdna": lambda: multiplying("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", "9.4"),
}
SILENT: Cases = {
    "prompts": lambda: decoding(mode="EXTEND"),
    "weights of 4 bits": lambda: decoding("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1"),
    "a device without FP8": lambda: decoding(device="NVIDIA A100-SXM4-80GB"),
    "little in tf32": lambda: multiplying(TF32, length_us=90),
    "16 bits": lambda: multiplying("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"),
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "fp16": lambda: multiplying("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn"),
    "bf16": lambda: multiplying("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "9.0"),
    "no matrix product": lambda: multiplying("void fbgemm_gpu::permute_2D_data_kernel<false, int, float>"),
    "no tensor cores": lambda: multiplying("maxwell_sgemm_128x128_tn", "6.1"),
    "unknown device": lambda: multiplying(capability=None),
    "little": lambda: multiplying(length_us=90),
    "a small input in double": lambda: mixed(64),
    "float32": lambda: computing("float", "float"),
    "scores in float64": scoring_in_double,
}


def peaks_of(monkeypatch: pytest.MonkeyPatch, tf32: float, half: float) -> None:
    """Let the device have these peaks, whatever it is called."""
    peaks = dataclasses.replace(device_table()[0], flops_s={"tf32": tf32, "fp16": half})
    monkeypatch.setattr(low_precision, "device_peaks", lambda *_: peaks)


@pytest.mark.parametrize("peaks", [None, (100e12, 400e12)])
def test_16_bits_are_faster_than_tf32_as_the_peaks_are(
    monkeypatch: pytest.MonkeyPatch, peaks: tuple[float, float] | None
) -> None:
    if peaks is not None:
        peaks_of(monkeypatch, *peaks)
    ratio = 4.0 if peaks else 2.0

    finding = the_finding(rule, multiplying(TF32))

    assert finding.confidence == "low"
    assert finding.saving_ns_per_step == round(400 * US * (1 - 1 / ratio))
    assert figures_of(finding) == [
        ("share of the step in TF32 matrix kernels", 0.4, "share", 0.1),
        ("such kernels per step", 1.0, "count", None),
        ("16-bit rate of the tensor cores over their TF32 rate", ratio, "count", None),
    ]
    assert "set_float32_matmul_precision" not in finding.remedy.code


def test_no_promise_where_16_bits_are_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks_of(monkeypatch, 100e12, 90e12)
    assert asked(rule, multiplying(TF32)).findings == ()


def test_half_of_the_time_is_saved() -> None:
    finding = the_finding(rule, multiplying())

    assert (finding.saving_ns_per_step, finding.saving_share, finding.confidence) == (200 * US, 0.2, "low")
    assert finding.saving_from == "replayed"
    assert finding.saving_basis == "50% of the time of FP32 matrix kernels, an assumption below the hardware's ratio"
    assert finding.title == "40% of the step is FP32 matrix products that tensor cores could do"
    assert figures_of(finding) == [
        ("share of the step in FP32 matrix kernels", 0.4, "share", 0.1),
        ("such kernels per step", 1.0, "count", None),
        ("matrix products, convolutions and attention per step", 400 * US, "ns", None),
        ("share of it on tensor cores", 0.0, "share", None),
    ]
    assert [(interval.start_ns, interval.duration_ns) for interval in finding.evidence.intervals] == [
        (10 * US, 400 * US)
    ]
    assert places_of(finding) == [("train.py", 12, "step")]


def test_half_of_what_computes_in_double_is_saved_and_all_conversions() -> None:
    finding = the_finding(rule, computing("float", "double", casts=True))

    assert (finding.saving_ns_per_step, finding.confidence) == (10_000 // 2 + 2_000, "medium")
    assert finding.saving_from == "replayed"
    assert finding.title == "10% of the step computes in float64, in numbers twice as wide as float32"
    assert figures_of(finding) == [
        ("share of the step in operators on float64 tensors", 0.1, "share", 0.04),
        ("such operators per step", 1.0, "count", None),
        ("share of the step in conversions to float64 and back", 0.02, "share", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "constant = torch.from_numpy(array).float()" in finding.remedy.code


def test_a_model_in_double_has_its_optimizer_in_double() -> None:
    finding = the_finding(rule, computing("double", optimizer=True))

    assert finding.saving_ns_per_step == (10_000 + 4_000) // 2
    assert "model = model.float()" in finding.remedy.code


def test_double_by_choice_is_told_with_less_confidence() -> None:
    assert the_finding(rule, computing("double", default="torch.float64")).confidence == "low"


@pytest.mark.parametrize(
    ("capability", "remedy"),
    [("7.0", "torch.amp.GradScaler()"), ("7.5", "torch.amp.GradScaler()"), ("8.0", "set_float32_matmul_precision")],
)
def test_the_remedy_suits_the_device(capability: str, remedy: str) -> None:
    assert remedy in the_finding(rule, multiplying(capability=capability)).remedy.code


def test_an_unknown_device_leaves_a_question() -> None:
    [question] = asked(rule, multiplying(capability=None)).not_answered

    assert question.question == "Would lower precision speed up the FP32 matrix products?"
    assert asked(rule, multiplying(capability=None, length_us=90)).not_answered == ()


def test_the_thresholds_decide() -> None:
    assert the_finding(rule, multiplying(), saved=0.25).saving_ns_per_step == 100 * US
    assert asked(rule, multiplying(), share=0.41).findings == ()
    assert len(asked(rule, multiplying(length_us=90), share=0.09).findings) == 1
    assert asked(rule, busy_device(), share=0).findings == ()
    assert the_finding(rule, computing("double"), double_saved=0.25).saving_ns_per_step == 2_500
    assert asked(rule, computing("double"), double_share=0.11).findings == ()


def test_weights_of_16_bits_are_a_note_where_tokens_are_decoded() -> None:
    finding = the_finding(rule, decoding())
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    shares = {name: value for name, value, *_ in figures_of(finding)}
    assert shares["share of the device's time to decode tokens"] == pytest.approx(2 / 3)
    assert "--quantization fp8" in finding.remedy.code
