"""Which row is which: rows of two tables, and lines after an edit."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.compare.matching import OPERATOR_LEVELS, matched, matched_lines, with_families, without_unknown

OPERATORS = {"name": pl.String, "module": pl.String, "input_shapes": pl.String, "ns": pl.Int64, "calls": pl.Int64}
LINES = {
    "file": pl.String, "line": pl.Int64, "function": pl.String, "exact_line": pl.Boolean, "operators": pl.String,
    "ns": pl.Int64,
}  # fmt: skip
SHOWN = ("name", "module", "input_shapes", "after_module", "after_input_shapes", "match", "before_ns", "after_ns")


def operators(*rows: tuple[Any, ...]) -> pl.DataFrame:
    return pl.DataFrame([(*row, 1) for row in rows], schema=OPERATORS, orient="row")


def shown(before: pl.DataFrame, after: pl.DataFrame) -> list[tuple[Any, ...]]:
    return matched(*with_families(before, after), OPERATOR_LEVELS, ("ns", "calls"), "ns").select(SHOWN).rows()


def lines(*rows: tuple[Any, ...], file: str | None = "train.py", function: str = "main") -> pl.DataFrame:
    """Rows of line, operators and ns."""
    filled = [(file, line, function, True, called, ns) for line, called, ns in rows]
    return pl.DataFrame(filled, schema=LINES, orient="row")


def pairs(before: pl.DataFrame, after: pl.DataFrame) -> list[tuple[Any, ...]]:
    table = matched_lines(before, after, ("ns",))
    return table.select("line", "after_line", "match", "before_ns", "after_ns").rows()


def test_empty_tables() -> None:
    assert shown(operators(), operators()) == []
    assert pairs(lines(), lines()) == []


def test_the_same_in_everything_before_anything_else() -> None:
    before = operators(("mm", "a", "[1]", 10), ("mm", "a", "[2]", 20))
    after = operators(("mm", "a", "[2]", 5), ("mm", "a", "[3]", 7))

    assert shown(before, after) == [
        ("mm", "a", "[2]", None, None, "same", 20, 5),
        ("mm", "a", "[1]", None, "[3]", "other shapes", 10, 7),
    ]


def test_the_same_module_comes_before_the_same_shapes() -> None:
    before = operators(("mm", "a", "[1]", 10), ("mm", "b", "[4]", 1))
    after = operators(("mm", "a", "[2]", 5), ("mm", "c", "[1]", 7), ("mm", "d", "[4]", 2))

    assert shown(before, after) == [
        ("mm", "a", "[1]", None, "[2]", "other shapes", 10, 5),
        ("mm", "b", "[4]", "d", None, "other module", 1, 2),
        ("mm", "c", "[1]", None, None, "only after", 0, 7),
    ]


def test_elsewhere_with_other_shapes() -> None:
    assert shown(operators(("mm", "a", "[1]", 10)), operators(("mm", "b", "[2]", 5))) == [
        ("mm", "a", "[1]", "b", "[2]", "other module and shapes", 10, 5)
    ]


def test_other_numbers_come_last_and_only_for_names_of_one_side() -> None:
    before = operators(
        ("triton_fused_add_3", "a", "[1]", 10), ("triton_fused_add_5", "b", "[1]", 20), ("mm", "a", "", 1)
    )
    after = operators(
        ("triton_fused_add_3", "c", "[2]", 11),
        ("triton_fused_add_7", "b", "[1]", 21),
        ("triton_fused_add_8", "d", "[4]", 2),
        ("mm_1", "a", "", 1),
    )
    table = matched(*with_families(before, after), OPERATOR_LEVELS, ("ns", "calls"), "ns")

    assert table.select("name", "after_name", "match", "before_ns", "after_ns").rows() == [
        ("triton_fused_add_3", None, "other module and shapes", 10, 11),
        ("triton_fused_add_5", "triton_fused_add_7", "same operator, other number", 20, 21),
        ("mm", None, "only before", 1, 0),
        ("triton_fused_add_8", None, "only after", 0, 2),
        ("mm_1", None, "only after", 0, 1),
    ]


def test_several_are_taken_together_under_the_costliest() -> None:
    before = operators(("mm", "a", "[1]", 10), ("mm", "a", "[2]", 30), ("mm", None, "[1]", 1))
    after = operators(("mm", "a", "[3]", 5), ("mm", None, "[1]", 2), ("add", None, None, 9))

    assert shown(before, after) == [
        ("mm", None, "[1]", None, None, "same", 1, 2),
        ("mm", "a", "[2]", None, "[3]", "other shapes", 40, 5),
        ("add", None, None, None, None, "only after", 0, 9),
    ]


def test_sums_are_kept_whatever_matches() -> None:
    before = operators(*[("mm", module, f"[{size}]", 7) for module in "abc" for size in range(4)])
    after = operators(*[("mm", module, f"[{size}]", 11) for module in "bcd" for size in range(2, 7)])

    table = matched(*with_families(before, after), OPERATOR_LEVELS, ("ns", "calls"), "ns")

    assert (table["before_ns"].sum(), table["after_ns"].sum()) == (12 * 7, 15 * 11)
    assert (table["before_calls"].sum(), table["after_calls"].sum()) == (12, 15)


def test_what_one_side_does_not_know_is_left_out() -> None:
    before, after, gone = without_unknown(
        operators(("mm", "a", "[1]", 1)), operators(("mm", "a", None, 2)), ("module", "input_shapes")
    )

    assert gone == ("input_shapes",)
    assert shown(before, after) == [("mm", "a", None, None, None, "same", 1, 2)]


def test_what_an_empty_side_does_not_know_is_kept() -> None:
    before, _, gone = without_unknown(operators(("mm", "a", "[1]", 1)), operators(), ("input_shapes",))

    assert gone == ()
    assert before["input_shapes"].to_list() == ["[1]"]


def test_lines_that_moved_are_known_by_what_they_call() -> None:
    """Given two lines that were put in above, of which one calls what a line below calls too."""
    before = lines((10, "mm", 100), (11, "relu", 20), (12, "cross_entropy", 30))
    after = lines((10, "embedding", 5), (12, "mm", 90), (13, "relu", 20), (14, "cross_entropy", 30))

    assert pairs(before, after) == [
        (10, None, "only after", 0, 5),
        (10, 12, "other line", 100, 90),
        (11, 13, "other line", 20, 20),
        (12, 14, "other line", 30, 30),
    ]


def test_a_line_that_was_edited_is_found_by_its_distance_from_the_one_before() -> None:
    before = lines((10, "mm", 100), (12, "slow_loss", 400))
    after = lines((13, "mm", 100), (15, "fast_loss", 10))

    assert pairs(before, after) == [(10, 13, "other line", 100, 100), (12, 15, "other line", 400, 10)]


def test_a_loop_that_was_replaced_went_and_came() -> None:
    before = lines((10, "mm", 1), (12, "select cross_entropy", 400), (13, "div", 1))
    after = lines((10, "mm", 1), (11, "cross_entropy", 10), (12, "div", 1))

    assert sorted(pairs(before, after), key=str) == [
        (10, None, "same", 1, 1),
        (11, None, "only after", 0, 10),
        (12, None, "only before", 400, 0),
        (13, 12, "other line", 1, 1),
    ]


def test_a_function_of_which_only_the_definition_is_known_stays_one() -> None:
    before = lines((10, "mm", 5)).with_columns(exact_line=pl.lit(False))
    after = lines((14, "mm add", 7)).with_columns(exact_line=pl.lit(False))

    assert pairs(before, after) == [(10, 14, "other line", 5, 7)]


def test_a_folder_that_moved_parts_nothing_and_two_files_of_one_name_are_not_mixed_up() -> None:
    before = lines((10, "mm", 5), file="/home/alice/run1/train.py")
    after = lines((10, "mm", 7), file="/home/alice/run2/train.py")
    other = lines((10, "mm", 9), file="/home/alice/run3/train.py")

    found = matched_lines(before, after, ("ns",)).row(0, named=True)
    assert (found["match"], found["after_file"]) == ("same", "/home/alice/run2/train.py")
    assert matched_lines(before, pl.concat([after, other]), ("ns",))["match"].to_list() == [
        "only before", "only after", "only after",
    ]  # fmt: skip


def test_what_has_no_line_is_matched_too() -> None:
    nowhere = pl.DataFrame([(None, None, None, None, None, 3)], schema=LINES, orient="row")

    assert pairs(nowhere, nowhere) == [(None, None, "same", 3, 3)]
