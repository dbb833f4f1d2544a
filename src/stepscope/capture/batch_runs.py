"""One program, recorded once for each of several batch sizes into one run folder.

<run>/batch-sizes.json    which traces belong to which size, and how each program ended
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from stepscope.capture.run_folder import RunFolder, write_json
from stepscope.errors import UsageError
from stepscope.kept_json import read_kept, with_checksum

NAME: Final = "batch-sizes.json"
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One size: how the program ended, and what it recorded, as paths below the run's folder."""

    batch_size: int
    exit_code: int
    traces: tuple[str, ...]

    @property
    def first_ranks_last(self) -> str:
        """The trace that counts: of the first rank the last, whose steps were not only guessed."""
        rank = self.traces[0].split("/")[0]
        return [trace for trace in self.traces if trace.split("/")[0] == rank][-1]


def with_batch_size(command: Sequence[str], flag: str, batch_size: int) -> list[str]:
    """The command with the batch size behind it: "--flag 8", or "flag=8" where the flag ends in "="."""
    if flag.endswith("="):
        return [*command, f"{flag}{batch_size}"]
    option = flag if flag.startswith("-") else f"--{flag}"
    return [*command, option, str(batch_size)]


def record_sizes(
    command: Sequence[str],
    flag: str,
    sizes: Sequence[int],
    folder: RunFolder,
    environment: Mapping[str, str],
    run_program: Callable[[Sequence[str], Mapping[str, str]], int],
    say: Callable[[str], None],
) -> list[BatchRun]:
    """Run the program once for each size, keeping what was recorded whatever becomes of the others.

    Args:
        run_program: runs a command to its end and returns its exit code.
        say: is told what is about to happen, and what went wrong.
    """
    runs: list[BatchRun] = []
    for batch_size in sizes:
        before = set(folder.traces())
        say(f"batch size {batch_size}")
        code = run_program(with_batch_size(command, flag, batch_size), environment)
        made = [path.relative_to(folder.path).as_posix() for path in folder.traces() if path not in before]
        runs.append(BatchRun(batch_size, code, tuple(made)))
        write_json(folder.path / NAME, with_checksum({"runs": [asdict(run) for run in runs]}))
        if code == INTERRUPTED:
            break
        if not made:
            ended = f"ended with exit code {code}" if code else "ended"
            say(f"batch size {batch_size}: the program {ended} before steps were recorded")
        elif code:
            say(f"batch size {batch_size}: the program ended with exit code {code} after steps were recorded")
    return runs


def read_runs(folder: Path) -> list[BatchRun]:
    """What `record_sizes` wrote into a run's folder; empty where it did not.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return []
    content = read_kept(path)
    try:
        return [
            BatchRun(int(each["batch_size"]), int(each["exit_code"]), tuple(map(str, each["traces"])))
            for each in content["runs"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is damaged: it does not say what was recorded of each size") from error
