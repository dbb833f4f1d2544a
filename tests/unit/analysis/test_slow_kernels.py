"""Why kernels stay below their limit: each reason from shapes, names and figures of launches that show it."""

from __future__ import annotations

import pytest

from stepscope.analysis.roofline import CALL_SCHEMA, roofline_calls
from stepscope.analysis.slow_kernels import Reason, block_count, reasons
from stepscope.machine.devices import named_device
from stepscope.trace import Metadata
from stepscope.trace.metadata import Device
from tests.unit.recording import Recording

A100 = named_device("A100-SXM4-80GB")  # 108 multiprocessors
TILED = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
HALVES = ("c10::BFloat16",) * 4
SINGLES = ("float",) * 4


def why(
    name: str,
    shapes: str,
    types: tuple[str, ...] = HALVES,
    *,
    kernel: str = "kernel",
    values: tuple[str, ...] = (),
    device_ns: int = 10_000_000,
    **launched: object,
) -> tuple[Reason, ...]:
    recording = Recording(Metadata(devices=(Device("0", A100.name),)))
    count = shapes.count("],") + 1
    recording.operator(
        0,
        100,
        name,
        input_shapes=shapes,
        input_types=str(list(types[:count])).replace("'", '"'),
        input_values=str(list(values)).replace("'", '"'),
    )
    recording.launched(10, 200, device_ns, kernel, 1, **launched)
    trace = recording.trace()
    [row] = roofline_calls(trace).rows(named=True)
    assert set(row) == set(CALL_SCHEMA)
    return reasons(trace, row, A100)


def codes(*arguments: object, **named: object) -> list[str]:
    return [each.code for each in why(*arguments, **named)]  # type: ignore[arg-type]


def convolution(image: str, weight: str, groups: int = 1, **named: object) -> list[str]:
    step, pad, gap = (named.pop(each, usual) for each, usual in (("step", "1"), ("pad", "1"), ("gap", "1")))
    flag = "True" if named.pop("turned", False) else "False"
    lists = [f"[{each}, {each}]" for each in (step, pad, gap)]
    values = ("", "", "", *lists, flag, "[0, 0]", str(groups))
    return codes("aten::convolution", f"[{image}, {weight}]", values=values, **named)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("[[8192, 4096], [4096, 4096]]", ["kernel"]),
        ("[[256, 131072], [131072, 256]]", ["few_tiles"]),
        ("[[2048, 8192], [8192, 2048]]", ["tail_wave"]),  # 128 tiles: a second wave of 20
        ("[[131072, 32], [32, 32]]", ["tall_skinny"]),
        ("[[8, 4096], [4096, 4096]]", ["few_rows", "few_tiles"]),
        ("[[424, 65536], [65536, 424]]", ["few_tiles", "off_tile"]),
        ("[[8192, 4095], [4095, 4096]]", ["unaligned"]),
    ],
)
def test_products(shapes: str, expected: list[str]) -> None:
    assert codes("aten::mm", shapes, kernel=TILED) == expected


def test_tiles_and_what_would_fill_the_device() -> None:
    [few, *_] = why("aten::mm", "[[256, 131072], [131072, 256]]", kernel=TILED)
    assert few.numbers == {"thread blocks": 2, "multiprocessors": 108, "length of the sums": 131072}
    assert "split-K" in few.better
    [split, *_] = why("aten::mm", "[[256, 131072], [131072, 512]]", kernel="Cijk_MT256x128x64_GSU2_")
    assert split.numbers["thread blocks"] == 8
    [tail] = [
        each for each in why("aten::mm", "[[2048, 8192], [8192, 2048]]", kernel=TILED) if each.code == "tail_wave"
    ]
    assert tail.numbers["thread blocks"] == 128
    assert tail.numbers["blocks in the last wave"] == 20
    [batch, *_] = why("aten::mm", "[[512, 512], [512, 512]]", grid="[27, 1, 1]")
    assert batch.numbers["times larger"] == 4


