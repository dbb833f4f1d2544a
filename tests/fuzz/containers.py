"""Damage by what a file is: packed data inside its packing, databases, pickles, msgpack, text, else bytes."""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
import pickletools
import re
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zstandard

from tests.fuzz.messages import changed_message
from tests.fuzz.values import NUMBERS, OTHERS, TEXTS, changed_json, changed_tree

_TOKEN = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z_]{2,}")
_DATABASE = b"SQLite format 3\0"


def changed(random: Random, data: bytes, name: str) -> bytes:
    """A file's content after some damage; its structure is told by its content and by the end of its name."""
    if data[:2] == b"\x1f\x8b":
        inner = changed(random, gzip.decompress(data), name.removesuffix(".gz"))
        return raw_bytes(random, data) if random.random() < 0.03 else gzip.compress(inner, 1, mtime=0)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        unpacked = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        inner = changed(random, unpacked, name.removesuffix(".zst"))
        return raw_bytes(random, data) if random.random() < 0.03 else zstandard.compress(inner, 1)
    result = _by_structure(random, data, name)
    if random.random() < 0.03:
        result = raw_bytes(random, result)
    pack = random.random()
    return (
        gzip.compress(result, 1, mtime=0) if pack < 0.02 else zstandard.compress(result, 1) if pack < 0.03 else result
    )


def _by_structure(random: Random, data: bytes, name: str) -> bytes:
    if random.random() < 0.06:
        return raw_bytes(random, data)
    if data.startswith(_DATABASE):
        return changed_database(random, data)
    if name.endswith(".lines"):
        if data.startswith(b"stepscope lines\n"):
            return raw_bytes(random, data)  # which its checksum tells
        return msgspec.msgpack.encode(_packable(changed_tree(random, msgspec.msgpack.decode(data))), enc_hook=str)
    if data[:1] == b"\x80" and data[-1:] == b".":
        return changed_pickle(random, data)
    if name.endswith((".pb", ".pftrace")):
        return changed_message(random, data)
    if data.lstrip()[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError):  # a log's line may begin so too
            return changed_json(random, data)
    if name.endswith(".parquet"):
        return raw_bytes(random, data)
    return changed_text(random, data)


def raw_bytes(random: Random, data: bytes) -> bytes:
    """Bytes flipped, cut out, put in, doubled, cut off, or zeroed."""
    for _ in range(random.choice((1, 1, 2, 6))):
        place = random.randint(0, len(data))
        size = random.choice((1, 1, 4, 64, 700))
        match random.randrange(6):
            case 0:
                data = data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]
            case 1:
                data = data[:place] + data[place + size :]
            case 2:
                data = data[:place] + random.randbytes(size) + data[place:]
            case 3:
                data = data[:place] + data[place : place + size] + data[place:]
            case 4:
                data = data[:place]
            case _:
                data = data[:place] + bytes(size) + data[place + size :]
    return data


def _packable(value: Any) -> Any:
    """The tree without numbers and texts that msgpack has no word for."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_packable(each) for each in value]
    if isinstance(value, dict):
        return {_packable(key): _packable(each) for key, each in value.items()}
    return value if not isinstance(value, int) or -(2**63) <= value < 2**64 else float(value)


def changed_pickle(random: Random, data: bytes) -> bytes:
    """Another value of the same kind, or the same with some of the machine's operations changed."""
    if random.random() < 0.7:
        tree = changed_tree(random, pickle.loads(data))  # a seed of our own
        if random.random() < 0.1 and isinstance(tree, dict) and tree:  # one value in many places, itself among them
            value = random.choice(list(tree.values()))
            if isinstance(value, list):
                value.extend([value] * random.choice((1, 50)) if random.random() < 0.3 else value * 3)
        return pickle.dumps(tree, protocol=random.randint(2, 5))
    starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    parts = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(1, len(parts))
        match random.randrange(5):
            case 0:
                parts.insert(place, random.choice(parts))
            case 1:
                del parts[place : place + random.choice((1, 3))]
            case 2:
                parts[place] = random.choice(parts)
            case 3:
                parts[place] = random.choice(
                    (b"cos\nsystem\n", b"R", b"N", b"]", b"}", b"(", b"0", b"2", b"h\xff", b".")
                )
            case _:
                parts[place] = raw_bytes(random, parts[place])
        if len(parts) < 2:
            break
    return b"".join(parts)


