"""Write tables as CSV that a spreadsheet reads as data; all CSV output of stepscope uses it."""

from __future__ import annotations

from typing import Final

import polars as pl

_FORMULA: Final = r"^(?:\s*[=+\-@＝＋－＠]|[\t\r\n])"
_TEXT: Final = (pl.String, pl.Categorical, pl.Enum)


def csv_text(frame: pl.DataFrame, *, raw: bool = False, header: bool = True) -> bytes:
    """Return the table as CSV in UTF-8.

    Text that a spreadsheet would interpret as a formula is prefixed with an apostrophe, the spreadsheet's mark for
    text. Names come from untrusted traces, and a formula can run programs and send other cells away.

    Args:
        raw: leave every text as it is.
        header: include a row with the names of the columns.
    """
    if not raw:
        texts = [name for name, dtype in frame.schema.items() if dtype in _TEXT]
        frame = frame.with_columns(_as_text(pl.col(name).cast(pl.String)).alias(name) for name in texts)
        names = pl.Series("name", frame.columns, pl.String).to_frame().select(name=_as_text(pl.col("name")))
        frame = frame.rename(dict(zip(frame.columns, names["name"], strict=True)))
    return frame.write_csv(include_header=header).encode()


def _as_text(text: pl.Expr) -> pl.Expr:
    return pl.when(text.str.contains(_FORMULA)).then(pl.lit("'") + text).otherwise(text)
