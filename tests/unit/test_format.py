import math

import pytest

from stepscope.report.format import cell, count, duration, printable, share, size


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (540, "540 ns"),
        (999.6, "1.0 us"),
        (8_300, "8.3 us"),
        (54_100_000, "54.1 ms"),
        (999_949_999, "999.9 ms"),
        (999_960_000, "1.00 s"),
        (1_230_000_000, "1.23 s"),
        (4_000_000_000_000, "4,000.00 s"),
        (-54_100_000, "-54.1 ms"),
        (math.nan, "-"),
    ],
)
def test_duration(ns: float, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (24_536_678, "23.4 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 40, "1.00 TiB"),
    ],
)
def test_size(amount: int, text: str) -> None:
    assert size(amount) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0 %"), (0.472, "47.2 %"), (1, "100.0 %"), (0.0001, "<0.1 %"), (-0.05, "-5.0 %"), (math.inf, "-")],
)
def test_share(value: float, text: str) -> None:
    assert share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1_234_567, "1,234,567"), (2.0, "2"), (2.5, "2.5"), (12345.6, "12,346"), (math.nan, "-")],
)
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("duration_ns", 54_100_000, "54.1 ms"),
        ("start_ns", 1_234_567_891, "1,234.568 ms"),
        ("ns", 8_300, "8.3 us"),
        ("shared_memory_bytes", 1536, "1.5 KiB"),
        ("idle_share", 0.472, "47.2 %"),
        ("occupancy", 0.5, "50.0 %"),
        ("calls", 12_345, "12,345"),
        ("step", 12_345, "12345"),
        ("line", 1200, "1200"),
        ("complete", True, "yes"),
        ("name", "aten::mm", "aten::mm"),
        ("name", "a\x1b[31mb\n", "a\\x1b[31mb\\n"),
        ("name", None, ""),
        ("causes", ["input", "python"], "input, python"),
    ],
)
def test_cell_takes_the_unit_from_the_column(column: str, value: object, text: str) -> None:
    assert cell(column, value) == text


def test_printable_keeps_ordinary_text_and_writes_out_the_rest() -> None:
    assert printable("größe 名前") == "größe 名前"
    assert printable("a\u202eb\ud800\x07\x9b") == "a\\u202eb\\ud800\\x07\\x9b"
