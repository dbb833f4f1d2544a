import polars as pl

from stepscope.trace.tables import csv_text


def test_nothing() -> None:
    assert csv_text(pl.DataFrame({"a": []}, schema={"a": pl.String})) == b"a\n"


def test_what_a_spreadsheet_calls_a_formula_is_text() -> None:
    cells = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "＝1", "a=1", "-", "", None]
    text = pl.read_csv(csv_text(pl.DataFrame({"a": cells, "n": range(-1, 11)})))
    after = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", "'\r=1", "'  =1", "'＝1", "a=1", "'-"]
    assert text["a"].to_list()[:10] == after
    assert text["n"].to_list() == list(range(-1, 11))


def test_names_of_columns_and_categories() -> None:
    frame = pl.DataFrame({"=a": pl.Series(["=b"], dtype=pl.Categorical)})
    assert csv_text(frame) == b"'=a\n'=b\n"
    assert csv_text(frame, header=False) == b"'=b\n"


def test_raw() -> None:
    assert csv_text(pl.DataFrame({"=a": ["=b", "-c"]}), raw=True) == b"=a\n=b\n-c\n"
