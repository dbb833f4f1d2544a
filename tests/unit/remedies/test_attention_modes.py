"""The switch between recomputing and saving: argument, block and global, in threads, tasks and compiled graphs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import (  # noqa: E402
    attention,
    recompute_attention,
    recompute_attention_enabled,
    set_recompute_attention,
)
from tests.unit.remedies.attention_cases import inputs  # noqa: E402


@pytest.fixture(autouse=True)
def _switched_back() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    set_recompute_attention(True)


def test_recomputing_is_on_until_switched_off() -> None:
    assert recompute_attention_enabled()
    set_recompute_attention(False)
    assert not recompute_attention_enabled()
    with recompute_attention(True):
        assert recompute_attention_enabled()
        with recompute_attention(False):
            assert not recompute_attention_enabled()
        assert recompute_attention_enabled()
        set_recompute_attention(False)
        assert recompute_attention_enabled()
    assert not recompute_attention_enabled()


def test_the_block_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="mine"), recompute_attention(False):
        raise RuntimeError("mine")
    assert recompute_attention_enabled()


def test_a_block_holds_for_its_thread_and_the_switch_for_all() -> None:
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        found[name] = recompute_attention_enabled()

    with recompute_attention(False):
        for name, switch in (("beside the block", True), ("after the switch", False)):
            set_recompute_attention(switch)
            thread = threading.Thread(target=look, args=(name,))
            thread.start()
            thread.join()
    assert found == {"beside the block": True, "after the switch": False}


def test_a_block_holds_for_its_task() -> None:
    async def task(enabled: bool) -> bool:
        with recompute_attention(enabled):
            await asyncio.sleep(0)
            return recompute_attention_enabled()

    async def both() -> list[bool]:
        return list(await asyncio.gather(task(True), task(False)))

    assert asyncio.run(both()) == [True, False]


def test_the_argument_wins_over_the_switch() -> None:
    given = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    with recompute_attention(True):
        attention(*given, recompute=False, return_dropout_mask=True)
    with recompute_attention(False):
        attention(*given, return_dropout_mask=True)
        with pytest.raises(ValueError, match="needs recompute=False"):
            attention(*given, recompute=True, return_dropout_mask=True)


@pytest.mark.parametrize("switch", [recompute_attention, set_recompute_attention])
def test_the_switches_take_true_or_false_only(switch: Any) -> None:
    with pytest.raises(TypeError, match="not 'off'"):
        switch("off").__enter__()


def test_with_the_argument_the_compiled_graph_is_whole() -> None:
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    given = inputs()
    for options in ({"recompute": True}, {"recompute": False, "is_causal": True}):
        torch.testing.assert_close(compiled(*given, **options), attention(*given, **options))


def test_autocast_lowers_all_of_it() -> None:
    given = [each.requires_grad_() for each in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(given[0].bfloat16(), *given[1:], dropout_p=0.1)
        fast = attention(*given, is_causal=True, softmax_mode="fast")
    output.sum().backward()
    assert output.dtype == fast.dtype == torch.bfloat16
    assert given[1].grad.dtype == torch.float32
