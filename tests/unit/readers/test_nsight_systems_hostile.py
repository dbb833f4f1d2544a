"""Databases that are damaged, made to do harm, of something else, or hold what nobody asked for."""

from __future__ import annotations

import gzip
import random
import sqlite3
import struct
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard

from stepscope.diagnosis import diagnose
from stepscope.errors import NotATraceError, StepscopeError, UnreadableTraceError, UsageError
from stepscope.readers import open_trace
from stepscope.readers.nsight_systems import database
from stepscope.readers.nsight_systems.lanes import MOST_LANES
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS
from stepscope.trace.window import StepRange
from tests.unit.nsight_databases import NAMES, call, execute, in_range, kernel, process, thread, work, written
from tests.unit.small_traces import counted, rows

RUNTIME, KERNEL = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"
SECRET = "planted-secret-4711"


def opened(path: Path) -> Trace:
    trace = open_trace(path)
    trace.check()
    return trace


def outcome(path: Path) -> str:
    """Why a file was refused; "" where it was read and diagnosed."""
    try:
        diagnose(opened(path))
    except StepscopeError as error:
        return str(error)
    return ""


def steps(count: int = 50) -> dict[str, Any]:
    return {
        RUNTIME: [call(1000 * n, 1000 * n + 50, n + 1) for n in range(count)],
        KERNEL: [kernel(1000 * n + 100, 1000 * n + 900, n + 1) for n in range(count)],
        "NVTX_EVENTS": [in_range(1000 * n, 1000 * n + 90, f"step {n}") for n in range(count)],
    }


def whole_text(trace: Trace) -> str:
    tables = [str(trace.table(name).to_dicts()) for name in SCHEMAS]
    return "\n".join([*tables, repr(trace.metadata), repr(trace.warnings)])


class TestWhatNobodyAskedFor:
    def test_the_environment_and_the_output_are_never_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = written(
            tmp_path / "run.sqlite",
            **steps(),
            META_DATA_CAPTURE=[{"name": "CAPTURE_ENVIRONMENT", "value": f"TOKEN={SECRET}"}],
            TARGET_INFO_SYSTEM_ENV=[{"name": "TOKEN", "nameEnum": 1, "value": SECRET}],
            ProcessStreams=[{"globalPid": process(100), "filenameId": 90, "contentId": 91}],
            ANALYSIS_FILE=[{"id": 1, "filename": SECRET, "contentId": 91, "globalPid": process(100)}],
            META_DATA_EXPORT=[{"name": "EXPORT_USER", "value": SECRET}],
            StringIds=[{"id": number, "value": text} for number, text in (NAMES | {90: SECRET, 91: SECRET}).items()],
        )
        statements: list[str] = []
        connect = sqlite3.connect

        def watched(*arguments: Any, **more: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **more)
            connection.set_trace_callback(statements.append)
            return connection

        monkeypatch.setattr(database.sqlite3, "connect", watched)
        trace = opened(path)

        assert SECRET not in whole_text(trace)
        selects = [statement for statement in statements if statement.startswith("SELECT")]
        assert any(KERNEL in statement for statement in selects)
        never = ("META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV", "ProcessStreams", "ANALYSIS_FILE")
        assert not [statement for statement in selects if any(table in statement for table in never)]

    def test_a_query_for_them_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", META_DATA_CAPTURE=[{"name": "ENV", "value": SECRET}])
        damage: Counter[str] = Counter()
        with database.Database(path, "run", damage) as tables:
            assert tables.whole("META_DATA_CAPTURE", {"value": pl.String}, 10).is_empty()
        assert list(damage) == ["damaged_table:META_DATA_CAPTURE (access to META_DATA_CAPTURE.value is prohibited)"]


