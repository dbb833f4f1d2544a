import os
from pathlib import Path

import pytest

from stepscope.files import keep_sealed, kept_sealed, whole_file


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    with whole_file(place) as file:
        file.write(b"half")
        assert not place.exists()
    assert place.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [place]


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    place.write_bytes(b"old")

    def interrupted() -> None:
        with whole_file(place) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert place.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [place]


def test_permissions_are_the_users_or_those_of_the_file_before_or_private(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        for name, private in (("new", False), ("kept", False), ("private", True)):
            if name != "new":
                (tmp_path / name).touch()
                (tmp_path / name).chmod(0o604)
            with whole_file(tmp_path / name, private=private):
                pass
    finally:
        os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"new": 0o640, "kept": 0o604, "private": 0o600}


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_the_longest_name_that_a_file_can_have(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    with whole_file(place) as file:
        file.write(b"data")
    assert place.read_bytes() == b"data"


def test_what_is_kept_stays_within_its_limit(tmp_path: Path) -> None:
    old, new = tmp_path / "cache" / "f0", tmp_path / "cache" / "0f"
    keep_sealed(old, bytes(1_000), 1_500)
    os.utime(old, (1, 1))
    keep_sealed(new, bytes(1_000), 1_500)

    assert list(new.parent.iterdir()) == [new]
    assert kept_sealed(new) == bytes(1_000)
