"""On an HPU the vendor's kernel is called as its documentation has it; a small package stands for it here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import attention  # noqa: E402
from stepscope.remedies.fused_attention import blocks, vendor_attention  # noqa: E402
from tests.unit.remedies.attention_cases import inputs, valid_part  # noqa: E402

VENDOR = """
CALLS = []

class FusedSDPA:
    @staticmethod
    def apply(query, key, value, *rest):
        CALLS.append((query, key, value, *rest))
        more = [f"{name}" for name, asked in (("probabilities", rest[-1]), ("mask", rest[-2])) if asked]
        output = query.new_ones(query.shape)
        return (output, *more) if more else output
"""


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package that stands for the vendor's, and keeps what its kernel was called with."""
    folder = tmp_path
    for name in ("habana_frameworks", "torch", "hpex", "kernels"):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").write_text(VENDOR if name == "kernels" else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: sys.modules["habana_frameworks.torch.hpex.kernels"].CALLS[-1]
    for name in [name for name in sys.modules if name.split(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


class OnHpu(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on an HPU."""

    @property
    def device(self) -> Any:
        return torch.device("hpu")


def on_hpu(*tensors: Any) -> list[Any]:
    return [each.as_subclass(OnHpu) for each in tensors]


def test_on_an_hpu_the_kernel_is_called_with_its_documented_arguments(vendor: Any) -> None:
    query, key, value = on_hpu(*inputs())
    assert attention(query, key, value).shape == query.shape
    assert vendor()[3:] == (None, 0.0, False, None, "None", True, None, "left", False, False)
    assert vendor()[0] is query
    query, key, value = on_hpu(*(each.bfloat16() for each in inputs()))
    results = attention(query, key, value, None, 0.1, True, 0.5, "fast", False, None, "right", True, True)
    assert vendor()[3:] == (None, 0.1, True, 0.5, "fast", False, None, "right", True, True)
    assert results[1:] == ("probabilities", "mask")


def test_on_an_hpu_shared_key_heads_are_repeated(vendor: Any) -> None:
    query, key, value = on_hpu(*inputs(key_heads=2))
    attention(query, key, value)
    assert torch.equal(vendor()[1], key.repeat_interleave(2, 1))
    assert vendor()[2].shape == query.shape


@pytest.mark.parametrize("padding", ["left", "right"])
def test_on_an_hpu_lengths_are_given_as_int32_and_padding_is_zero(vendor: Any, padding: str) -> None:
    given = inputs((2, 4, 48, 16))
    settings = blocks.Settings(0.25, causal=True)
    output = vendor_attention(*given, None, settings, None, True, [10, 48], padding)
    assert vendor()[9].dtype == torch.int32
    assert vendor()[9].tolist() == [10, 48]
    assert vendor()[10] == padding
    wanted = torch.zeros_like(given[0])
    for element, part in zip(wanted, valid_part([10, 48], 48, padding), strict=True):
        element[:, part] = 1
    assert torch.equal(output, wanted)


def test_on_an_hpu_what_the_kernel_does_not_take_is_refused(vendor: Any) -> None:
    with pytest.raises(ValueError, match="takes float32 and bfloat16"):
        attention(*on_hpu(*(each.half() for each in inputs())))
    with pytest.raises(ValueError, match="needs recompute=False"):
        attention(*on_hpu(*inputs()), return_dropout_mask=True)


def test_without_the_vendors_package_an_hpu_is_not_served() -> None:
    with pytest.raises(RuntimeError, match="needs habana_frameworks of the Intel Gaudi software"):
        attention(*on_hpu(*inputs()))
