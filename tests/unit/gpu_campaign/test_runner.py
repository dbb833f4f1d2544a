"""Items run in processes of their own: whatever becomes of one, the others are done and nothing is lost."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu_campaign import runner, summary
from benchmarks.gpu_campaign.plan import PARTS, Item
from benchmarks.gpu_campaign.results import Results
from benchmarks.gpu_campaign.runner import Campaign, part_ends

pytestmark = pytest.mark.slow
HERE = "tests.unit.gpu_campaign.items"


def item(name: str, work: str, about: object = "", **more: object) -> Item:
    return Item("faults", name, f"{HERE}.{work}", str(about), **more)  # type: ignore[arg-type]


def ran(folder: Path, *items: Item, limit_s: float = 60.0, jobs: int = 2) -> dict[str, str]:
    """The outcomes after a call of the campaign."""
    results = Results.opened(folder)
    Campaign(results, items, limit_s, device="cpu", is_dry=True, jobs=jobs, say=lambda _: None).run()
    assert Results.opened(folder).items == results.items
    return {path.partition("/")[2]: found["outcome"] for path, found in results.items.items()}


def test_whatever_becomes_of_an_item_the_others_are_done(tmp_path: Path) -> None:
    calls, out = tmp_path / "calls", tmp_path / "out"
    items = (
        item("wrong", "fails", "Tuesday"),
        item("crashed", "crashes"),
        item("not-here", "lacks"),
        item("without", "counted", needs=("a_module_that_is_not_there",)),
        item("good", "counted", calls),
    )
    assert ran(out, *items) == {
        "without": "skipped", "wrong": "failed", "crashed": "failed", "not-here": "skipped", "good": "done",
    }  # fmt: skip
    found = Results.opened(out).items
    assert found["faults/wrong"]["error"] == "ValueError: it is Tuesday"
    assert "Traceback" in found["faults/wrong"]["log"]
    assert found["faults/crashed"]["error"] == f"its process ended with {-signal.SIGABRT}"
    assert "the last words" in found["faults/crashed"]["log"]
    assert found["faults/not-here"]["error"] == "the device has no FP8"
    assert "a_module_that_is_not_there" in found["faults/without"]["error"]
    assert found["faults/good"]["result"] == {"answer": 42}
    assert {each.name for each in out.iterdir()} == {"summary.json", "summary.md", "table.parquet", "traces-1.zip"}
    page = (out / "summary.md").read_text()
    assert "- faults/wrong: failed: ValueError: it is Tuesday" in page
    assert "| faults | 1 | 2 | 2 | 0 |" in page
    assert "could not be put into words: KeyError" in page  # the result is none of the part's


def test_what_is_done_is_not_repeated_and_what_failed_is(tmp_path: Path) -> None:
    calls, more = tmp_path / "calls", tmp_path / "more"
    good = item("good", "counted", calls)
    ran(tmp_path / "out", good, item("again", "fails"))

    outcomes = ran(tmp_path / "out", good, item("again", "counted", more))

    assert outcomes == {"good": "done", "again": "done"}
    assert calls.read_text() == more.read_text() == "cpu True\n"


def test_an_item_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.2)
    number = tmp_path / "number"

    outcomes = ran(tmp_path / "out", item("hung", "hangs", number, most_s=8.0), item("good", "counted", tmp_path / "c"))

    assert outcomes == {"hung": "failed", "good": "done"}
    assert Results.opened(tmp_path / "out").items["faults/hung"]["error"].startswith("it took longer than 8 s")
    assert is_gone(int(number.read_text()))


def test_an_interruption_keeps_what_is_done_and_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.2)
    number, calls, out = tmp_path / "number", tmp_path / "calls", tmp_path / "out"
    good, hung, later = item("good", "counted", calls), item("hung", "hangs", number), item("later", "counted", calls)

    def interrupt() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (number.exists() and number.read_text()):
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ran(out, good, hung, later, jobs=1)
    thread.join()

    found = Results.opened(out).items
    assert {path: each["outcome"] for path, each in found.items()} == {
        "faults/good": "done",
        "faults/hung": "interrupted",
    }
    assert is_gone(int(number.read_text()))
    assert "| faults | 1 | 0 | 0 | 2 |" in (out / "summary.md").read_text()
    assert ran(out, good, item("hung", "counted", calls), later, jobs=1) == {
        "good": "done", "hung": "done", "later": "done",
    }  # fmt: skip


def test_an_item_that_the_parts_end_cuts_off_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(runner, "LEAST_S", 1.0)

    assert ran(tmp_path, item("hung", "hangs", tmp_path / "number"), limit_s=3.0) == {"hung": "interrupted"}
    assert "| faults | 0 | 0 | 0 | 1 |" in (tmp_path / "summary.md").read_text()


def test_no_item_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert ran(tmp_path, item("good", "counted", tmp_path / "calls"), limit_s=1.0) == {}
    assert "| faults | 0 | 0 | 0 | 1 |" in (tmp_path / "summary.md").read_text()


def test_items_that_take_turns_run_beside_one_another_and_use_the_device_alone(tmp_path: Path) -> None:
    """Each notes its begin and end while it has its turn; the file has them in pairs."""
    notes = tmp_path / "notes"
    items = [item(f"n{number}", "takes_its_turn", notes, takes_turns=True) for number in range(3)]
    results = Results.opened(tmp_path / "out")
    began = time.monotonic()

    Campaign(results, items, 60.0, device="cpu", is_dry=False, jobs=1, say=lambda _: None).run()

    ends = [each["result"] for each in results.items.values()]
    assert len(ends) == 3
    assert sum(each["seconds"] for each in results.items.values()) > time.monotonic() - began  # side by side
    words = notes.read_text().split()
    assert words[::2] == words[1::2]
    assert len(set(words)) == 3


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("ValueError: it is Tuesday", "ValueError: it is Tuesday"),
        (
            "ProgramFailed: x ended with 1:\n  File 3\ntorch.OutOfMemoryError: no room\nstepscope: nothing",
            "torch.OutOfMemoryError: no room",
        ),
        ("ProgramFailed: python x ended with 2:\nstepscope: '1' is not a number", "stepscope: '1' is not a number"),
        ("", ""),
    ],
)
def test_the_line_that_says_what_went_wrong_is_told(error: str, told: str) -> None:
    assert summary.reason(error) == told


def test_parts_share_the_limit() -> None:
    ends = part_ends([Item("tests", "a", "x"), Item("remedies", "b", "x"), Item("tests", "c", "x")], 100.0)

    assert ends == {
        "tests": pytest.approx(100 * PARTS["tests"] / (PARTS["tests"] + PARTS["remedies"])),
        "remedies": 100,
    }


def is_gone(pid: int) -> bool:
    """Whether the process ends within a second; one that nobody has waited for yet has ended too."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
