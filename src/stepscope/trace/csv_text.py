"""Tables as CSV that a spreadsheet reads as data: what everything in stepscope that writes CSV uses."""

from __future__ import annotations

from typing import Final

import polars as pl

_FORMULA: Final = r"^(?:\s*[=+\-@＝＋－＠]|[\t\r\n])"
_TEXT: Final = (pl.String, pl.Categorical, pl.Enum)


def csv_text(frame: pl.DataFrame, *, raw: bool = False, header: bool = True) -> bytes:
    """The table as CSV in UTF-8.

    Text that a spreadsheet would take for a formula gets an apostrophe before it, by which spreadsheets mark text:
    names come from traces, which may be anyone's, and a formula can call programs and send other cells away.

    Args:
        raw: every text as it is.
        header: with the names of the columns.
    """
    if not raw:
        texts = [name for name, dtype in frame.schema.items() if dtype in _TEXT]
        frame = frame.with_columns(_as_text(pl.col(name).cast(pl.String)).alias(name) for name in texts)
        names = pl.Series("name", frame.columns, pl.String).to_frame().select(name=_as_text(pl.col("name")))
        frame = frame.rename(dict(zip(frame.columns, names["name"], strict=True)))
    return frame.write_csv(include_header=header).encode()


def _as_text(text: pl.Expr) -> pl.Expr:
    return pl.when(text.str.contains(_FORMULA)).then(pl.lit("'") + text).otherwise(text)
