"""A number that is read when it is used: what it can be used for, and when it waits."""

from __future__ import annotations

import copy
import math
import numbers
import pickle
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.remedies import DeferredNumber


class Event:
    """As an event of torch.cuda that the device has not reached yet."""

    def __init__(self) -> None:
        self.done, self.waits = False, 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += not self.done
        self.done = True


def under_way(value: float) -> Any:
    """A number whose copy has not come, as one of a CUDA tensor."""
    number = DeferredNumber(torch.tensor(value))
    number._value, number._copy, number._event = None, torch.tensor(value, dtype=torch.float64), Event()
    return number


def test_it_waits_once_and_only_when_it_is_used() -> None:
    number = under_way(1.5)
    event = number._event
    history = [number]
    total = 0.0
    total += number
    total = total * 2 - 1

    assert event.waits == 0
    assert not number.is_there
    assert float(total) == 2.0
    assert (float(history[0]), number.is_there, event.waits) == (1.5, True, 1)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda x: f"{x:.2f} {x}", "2.50 2.5"),
        (lambda x: "%.1f" % x, "2.5"),  # noqa: UP031
        (lambda x: (str(x), repr(x)), ("2.5", "2.5")),
        (lambda x: (x + 1, 1 + x, x - 1, 1 - x, x * 2, 2 * x), (3.5, 3.5, 1.5, -1.5, 5.0, 5.0)),
        (lambda x: (x / 2, 5 / x, x // 2, 5 // x, x % 2, 6 % x, x**2, 2**x), (1.25, 2, 1, 2, 0.5, 1.0, 6.25, 2**2.5)),
        (lambda x: (divmod(x, 2), divmod(6, x)), ((1.0, 0.5), (2.0, 1.0))),
        (lambda x: (-x, +x, abs(x), round(x), round(x, 1), int(x)), (-2.5, 2.5, 2.5, 2, 2.5, 2)),
        (lambda x: (math.floor(x), math.ceil(x), math.trunc(x), math.sqrt(x * x)), (2, 3, 2, 2.5)),
        (lambda x: (x > 2, x < 2, x >= 2.5, x <= 2.5), (True, False, True, True)),
        (lambda x: (x == 2.5, x != 2.5, bool(x)), (True, False, True)),
        (lambda x: (hash(x), complex(x), x.is_integer()), (hash(2.5), 2.5 + 0j, False)),
        (lambda x: (sum([x, x]), max(x, 1), sorted([x, 1])[0], statistics.mean([x, x])), (5.0, 2.5, 1, 2.5)),
        (lambda x: (type(pickle.loads(pickle.dumps(x))), copy.deepcopy([x])), (float, [2.5])),
        (lambda x: (np.array([x, x]).dtype, np.mean([x, x]), np.float32(x)), (np.dtype("float64"), 2.5, 2.5)),
        (lambda x: ((x * torch.ones(2)).tolist(), (torch.ones(2) * x).tolist()), ([2.5, 2.5], [2.5, 2.5])),
        (lambda x: (isinstance(x, numbers.Real), math.isnan(x), x in [2.5]), (True, False, True)),
    ],
)  # fmt: skip
def test_it_can_be_used_as_a_number(use: Any, expected: Any) -> None:
    assert use(under_way(2.5)) == expected
    assert use(DeferredNumber(torch.tensor(2.5))) == expected


def test_a_long_sum_waits_only_for_a_host_that_is_far_ahead() -> None:
    pending = [under_way(0.1) for _ in range(5000)]
    events = [number._event for number in pending]
    total: Any = 0.0
    for number in pending:
        total += number

    expected = 0.0
    for _ in pending:
        expected += 0.1
    assert [event.done for event in events[-32:]] == [False] * 32
    assert all(event.done for event in events[:-128])
    assert float(total) == expected


def test_what_happens_to_the_tensor_afterwards_changes_nothing() -> None:
    loss = torch.tensor(1.0, requires_grad=True)
    number = DeferredNumber(loss)
    with torch.no_grad():
        loss.add_(1)
    assert number == 1.0


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        ("1", TypeError, "a str cannot be deferred"),
        (torch.tensor(1), TypeError, "a tensor of torch.int64 cannot be deferred"),
        (torch.zeros(2), ValueError, "the tensor has 2 elements, not one"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        DeferredNumber(value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_does_not_wait() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    number = DeferredNumber(torch.tensor(1.5, device="cuda"))
    assert not number.is_there
    assert number == 1.5
