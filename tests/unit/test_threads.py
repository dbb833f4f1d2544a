"""A value that several threads ask for is computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepscope.threads import cached_property


class Counted:
    def __init__(self) -> None:
        self.times = 0
        self.all_ask = threading.Barrier(4, timeout=60)

    @cached_property
    def value(self) -> int:
        self.times += 1
        return self.times

    @cached_property
    def fails_once(self) -> int:
        self.times += 1
        if self.times == 1:
            raise ValueError("the first time")
        return self.times

    def asked(self) -> int:
        self.all_ask.wait()
        return self.value


def test_threads_that_ask_at_once_share_one_value() -> None:
    counted = Counted()
    with ThreadPoolExecutor(4) as pool:
        assert [each.result(60) for each in [pool.submit(counted.asked) for _ in range(4)]] == [1] * 4
    assert {name: value for name, value in vars(counted).items() if name != "all_ask"} == {"times": 1, "value": 1}


def test_one_does_not_wait_for_another_object_or_another_value() -> None:
    class Waiting:
        def __init__(self, other: Waiting | None) -> None:
            self.other = other

        @cached_property
        def value(self) -> int:
            if self.other is None:
                return 1
            other = self.other
            with ThreadPoolExecutor(1) as pool:
                found: int = pool.submit(lambda: other.value).result(60)
            return found + 1

    assert Waiting(Waiting(None)).value == 2


def test_an_error_is_not_kept() -> None:
    counted = Counted()
    with pytest.raises(ValueError, match="first"):
        _ = counted.fails_once
    assert counted.fails_once == counted.fails_once == 2