def test_convolutions() -> None:
    assert convolution("[1, 3, 2048, 2048]", "[64, 3, 7, 7]")[0] == "large_image"
    assert convolution("[8, 64, 56, 56]", "[64, 1, 3, 3]", groups=64)[0] == "depthwise"
    assert convolution("[8, 64, 56, 56]", "[64, 16, 3, 3]", groups=4)[0] == "grouped"
    assert convolution("[8, 64, 56, 56]", "[64, 64, 1, 1]", pad="0") == ["pointwise"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 1, 7]") == ["asymmetric"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 11, 11]", pad="5") == ["large_weights"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 3, 3]", gap="2") == ["dilated"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 4, 4]", turned=True, step="2") == ["transposed"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 3, 3]") == ["kernel"]
    assert convolution("[8, 64, 56, 56]", "[64, 64, 3, 3]", grid="[50, 1, 1]") == ["few_tiles"]


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        ("[1, 32, 32768, 128]", "[1, 32, 32768, 128]", ["long_sequences"]),
        ("[16, 32, 128, 128]", "[16, 32, 128, 128]", ["short_sequences"]),
        ("[16, 32, 1, 128]", "[16, 32, 4096, 128]", ["few_queries"]),
        ("[1, 8, 1, 128]", "[1, 8, 4096, 128]", ["few_queries", "few_tiles"]),
        ("[1, 4, 2048, 128]", "[1, 4, 2048, 128]", ["few_tiles"]),
        ("[16, 32, 2048, 40]", "[16, 32, 2048, 40]", ["small_heads"]),
        ("[16, 32, 2048, 256]", "[16, 32, 2048, 256]", ["wide_heads"]),
        ("[16, 32, 2048, 128]", "[16, 32, 2048, 128]", ["kernel"]),
    ],
)
def test_attention(query: str, key: str, expected: list[str]) -> None:
    values = ("", "", "", "0.0", "False")
    name = "aten::_scaled_dot_product_flash_attention"

    assert codes(name, f"[{query}, {key}, {key}]", values=values) == expected


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "code", "rows", "enough"),
    [
        (16, 64, 2, "few_tokens", 0.5, 4096),
        (512, 16, 1, "few_tokens", 32, 2048),
        (4096, 8, 2, "large_capacity", 1024, 512),
    ],
)
def test_experts(tokens: int, experts: int, chosen: int, code: str, rows: float, enough: int) -> None:
    shapes = f"[[{tokens}, 64], [{experts}, 256, 64], [{experts}, 64, 128], [{tokens}, {chosen}]]"
    [found] = why("vllm::fused_experts", shapes, (*HALVES[:3], "float"))

    assert found.code == code
    assert found.numbers["tokens of an expert"] == rows
    assert found.numbers["tokens that fill a tile of each expert"] == enough


def test_what_memory_limits() -> None:
    add = ("aten::add", "[[4096, 4096], [4096, 4096]]")
    plain = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::CUDAFunctor_add>>"
    assert codes(*add, kernel=plain) == ["layout"]
    assert codes(*add, kernel="void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>") == [
        "kernel"
    ]
    assert codes(*add, SINGLES) == ["kernel", "fp32"]
    assert codes(*add, kernel="indexAddLargeIndex")[0] == "atomics"
    assert codes("aten::_softmax", "[[4096, 3137], [], []]", ("c10::Half", "Scalar", "Scalar")) == ["unaligned"]


@pytest.mark.parametrize(
    ("launched", "named", "of", "twice"),
    [
        # 65,536 registers hold 8 warps of 8,192: two blocks of four; 2,048 threads fit
        ({"registers": 255, "block": "[128, 1, 1]"}, "registers of a thread", 255, 128),
        # 164 KiB hold one block of 96 KiB and the kibibyte that each takes
        ({"shared_memory_bytes": 98_304, "block": "[256, 1, 1]"}, "shared memory of a block", 98_304, 82_944),
    ],
)
def test_what_leaves_threads_of_a_multiprocessor_unused(
    launched: dict[str, object], named: str, of: int, twice: int
) -> None:
    [found] = why("aten::add", "[[4096, 4096], [4096, 4096]]", grid="[100000, 1, 1]", **launched)

    assert found.code == "occupancy"
    assert found.numbers["share of a multiprocessor's threads in use"] == 0.125
    assert (found.numbers[named], found.numbers[f"{named} for twice as many"]) == (of, twice)
    less = {**launched, "registers" if "registers" in launched else "shared_memory_bytes": twice}
    assert codes("aten::add", "[[4096, 4096], [4096, 4096]]", grid="[100000, 1, 1]", **less) != ["occupancy"]


def test_wider_numbers_than_needed() -> None:
    [_, found] = why("aten::mm", "[[4096, 4096], [4096, 4096]]", SINGLES)

    assert (found.code, found.numbers) == ("fp32", {"16-bit peak over FP32's": 16})  # 312 / 19.5


@pytest.mark.parametrize(
    ("grid", "blocks"),
    [("[3, 2, 1]", 6), ("3,2,5", 30), (None, -1), ("", -1), ("[0, 0, 0]", -1), ("[x]", -1), ("[1e9, 2]", -1)],
)
def test_blocks_of_a_grid(grid: str | None, blocks: int) -> None:
    assert block_count(grid) == blocks
