import io
import json
import math

import polars as pl
import pytest

from stepscope.report.format import cell, count, duration, filled, printable, printable_json, share, size
from stepscope.report.tables import heading, showing, table_bytes, table_lines


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
        (-0.02, "0 ns"),
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


FRAME = pl.DataFrame(
    {
        "name": ["aten::mm", 'a,"b"\n<c>', None],
        "self_ns": [54_100_000, None, 0],
        "share": [0.25, math.nan, 0.0],
        "shapes": [[1, 2], [], None],
        "step": [10_000, 2, 3],
    }
)


def test_an_empty_table() -> None:
    assert table_bytes(pl.DataFrame(schema={"name": pl.String, "ns": pl.Int64}), "table") == b"name  time\n"
    assert table_bytes(pl.DataFrame(schema={"name": pl.String}), "csv") == b"name\n"
    assert table_bytes(pl.DataFrame(schema={"name": pl.String}), "json") == b"[]\n"
    assert pl.read_parquet(io.BytesIO(table_bytes(pl.DataFrame({"a": []}), "parquet"))).columns == ["a"]


def test_a_table_in_every_format() -> None:
    assert table_lines(FRAME, width=80) == [
        "name           self   share  shapes   step",
        "aten::mm    54.1 ms  25.0 %  1, 2    10000",
        'a,"b"\\n<c>                -              2',
        "               0 ns   0.0 %              3",
    ]
    assert table_bytes(FRAME, "csv").decode() == (
        'name,self_ns,share,shapes,step\naten::mm,54100000,0.25,"[1,2]",10000\n"a,""b""\n<c>",,,[],2\n,0,0.0,,3\n'
    )
    assert json.loads(table_bytes(FRAME, "json")) == [
        {"name": "aten::mm", "self_ns": 54_100_000, "share": 0.25, "shapes": [1, 2], "step": 10_000},
        {"name": 'a,"b"\n<c>', "self_ns": None, "share": None, "shapes": [], "step": 2},
        {"name": None, "self_ns": 0, "share": 0.0, "shapes": None, "step": 3},
    ]
    assert pl.read_parquet(io.BytesIO(table_bytes(FRAME, "parquet"))).equals(FRAME)


def test_long_names_give_way_and_columns_that_do_not_fit_are_named() -> None:
    row = {"name": "x" * 50, "calls": 1234, "self_ns": 54_100_000, "total_ns": 54_100_000}
    frame = pl.DataFrame([row, row])
    narrow = table_lines(frame, width=40)
    assert narrow[0].split() == ["name", "calls"]
    assert narrow[3:] == ["(no room for self_ns, total_ns; a wider", " terminal or --format csv shows them)"]
    assert table_lines(frame, width=40, whole="--html")[3:] == [
        "(no room for self_ns, total_ns; a wider",
        " terminal or --html shows them)",
    ]
    for width in range(36, 90):
        heading, row, *_ = table_lines(frame, width=width)
        assert len(heading) == len(row) <= width
        assert row.startswith("x" * 27)


def test_a_single_row_that_does_not_fit_stands_upright() -> None:
    frame = pl.DataFrame({"name": ["x" * 50], "calls": [1234], "self_ns": [54_100_000]})

    assert table_lines(frame, width=20) == ["name   xxxxxxxxxxxx…", "calls  1,234", "self   54.1 ms"]


def test_wide_characters_take_two_columns() -> None:
    assert table_lines(pl.DataFrame({"name": ["名前", "ab"], "calls": [1, 2]}), width=40) == [
        "name  calls",
        "名前      1",
        "ab        2",
    ]


def test_what_was_cut_is_said() -> None:
    assert showing(20, 4310, "operators") == "showing 20 of 4,310 operators, --top 0 for all"
    assert showing(3, 3, "operators") == ""


def test_a_heading_drops_the_unit_but_never_what_tells_columns_apart() -> None:
    columns = ["ns", "busy_share", "self_ns", "self_share", "shared_memory_bytes"]
    assert [heading(name, columns) for name in columns] == ["time", "busy", "self", "self share", "shared memory"]
    assert heading("busy_share") == "busy share"


def test_no_two_columns_of_a_query_are_called_the_same() -> None:
    columns = ["ns", "time", "start_ns", "start", "self"]
    assert [heading(name, columns) for name in columns] == ["ns", "time", "start ns", "start", "self"]


def test_json_keeps_its_values_and_hides_nothing_on_a_terminal() -> None:
    value = {"größe 名前": 'a\u202eb\x7f\x9b\u200b\U000e0041"\\u202e\n'}
    written = printable_json(json.dumps(value, ensure_ascii=False).encode())
    assert written.decode() == (r'{"größe 名前": "a\u202eb\u007f\u009b\u200b\udb40\udc41\"\\u202e\n"}')
    assert json.loads(written) == value


def test_a_long_path_loses_its_beginning_and_keeps_its_line() -> None:
    line = "/home/user/a/long/way/down/to/the/train.py:42"
    table = pl.DataFrame({"line": [line], "function": ["loss_fn"], "calls": [3]})

    assert table_lines(table, width=50) == [
        "line                               function  calls",
        "…long/way/down/to/the/train.py:42  loss_fn       3",
    ]


def test_numbers_keep_their_unit_when_lines_end() -> None:
    text = "idle for 94.0 % of the step, that is 12.5 ms"

    assert filled(text, 14, following="  ") == ["idle for", "  94.0 % of", "  the step,", "  that is", "  12.5 ms"]
