"""Finding the source file that a trace names."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.commands.shared.reading import LARGEST_SHOWN_BYTES as LARGEST_BYTES
from stepscope.commands.shared.reading import recorded_file, source_lines
from stepscope.errors import UsageError

RECORDED = ["/srv/ada/job/train.py", "/srv/ada/job/net/model.py", "/srv/ada/job/old/model.py"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("/srv/ada/job/train.py", 0),
        ("train.py", 0),
        ("job/train.py", 0),
        ("net/model.py", 1),
        ("./old/model.py", 2),
    ],
)
def test_a_file_is_meant_by_its_path_or_the_end_of_it(wanted: str, found: int) -> None:
    assert recorded_file(wanted, RECORDED) == RECORDED[found]


def test_several_and_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"may be /srv/ada/job/net/model.py, /srv/ada/job/old/model.py: name more"):
        recorded_file("model.py", RECORDED)
    with pytest.raises(UsageError, match=r"belongs to 'rain.py'; the files are: /srv/ada/job/train.py, "):
        recorded_file("rain.py", RECORDED)
    with pytest.raises(UsageError, match="the files are: none"):
        recorded_file("train.py", [])


def test_a_profiler_that_shortened_the_path_is_understood(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    assert recorded_file(str(tmp_path / "train.py"), ["train.py", "other.py"]) == "train.py"


def test_below_the_root_the_longest_end_of_the_path_counts(tmp_path: Path) -> None:
    for place in ("model.py", "net/model.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(f"# {place}\n")

    assert source_lines(RECORDED[1], "model.py", str(tmp_path)) == (str(tmp_path / "net/model.py"), ["# net/model.py"])
    assert source_lines("/x/../../model.py", "model.py", str(tmp_path / "net")) is not None
    assert source_lines("/x/../model.py", "model.py", str(tmp_path / "net")) == (
        str(tmp_path / "net/model.py"),
        ["# net/model.py"],
    )
    with pytest.raises(UsageError, match="is not a folder"):
        source_lines(RECORDED[0], "train.py", str(tmp_path / "nowhere"))


def test_a_trace_cannot_have_any_file_shown_that_is_no_source_text(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not show")

    assert source_lines(str(secret), "no/such/secret", None) is None


def test_encodings_and_what_is_no_text(tmp_path: Path) -> None:
    latin, binary, large = tmp_path / "latin.py", tmp_path / "binary.py", tmp_path / "large.py"
    latin.write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    binary.write_bytes(b"x\0y")
    large.write_bytes(b"x" * (LARGEST_BYTES + 1))

    assert source_lines(str(latin), "latin.py", None) == (str(latin), ["# coding: latin-1", "x = 'é'"])
    for place in (binary, large):
        with pytest.raises(UsageError, match="is not source text"):
            source_lines(str(place), place.name, None)


def test_names_that_no_file_can_have_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()

    assert recorded_file(str(tmp_path / "x.py"), ["nul\0.py", str(tmp_path / "x.py")]) == str(tmp_path / "x.py")
    assert source_lines("/" + "a" * 300 + ".py", "nul\0.py", None) is None
    assert source_lines("/a/nul\0.py", "nul.py", str(tmp_path)) is None
    assert source_lines("/" + "a" * 300 + ".py", "a.py", str(tmp_path)) is None
