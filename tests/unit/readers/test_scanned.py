"""What the compiled scanner accepts and what it leaves to the Python reader; that both agree, property/test_scanner."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.readers.gathering import StringPool
from stepscope.readers.kineto import scanned
from stepscope.readers.kineto.events import Damage
from stepscope.readers.kineto.scanned import Coded, Rows, RowTables, combined, first_uses, scan

needs_scanner = pytest.mark.skipif(not scanned.is_built(), reason="the scanner was not built: there is no compiler")
OPERATOR = (
    b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": %b, "dur": 1.5,'
    b' "args": {"External id": 7}}'
)
KERNEL = (
    b'{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 3, "dur": 2,'
    b' "args": {"device": 0, "stream": 7, "correlation": 5, "grid": [2, 1, 1], "registers per thread": 32%b}}'
)


def rows_of(found: scanned.Scan | None, category: str) -> Rows:
    assert found is not None
    rows = found.complete[category]
    assert isinstance(rows, Rows)
    return rows


@needs_scanner
@pytest.mark.parametrize("text", [b"", b" \n", b"]", b" ]}"])
def test_no_events(text: bytes) -> None:
    found = scan(text, exact=False)
    assert found is not None
    assert (len(found), found.complete, found.others) == (0, {}, [])
    assert found.end == (text.index(b"]") if b"]" in text else None)


@needs_scanner
def test_ordinary_events_are_rows() -> None:
    found = scan(b",\n".join([OPERATOR % b"0.001", KERNEL % b"", OPERATOR % b"12"]) + b'], "x": 1}', exact=False)
    operators, kernels = rows_of(found, "cpu_op"), rows_of(found, "kernel")
    assert operators.start_ns.tolist() == [1, 12_000]
    assert operators.duration_ns.tolist() == [1500, 1500]
    assert operators.names.tolist() == ["aten::mm"] * 2
    assert operators.lanes.tolist() == [(1, 2)] * 2
    assert operators.integers("external_id").tolist() == [7, 7]
    assert list(map(bytes, kernels.coded("grid").tolist())) == [b"[2, 1, 1]"]
    assert kernels.coded("stream").tolist() == [7]
    assert kernels.numbers("registers").tolist() == [32.0]


@needs_scanner
@pytest.mark.parametrize(
    ("written", "exact", "expected"),
    [
        (b"5", False, 5000),
        (b"-1.25", False, -1250),
        (b"0.0005", False, 0),  # a double, rounded to even
        (b"0.0015", False, 2),
        (b"1700000000000000.123", False, 1_700_000_000_000_000_123),
        (b"1700000000000000", False, 1_700_000_000_000_000_000),
        (b"1700000000000000.123", True, 1_700_000_000_000_000_123),
    ],
)
def test_times_are_exact(written: bytes, exact: bool, expected: int) -> None:
    assert rows_of(scan(OPERATOR % written, exact=exact), "cpu_op").start_ns.tolist() == [expected]


@needs_scanner
@pytest.mark.parametrize(
    "text",
    [
        OPERATOR % b"1e3",
        OPERATOR % b"01",
        OPERATOR % b"NaN",
        OPERATOR % b'"1"',
        OPERATOR % b"9999999999999999999",
        OPERATOR % b"-3000000000000.5",
        OPERATOR % b"1" + b",",
        OPERATOR % b"1" + b" x",
        (OPERATOR % b"1")[:-1],
        (OPERATOR % b"1").replace(b"aten", b"at\x01n"),
        (OPERATOR % b"1").replace(b"aten", b"at\xffn"),
        (OPERATOR % b"1").replace(b"aten", b"\\ud800"),
        (OPERATOR % b"1").replace(b'"pid"', b'"ts"'),
        (OPERATOR % b"1").replace(b'"X"', b'"B"'),
        (OPERATOR % b"1").replace(b'"cat": "cpu_op", ', b""),
        (OPERATOR % b"1").replace(b"7}", b"[" * 100 + b"]" * 100 + b"}"),
        b'{"ph": "X", "args": ' + b"[" * 100_000,
        b'{"\\',
        b'{"\\u00',
        b'"',
        b"\0",
    ],
)
def test_anything_else_is_refused(text: bytes) -> None:
    assert scan(text, exact=False) is None


@needs_scanner
@pytest.mark.parametrize(
    "argument",
    [
        *(b', "bytes": 1e400', b', "correlation": 5', b', "External id": 1.5', b', "direction": 3', b', "str": "a"'),
        *(b', "gri\\u0064": 1', b', "Group size": 9223372036854775808', b', "Group size": -9223372036854775808'),
    ],
)
def test_events_with_odd_arguments_are_decoded(argument: bytes) -> None:
    found = scan(b",".join([OPERATOR % b"1", KERNEL % argument, KERNEL % b""]), exact=False)
    assert found is not None
    assert isinstance(found.complete["cpu_op"], Rows)
    decoded = found.complete["kernel"]
    assert isinstance(decoded, list)
    assert [event.ts for event in decoded] == [3, 3]


@needs_scanner
def test_a_file_made_to_collide_is_refused_or_read_in_time() -> None:
    names = [OPERATOR.replace(b"aten::mm", b"%08d" % number) % b"1" for number in range(50_000)]
    found = scan(b",".join(names), exact=False)
    assert found is None or len(found) == 50_000


@needs_scanner
def test_threads_scan_at_once() -> None:
    text = b",".join([OPERATOR % b"1"] * 2000)
    counts: list[int] = []

    def work() -> None:
        for _ in range(5):
            found = scan(text, exact=False)
            counts.append(-1 if found is None else len(found))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [2000] * 20


def test_without_a_scanner_nothing_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanned, "_scanner", None)
    assert scan(OPERATOR % b"1", exact=False) is None
    assert not scanned.is_built()


def test_a_scanner_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        INTERFACE = -1

    monkeypatch.setattr(scanned, "_scanner", Other)
    assert scan(OPERATOR % b"1", exact=False) is None


def coded(codes: list[int], values: list[Any], *, in_order: bool = False) -> Coded:
    return Coded(np.array(codes, np.uint32), values, in_order)


def test_first_uses_in_order() -> None:
    assert first_uses(np.array([3, 1, 3, 0, 9]), 5).tolist() == [3, 1, 0]
    assert first_uses(np.array([], np.int64), 5).tolist() == []


@pytest.mark.parametrize("most", [2**18, 1])
def test_combinations_in_order_of_first_use(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanned, "_MOST_COMBINATIONS", most)
    found = combined([coded([1, 0, 1, 1], ["a", "b"]), coded([2**32 - 1, 0, 0, 2**32 - 1], ["x"])])
    assert found.values == [("b", None), ("a", "x"), ("b", "x")]
    assert found.codes.tolist() == [0, 1, 2, 0]


def test_nulls_of_each_type() -> None:
    integers = np.array([1, np.iinfo(np.int64).min])
    frame = scanned.with_nulls(
        {
            "integers": integers,
            "codes": np.array([2**32 - 1, 2], np.uint32),
            "numbers": np.array([0.5, np.nan]),
            "none": integers[[1, 1]],
            "lanes": np.array([0, 1], np.int32),
        }
    )
    assert frame.rows() == [(1, None, 0.5, None, 0), (None, 2, None, None, 1)]
    assert frame.dtypes == [pl.Int64, pl.UInt32, pl.Float64, pl.Int64, pl.Int32]


def test_only_values_of_kept_rows_reach_the_pool() -> None:
    names, lanes = coded([0, 1], ["dropped", "kept"], in_order=True), coded([0, 1], [(1, 1), (1, 2)], in_order=True)
    rows = Rows("frames", np.array([0, 5]), np.array([1, 1]), names, lanes, {"python_id": None})
    pool, lane_of = StringPool(), {(1, 2): 4}
    frame = RowTables(pool, lane_of, {}, Damage()).slices("python_function", rows.filtered(np.array([False, True])))
    assert frame.rows() == [(5, 1, 0, 4, None)]
    assert pool.strings().to_list() == ["kept"]
