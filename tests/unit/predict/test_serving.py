"""Passes of a language model from its shapes: what they do, what they need, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import named_device
from stepscope.predict.limits import named_link
from stepscope.predict.model_shape import model_of, read_model
from stepscope.predict.operation_times import ENGINE_SHARE, ENGINE_START_NS, sustained_bandwidth
from stepscope.predict.operations import USUAL_SHARE
from stepscope.predict.serving import HOST_NS, ONE_SHOT_NS, ROUTING_KERNELS, ServingRequest, serving_prediction, sum_ns
from stepscope.report.serving import serving_document, serving_json
from stepscope.report.text import text_of
from tests.e2e.conftest import run_here
from tests.published_schema import wrong_in

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
H100 = named_device("H100-SXM")
MODEL = model_of(LLAMA, "config.json")


def test_the_weights_are_those_of_the_model() -> None:
    assert MODEL.parameters == pytest.approx(8.03e9, rel=1e-3)  # 8,030,261,248 with norms
    assert model_of(MIXTRAL, "config.json").parameters == pytest.approx(46.7e9, rel=1e-3)
    assert MODEL.cache_bytes(1, "bf16") == 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "num_hidden_layers, hidden_size, num_attention_heads, vocab_size is missing"),
        (LLAMA | {"hidden_size": "4096"}, "'hidden_size' should be a whole number"),
        (LLAMA | {"hidden_size": -1}, "'hidden_size' should be a whole number"),
        (LLAMA | {"model_type": "new", "hidden_act": None}, "hidden_act is missing"),
        (LLAMA | {"kv_lora_rank": 512}, "attention with a compressed cache"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "weights as 'awq' are not predicted"),
    ],
)
def test_what_is_no_such_model_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        model_of(config, "config.json")


def test_families_call_the_same_differently() -> None:
    gptj = {"n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50400, "activation_function": "gelu_new"}
    found = model_of({**gptj, "tie_word_embeddings": False}, "config.json")

    assert (found.layers, found.kv_heads, found.feed_forward, found.gated) == (28, 16, 4 * 4096, False)
    assert found.parameters == pytest.approx(6.05e9, rel=0.01)
    assert model_of({"text_config": LLAMA}, "config.json").layers == 32
    assert model_of(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "config.json").weights == "fp8"


def test_a_known_family_needs_no_word_about_its_matrices() -> None:
    short = {key: value for key, value in LLAMA.items() if key not in ("hidden_act", "tie_word_embeddings")}

    assert model_of(short, "config.json").parameters == MODEL.parameters
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    found = model_of(gpt2, "config.json")
    assert (found.gated, found.tied) == (False, True)
    assert any(
        "1,024" in note for note in serving_prediction(found, ServingRequest(prompt=1000, output=25), H100).notes
    )


@pytest.mark.parametrize("device", ["H100-SXM", "MI300X"])
def test_no_range_begins_before_the_weights_can_be_read(device: str) -> None:
    found = serving_prediction(MODEL, ServingRequest(), named_device(device))

    assert found.decode is not None
    assert found.decode.low_ns > 0.9e9 * 2 * 7.5e9 / found.device.bandwidth_bytes_s


def test_decoding_reads_the_weights_and_prefill_computes() -> None:
    found = serving_prediction(MODEL, ServingRequest(batch=1, prompt=4096, output=16), H100)

    assert found.prefill is not None
    assert found.decode is not None
    assert (found.prefill.limit, found.decode.limit) == ("compute", "memory bandwidth")
    read = found.weight_bytes - MODEL.vocabulary * MODEL.hidden * 2  # one row of the embeddings is looked up
    assert found.decode.roofline_ns == pytest.approx(1e9 * read / H100.bandwidth_bytes_s, rel=0.05)
    assert found.prefill.roofline_ns >= 2e9 * 7e9 * 4096 / H100.flops_s["bf16"]
    for each in (found.prefill, found.decode):
        assert each.roofline_ns < each.low_ns < each.ns < each.high_ns
        assert sum(each.knowledge.values()) == pytest.approx(1)
        assert sum(each.parts.values()) == pytest.approx(each.ns)


def test_attention_reads_a_cache_that_grows() -> None:
    def attention(prompt: int, cache: str) -> float:
        request = ServingRequest(batch=64, prompt=prompt, output=1, cache=cache)
        decode = serving_prediction(MODEL, request, H100).decode
        assert decode is not None
        return decode.parts["attention"]

    start = 32 * ENGINE_START_NS
    assert attention(8192, "bf16") - start == pytest.approx(4 * (attention(2048, "bf16") - start), rel=0.05)
    assert attention(8192, "fp8") - start == pytest.approx((attention(8192, "bf16") - start) / 2, rel=0.05)
    read = 64 * MODEL.cache_bytes(8192, "bf16")
    assert attention(8192, "bf16") - start == pytest.approx(1e9 * read / sustained_bandwidth(H100), rel=0.05)


def test_attention_of_a_prompt_is_slower_than_the_roofline_and_has_no_rate_on_other_makers() -> None:
    for device, known in ((H100, True), (named_device("MI300X"), False)):
        prefill = serving_prediction(MODEL, ServingRequest(prompt=8192, output=1), device).prefill
        assert prefill is not None
        flops = 4 * 32 * 32 * 128 * 8192 * 8193 / 2
        share = flops / device.flops_s["bf16"] * 1e9 / prefill.parts["attention"]
        assert (0.3 < share < ENGINE_SHARE) if known else share <= USUAL_SHARE


def test_sums_are_the_engine_s_own_over_nvlink() -> None:
    nvlink, pcie = named_link("nvlink4"), named_link("pcie4")
    for size in (8_192, 2**21):
        assert sum_ns(nvlink, size, 4) < nvlink.transfer_ns("all_reduce", size, 4)
        assert sum_ns(pcie, size, 4) == pcie.transfer_ns("all_reduce", size, 4)
    assert sum_ns(nvlink, 8_192, 8) == pytest.approx(ONE_SHOT_NS, rel=0.1)
    assert sum_ns(nvlink, 2**30, 8) == nvlink.transfer_ns("all_reduce", 2**30, 8)


def test_the_host_is_added_as_given_and_else_in_the_range_alone() -> None:
    hidden, waiting = (serving_prediction(MODEL, ServingRequest(host_ns=ns), H100).decode for ns in (None, 4e6))
    none = serving_prediction(MODEL, ServingRequest(host_ns=0.0), H100).decode
    assert hidden is not None
    assert waiting is not None
    assert none is not None

    assert waiting.ns - hidden.ns == waiting.parts["host"] == 4e6
    assert waiting.low_ns - hidden.low_ns == pytest.approx(4e6)
    assert (none.ns, none.low_ns) == (hidden.ns, hidden.low_ns)
    assert none.high_ns < hidden.high_ns < none.high_ns + HOST_NS
    assert sum(waiting.knowledge.values()) == pytest.approx(1)
    small = serving_prediction(replace(MODEL, layers=1), ServingRequest(host_ns=4e6), H100).decode
    assert small is not None
    assert small.limit == "host"


def test_new_prompts_pass_with_the_tokens_of_others() -> None:
    alone, many = (serving_prediction(MODEL, ServingRequest(batch=n, prompt=2048, output=128), H100) for n in (1, 64))
    assert alone.total is not None
    assert many.total is not None

    assert alone.tokens_per_s == pytest.approx(128 / alone.total[0] * 1e9)
    assert many.tokens_per_s is not None
    assert 1.01 < many.tokens_per_s / (64 * 128 / many.total[0] * 1e9) < 1.3


def test_in_fp8_each_product_s_input_is_quantised() -> None:
    plain, fp8 = (serving_prediction(MODEL, ServingRequest(weights=kind), H100).decode for kind in ("bf16", "fp8"))
    assert plain is not None
    assert fp8 is not None

    extra = fp8.parts["elementwise"] - plain.parts["elementwise"]
    assert extra == pytest.approx(32 * 4 * 2_000, rel=0.05)


def test_streaming_kernels_find_in_a_quick_cache_what_fits_it() -> None:
    def each_token_ns(prompt: int) -> float:
        prefill = serving_prediction(MODEL, ServingRequest(prompt=prompt, output=1), named_device("L40S")).prefill
        assert prefill is not None
        return (prefill.parts["elementwise"] - 32 * 6 * 2_000) / prompt

    assert each_token_ns(512) < 0.5 * each_token_ns(16_384)


def test_devices_share_weights_and_add_their_sums() -> None:
    one, four = (serving_prediction(MODEL, ServingRequest(devices=n), H100) for n in (1, 4))
    slow = serving_prediction(MODEL, ServingRequest(devices=4), H100, named_link("pcie4"))

    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4)
    assert four.cache_bytes == pytest.approx(one.cache_bytes / 4)
    assert one.decode is not None
    assert four.decode is not None
    assert slow.decode is not None
    assert "link" not in one.decode.parts
    assert four.decode.ns < one.decode.ns
    assert slow.decode.parts["link"] > four.decode.parts["link"] > 0


def test_more_devices_than_heads_of_the_cache_keep_copies() -> None:
    few = replace(MODEL, kv_heads=2)
    two, eight = (serving_prediction(few, ServingRequest(devices=n), H100) for n in (2, 8))

    assert two.cache_bytes == eight.cache_bytes


def test_a_batch_meets_more_experts() -> None:
    mixtral = model_of(MIXTRAL, "config.json")
    one, many = (serving_prediction(mixtral, ServingRequest(batch=n), named_device("B200")) for n in (1, 64))

    assert one.decode is not None
    assert many.decode is not None
    assert 2.5 < many.decode.roofline_ns / one.decode.roofline_ns < 5  # 8 of 8 experts instead of 2
    dense = serving_prediction(MODEL, ServingRequest(), named_device("B200")).decode
    assert dense is not None
    routing = one.decode.parts["elementwise"] - dense.parts["elementwise"]
    assert routing == pytest.approx(32 * ROUTING_KERNELS * 2_000, rel=0.1)


def test_what_does_not_fit_and_what_is_refused() -> None:
    large = replace(MODEL, layers=320)
    assert serving_prediction(large, ServingRequest(), H100).fits is False
    assert serving_prediction(MODEL, ServingRequest(batch=10_000), H100).fits is False
    fits = serving_prediction(MODEL, ServingRequest(), H100).most_requests
    assert fits is not None
    assert serving_prediction(MODEL, ServingRequest(batch=fits), H100).fits
    assert not serving_prediction(MODEL, ServingRequest(batch=fits + 1), H100).fits

    no_fp8 = serving_prediction(MODEL, ServingRequest(weights="fp8"), named_device("A100-SXM4-80GB"))
    assert (no_fp8.prefill, no_fp8.total) == (None, None)
    assert no_fp8.notes == ("it does not multiply in fp8",)
    with pytest.raises(UsageError, match="3 devices cannot share 32 heads"):
        serving_prediction(MODEL, ServingRequest(devices=3), H100)


def test_nothing_was_measured_on_other_makers() -> None:
    decode = serving_prediction(MODEL, ServingRequest(), named_device("MI300X")).decode

    assert decode is not None
    assert decode.knowledge == {"datasheet times a constant": pytest.approx(1)}
    assert decode.high_ns > 2 * decode.ns


def test_the_report_names_what_does_not_fit() -> None:
    request = ServingRequest(batch=64)
    found = [serving_prediction(MODEL, request, named_device(name)) for name in ("T4", "H100-SXM")]

    text = text_of(serving_document("/data/config.json", MODEL, request, found), width=120)
    assert "/data" not in text
    assert "T4        does not fit" in text
    document = json.loads(json.dumps(serving_json("config.json", MODEL, request, found), default=vars_of))
    assert [each["device"] for each in document["servings"]] == ["H100-SXM", "T4"]


def vars_of(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    done = run_here("serving", str(tmp_path), "--to", "H100-SXM,L4", "--tensor-parallel", "2", "--json", "-")
    assert done.code == 0
    assert wrong_in(json.loads(done.out)) == []
    assert read_model(tmp_path) == read_model(tmp_path / "config.json")
    assert "is not a model's config.json" in run_here("serving", __file__).err
    assert "--link needs several devices" in run_here("serving", str(tmp_path), "--link", "pcie4").err
    assert (
        "has no nvlink4"
        in run_here("serving", str(tmp_path), "--to", "L4", "--tensor-parallel", "2", "--link", "nvlink4").err
    )


def test_the_benchmark_divides_its_cases_by_source() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    models = json.loads((folder / "serving_models.json").read_text())
    sources = {row["source"]: row for row in csv.DictReader((folder / "serving_sources.csv").read_text().splitlines())}
    cases = list(csv.DictReader((folder / "serving_cases.csv").read_text().splitlines()))
    assert {case["source"] for case in cases} == set(sources)
    assert {each["set"] for each in sources.values()} == {"development", "test"}
    assert all(each["url"].startswith("https://") for each in sources.values())
    for name in {case["model"] for case in cases}:
        model_of(models[name], name)
    for case in cases:
        named_device(case["device"])
        assert float(case["measured_ms"]) > 0
        assert float(case["first_ms"]) > 0