class TestTheFileIsLeftAlone:
    def test_nothing_is_written_beside_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        path = written(folder / "run.sqlite", **steps())
        execute(path, "PRAGMA journal_mode=WAL")
        before = path.read_bytes()
        path.chmod(0o444)
        folder.chmod(0o555)
        try:
            opened(path)
        finally:
            folder.chmod(0o755)

        assert [child.name for child in folder.iterdir()] == ["run.sqlite"]
        assert path.read_bytes() == before

    def test_a_log_beside_it_is_told_of_and_stays(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **steps())
        log = tmp_path / "run.sqlite-wal"
        log.write_bytes(b"not read")

        assert counted(opened(path)) == {"write_ahead_log": 1}
        assert log.read_bytes() == b"not read"

    @pytest.mark.skipif(sys.platform != "linux", reason="other systems do not have such names")
    @pytest.mark.parametrize("name", ["with space?.sqlite", "a#b%20.sqlite", "träce 跡.sqlite", "\udcff\udcfe.sqlite"])
    def test_names_of_every_kind(self, name: str, tmp_path: Path) -> None:
        assert opened(written(tmp_path / name, **steps())).device_work.height == 50

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
    def test_a_packed_file_is_unpacked_for_the_time_of_reading(self, pack: Any, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **steps())
        packed = tmp_path / "run.sqlite.packed"
        packed.write_bytes(pack(path.read_bytes()))
        plain, unpacked = opened(path), opened(packed)

        for table in SCHEMAS:
            assert plain.table(table).equals(unpacked.table(table))

    def test_a_part_of_a_packed_file_is_refused(self, tmp_path: Path) -> None:
        packed = tmp_path / "run.sqlite.gz"
        data = gzip.compress(written(tmp_path / "run.sqlite", **steps(500)).read_bytes())
        packed.write_bytes(data[: len(data) // 2])

        with pytest.raises(UnreadableTraceError, match="the compressed data ends early, and part of a database"):
            open_trace(packed)


class TestSomethingElse:
    @pytest.mark.parametrize(
        ("tables", "said"),
        [
            ({"moz_places": [{"id": 1, "url": "x"}]}, "not an export of Nsight Systems"),
            ({"rocpd_kernel_dispatch_1": [{"id": 1}]}, "rocprofv3 --output-format json"),
            ({"TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": 1}]}, "without events: record with nsys profile"),
            ({KERNEL: [kernel(0, 1) | {"start": None}]}, "without a readable event"),
        ],
    )
    def test_is_refused_with_a_sentence(self, tables: dict[str, Any], said: str, tmp_path: Path) -> None:
        with pytest.raises(StepscopeError, match=said):
            open_trace(written(tmp_path / "run.sqlite", **tables))

    @pytest.mark.parametrize("name", ["run.nsys-rep", "RUN.QDREP", "run.qdstrm"])
    def test_the_profilers_own_report_names_the_export_command(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(bytes(range(256)) * 9)

        with pytest.raises(NotATraceError, match=r"nsys export --type sqlite --output OUT\.sqlite IN\.nsys-rep"):
            open_trace(tmp_path / name)

    def test_an_export_under_a_reports_name_is_read(self, tmp_path: Path) -> None:
        assert opened(written(tmp_path / "run.nsys-rep", **steps())).device_work.height == 50

    def test_steps_of_a_file_without_any(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no step annotations"):
            open_trace(written(tmp_path / "run.sqlite", **{KERNEL: [kernel(0, 1)]}), steps=StepRange(0, 1))


class TestHostileTables:
    def test_views_virtual_tables_and_generated_columns_are_not_asked(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **{RUNTIME: [call(0, 10, 1)]})
        execute(
            path,
            f"CREATE VIEW {KERNEL} AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) "
            'SELECT start, start + 1 AS "end", 0 AS deviceId, 7 AS streamId FROM n',
            'CREATE TABLE NVTX_EVENTS (start, "end", globalTid, text AS (hex(zeroblob(1000)) || start))',
            f"INSERT INTO NVTX_EVENTS VALUES (1, 2, {thread(100)})",
        )
        trace = opened(path)

        assert (trace.launches.height, trace.device_work.height, trace.annotations.height) == (1, 0, 0)

    def test_values_of_wrong_types_are_left_out_and_counted(self, tmp_path: Path) -> None:
        wrong = [
            kernel(0, 10, 1),
            kernel(20, 30, 2) | {"start": "soon"},
            kernel(40, 50, 3) | {"end": 4.5},
            kernel(60, 70, 4) | {"registersPerThread": b"many", "gridX": "3"},
            kernel(80, 90, 5) | {"deviceId": None, "streamId": None},
            kernel(100, 90, 6),
            kernel(110, 120, -5),
            kernel(2**62 + 5, 2**62 + 6, 7),
        ]
        trace = opened(written(tmp_path / "run.sqlite", **{KERNEL: wrong}))

        assert rows(trace, "device_work", "start_ns", "duration_ns", "registers", "correlation", "queue") == [
            (0, 10, 32, 1, "7"),
            (60, 10, None, 4, "7"),
            (100, 0, 32, 6, "7"),
            (110, 10, 32, None, "7"),
        ]
        assert counted(trace)["negative_duration"] == 1
        assert counted(trace)["incomplete_row"] == 4
        told = {warning.detail for warning in trace.warnings}
        assert "values of a wrong type were left out, by table and column: CUPTI_ACTIVITY_KIND_KERNEL.start" in told

    def test_names_that_are_no_utf_8_are_kept_as_far_as_they_go(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **{KERNEL: [kernel(0, 10)]})
        execute(path, "UPDATE StringIds SET value = CAST(x'67ff6d' AS TEXT) WHERE id = 2")

        assert rows(opened(path), "device_work", "name") == [("g\ufffdm",)]

    def test_a_name_of_a_million_letters_is_cut(self, tmp_path: Path) -> None:
        trace = opened(written(tmp_path / "run.sqlite", NVTX_EVENTS=[in_range(0, 10, "x" * 1_000_000)]))

        assert trace.annotations["name"].to_list() == ["x" * database.LONGEST_TEXT]

    def test_more_threads_than_any_machine_has(self, tmp_path: Path) -> None:
        calls = [call(n, n + 1, n + 1, globalTid=thread(n % 2**24, 1 + n % 7)) for n in range(MOST_LANES + 10)]
        trace = opened(written(tmp_path / "run.sqlite", **{RUNTIME: calls}))

        assert trace.lanes.height == MOST_LANES
        assert counted(trace) == {"incomplete_row": 10, "too_many_lanes": 1}

    def test_pages_that_are_told_of_again_and_again(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **{RUNTIME: [call(n, n + 1, n + 1) for n in range(40_000)]})
        with closing(sqlite3.connect(path)) as connection:
            root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (RUNTIME,)).fetchone()[0]
            size = connection.execute("PRAGMA page_size").fetchone()[0]
        data = bytearray(path.read_bytes())
        page = (root - 1) * size
        assert data[page] == 5  # an inner page of a table
        cells = struct.unpack_from(">H", data, page + 3)[0]
        places = [page + struct.unpack_from(">H", data, page + 12 + 2 * cell)[0] for cell in range(cells)]
        inner = struct.unpack_from(">I", data, places[-1])[0]
        data[(inner - 1) * size : inner * size] = data[page : page + size]
        for place in places:  # every child of the root is a copy of the root, whose children are all the leaves
            data[place : place + 4] = struct.pack(">I", inner)
        for place in places[-1:]:
            own = place - page + (inner - 1) * size
            data[own : own + 4] = data[places[0] - page + (inner - 1) * size :][:4]
        path.write_bytes(bytes(data))

        assert "damaged database" in outcome(path)


class TestDamage:
    def test_a_page_in_the_middle_ends_a_table_early(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **steps(2000))
        data = bytearray(path.read_bytes())
        with closing(sqlite3.connect(path)) as connection:
            size = connection.execute("PRAGMA page_size").fetchone()[0]
            pages = [
                page
                for (page,) in connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", ("NVTX_EVENTS",))
            ]
        start = (pages[0] - 1) * size
        data[start : start + size] = bytes(size)
        path.write_bytes(bytes(data))
        trace = opened(path)

        assert (trace.launches.height, trace.device_work.height, trace.annotations.height) == (2000, 2000, 0)
        assert counted(trace) == {"damaged_table": 1}
        assert "NVTX_EVENTS" in trace.warnings[0].detail

    @pytest.mark.parametrize("length", [16, 100, 5000, 20_000])
    def test_a_truncated_file(self, length: int, tmp_path: Path) -> None:
        path = written(tmp_path / "run.sqlite", **steps(2000))
        path.write_bytes(path.read_bytes()[:length])

        with pytest.raises(StepscopeError, match="database"):
            open_trace(path)

    @pytest.mark.slow
    def test_flipped_bytes_end_in_a_sentence_or_in_a_trace_that_holds_together(self, tmp_path: Path) -> None:
        whole = written(
            tmp_path / "whole.sqlite",
            **steps(),
            CUPTI_ACTIVITY_KIND_MEMCPY=[work(5, 9, 3, bytes=4, copyKind=1, srcKind=0, dstKind=2)],
            CUPTI_ACTIVITY_KIND_SYNCHRONIZATION=[work(5, 9, 3, syncType=3, eventSyncId=0)],
            PROCESSES=[{"globalPid": process(100), "pid": 100, "name": "python3"}],
        ).read_bytes()
        chance = random.Random(7)
        refused = 0
        for _ in range(30):
            data = bytearray(whole)
            for _ in range(chance.choice([1, 5, 50, 500])):
                data[chance.randrange(16, len(data))] = chance.randrange(256)
            path = tmp_path / "damaged.sqlite"
            path.write_bytes(bytes(data))
            said = outcome(path)
            assert said == "" or "damaged.sqlite" in said
            refused += said != ""
        assert 0 < refused < 80