def changed_text(random: Random, data: bytes) -> bytes:
    """Lines moved, numbers and words replaced, cells left out or added."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(random.choice((1, 1, 2, 5))):
        place = random.randrange(len(lines))
        line = lines[place]
        match random.randrange(9):
            case 0:
                del lines[place]
            case 1:
                lines.insert(random.randint(0, len(lines)), line)
            case 2:
                lines.insert(random.randint(0, len(lines) - 1), lines.pop(place))
            case 3:
                lines[place] = line[: random.randint(0, len(line))]
            case 4:  # a cell more or less
                cells = line.split(",")
                cells.insert(random.randint(0, len(cells)), random.choice(("", '"', random.choice(TEXTS))))
                lines[place] = ",".join(cells[:: random.choice((1, 1, -1))])
            case 5:
                lines[place] = " " * random.randint(0, 9) + line.lstrip()
            case _:
                lines[place] = _changed_token(random, line)
        lines = lines or [""]
    text = random.choice(("\n", "\n", "\n", "\r\n", "\r")).join(lines) if random.random() < 0.1 else "\n".join(lines)
    text = f"\ufeff{text}" if random.random() < 0.02 else text
    return text.encode(random.choice(("utf-8",) * 30 + ("utf-16",)), "surrogatepass")


def _changed_token(random: Random, line: str) -> str:
    found = list(_TOKEN.finditer(line))
    if not found:
        return line + random.choice(TEXTS)
    token = random.choice(found)
    other = random.choice((random.choice(TEXTS), str(random.choice(NUMBERS)), random.choice(found)[0], token[0] * 9))
    return line[: token.start()] + other + line[token.end() :]


def changed_database(random: Random, data: bytes) -> bytes:
    """Rows, columns and tables changed by SQL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.sqlite"
        path.write_bytes(data)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.executescript("PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF")
            for _ in range(random.choice((1, 1, 2, 4))):
                try:
                    _change_database(random, database)
                except (sqlite3.Error, OverflowError, UnicodeEncodeError):
                    continue  # earlier changes left no such thing
        return path.read_bytes()


def _change_database(random: Random, database: sqlite3.Connection) -> None:
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = _quoted(random.choice(tables))
    names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    column, other = _quoted(random.choice(names)), _quoted(random.choice(names))
    rows = database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    some = random.choice(("", f" WHERE rowid = {random.randint(1, max(rows, 1))}", " WHERE rowid % 2"))
    value = random.choice((*NUMBERS, *TEXTS, None, b"\xff\x00", random.choice(OTHERS)))
    value = json.dumps(value) if isinstance(value, (list, dict)) else value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)
    match random.randrange(12):
        case 0:
            database.execute(f"DELETE FROM {table}{some}")
        case 1:
            database.execute(f"DROP TABLE {table}")
        case 2:
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        case 3:
            database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO {_quoted(random.choice(TEXTS) or 'x')}")
        case 4:
            database.execute(f"ALTER TABLE {table} RENAME TO {_quoted(random.choice((*tables, *TEXTS)) or 'x')}")
        case 5:
            database.execute(f"UPDATE OR IGNORE {table} SET {column} = {other}{some}")
        case 6:
            columns = ", ".join(map(_quoted, names[1:] or names))
            database.execute(f"INSERT OR IGNORE INTO {table} ({columns}) SELECT {columns} FROM {table}")
        case 7:  # a view in the place of a table
            what = random.choice((f"SELECT NULL AS {column}", f"SELECT * FROM {_quoted(random.choice(tables))}"))
            database.execute(f"DROP TABLE {table}")
            database.execute(f"CREATE VIEW {table} AS {what}")
        case 8:
            database.execute(f"UPDATE OR IGNORE {table} SET {column} = -{column}{some}")
        case _:
            database.execute(f"UPDATE OR IGNORE {table} SET {column} = ?{some}", (value,))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
