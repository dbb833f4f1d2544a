"""Writes what a tool says of the set of labelled slow trainings, as score.py reads it.

    python benchmarks/labelled/answers.py TOOL --out FILE [--python PYTHON] [--traces FOLDER] [--recordings FOLDER]

TOOL is stepscope, hta, torch-tb-profiler, nsys-ai or xprof; --python names the interpreter that has it. FOLDER of
--traces has the public traces (README.md here says from where), that of --recordings the recordings of programs, as
diagnosis_accuracy.py and blind_accuracy.py leave them with --traces. Recordings of simulated devices are written there
where they are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks import diagnosis_peers as peers  # noqa: E402
from benchmarks.labelled.judging import Said, truths  # noqa: E402
from benchmarks.labelled.programs import TWINS, programs  # noqa: E402
from benchmarks.labelled.score import Answers  # noqa: E402
from benchmarks.real_traces import said_of  # noqa: E402
from tests.zoo import simulated  # noqa: E402

PEERS: Final[dict[str, Callable[[str], peers.Peer]]] = {
    "hta": lambda python: peers.known(python, python)[0],
    "torch-tb-profiler": lambda python: peers.known(python, python)[1],
    "nsys-ai": peers.nsys_ai,
    "xprof": peers.xprof,
}


def recordings(traces: Path | None, programs_folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Each item of the set that was recorded: its name, and the file or folder."""
    if traces is not None:
        yield from ((path, traces / path) for path in truths().by_path())
    if programs_folder is None:
        return
    for one in simulated.SIMULATED:
        for twin in TWINS:
            if not (programs_folder / f"{one.name}-{twin}.json.gz").exists():
                one.write(twin, programs_folder)
    for program in programs():
        for twin in TWINS:
            if (recording := program.recordings(programs_folder, twin)).exists():
                yield f"{program.name}/{twin}", recording


def of_a_peer(peer: peers.Peer, recording: Path) -> Said | None:
    """What a peer says of one recording, of ranks the first; None where the file is not of its kind."""
    files = sorted(recording.rglob("*")) if recording.is_dir() else [recording]
    readable = [file for file in files if file.is_file() and peer.reads(file)]
    return peer.said(readable[0]) if readable else None


def main() -> None:
    """Ask the tool and write its answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["stepscope", *PEERS])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--recordings", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    items: dict[str, Said] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["STEPSCOPE_CACHE_DIR"] = cache
        for name, recording in recordings(arguments.traces, arguments.recordings):
            if arguments.tool == "stepscope":
                said: Said | None = said_of(recording)
            else:
                said = of_a_peer(PEERS[arguments.tool](arguments.python), recording)
            if said is not None:
                items[name] = said
                print(f"{name}: {said.refused or next((each.words for each in said.findings), 'nothing')}", flush=True)
    arguments.out.write_bytes(msgspec.json.encode(Answers(arguments.tool, items)))


if __name__ == "__main__":
    main()
