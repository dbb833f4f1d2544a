"""The parts of the campaign and the items of each; nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.zoo.gpu.registry import FAULTS

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PARTS: Final = {
    "environment": 1.0,
    "tests": 2.5,
    "faults": 6.0,
    "remedies": 8.0,
    "prediction": 6.5,
    "overhead": 1.0,
}
"""By part: its minutes of the 25 that all have; with another total limit all are scaled."""
ZOO: Final = (
    "optimizer_one_by_one",
    "attention_by_hand",
    "per_token_loss",
    "large_logits",
    "handwritten_gelu",
    "handwritten_layernorm",
    "handwritten_lstm",
    "head_by_head",
    "sample_by_sample",
    "expert_by_expert",
    "layouts_to_and_fro",
    "casts_to_and_fro",
    "clipping_one_by_one",
    "gradients_set_to_zero",
    "dense_embedding_gradient",
    "padded_batches",
    "requests_one_by_one",
    "cache_grown_by_cat",
)
"""Programs of the zoo that mean something on a device: all their tensors are made by torch, in one process."""
WORKLOADS: Final = ("gpt2", "resnet50", "encoder", "unet", "dlrm")
RECORDED: Final = ("gpt2", "resnet50", "encoder", "gpt2_decoding", "unet_inference")
"""Three trainings and two inferences that predictions are tested with."""


class NotHere(Exception):
    """An item that this machine cannot run; the message says what is missing."""


@dataclass(frozen=True)
class At:
    """Where and how an item runs.

    Attributes:
        device: such as "cuda:0" or "cpu".
        is_dry: tiny sizes, without a GPU.
        work: a folder of its own; what lies below its `keep` at the end is carried away.
        seconds: how long it may take.
    """

    device: str
    is_dry: bool
    work: Path
    seconds: float

    @property
    def keep(self) -> Path:
        """The folder of what is carried away: tables (`*.parquet`) and traces."""
        (self.work / "keep").mkdir(exist_ok=True)
        return self.work / "keep"


Work = Callable[[At, str], dict[str, Any]]


@dataclass(frozen=True)
class Item:
    """One thing to do, in a process of its own.

    Attributes:
        part: one of PARTS.
        name: within the part.
        work: the module of this package and the function in it, such as "faults.planted".
        about: the function's argument.
        most_s: seconds after which it is ended.
        needs: modules without which it cannot run.
        takes_turns: its programs use the device in turns with those of other such items, which run beside it.
    """

    part: str
    name: str
    work: str
    about: str = ""
    most_s: float = 120.0
    needs: tuple[str, ...] = ()
    takes_turns: bool = False

    @property
    def path(self) -> str:
        """Such as "faults/small_model"."""
        return f"{self.part}/{self.name}"

    @property
    def missing(self) -> list[str]:
        """Modules that this Python lacks."""
        return [name for name in self.needs if find_spec(name) is None]


RECORDING: Final = ("msgspec", "isal", "xxhash", "polars", "zstandard", "platformdirs")
"""What recording and diagnosing need, of stepscope's dependencies."""


def items(*, is_dry: bool) -> list[Item]:
    """All items in their order, the most valuable of each part first; a dry run has a part of the repeated ones."""
    found = [
        Item("environment", "machine", "environment.machine"),
        Item("environment", "environment", "environment.stepscope_environment", needs=RECORDING),
        Item("environment", "devices", "environment.measured", needs=RECORDING),
    ]
    files = gpu_tests()
    groups = [files] if is_dry else [[each] for each in files]
    for group in groups:
        file = Path(group[0])
        name = "all" if is_dry else f"{file.parent.name}-{file.stem.removeprefix('test_')}"
        found.append(Item("tests", name, "tests_on_device.run", " ".join(group), needs=("pytest", *RECORDING)))
    for fault in FAULTS:
        needs = (*fault.needs, *RECORDING)
        found.append(Item("faults", fault.name, "faults.planted", fault.name, needs=needs, takes_turns=True))
    for name in ZOO[: 1 if is_dry else None]:
        found.append(Item("faults", f"zoo-{name}", "faults.of_the_zoo", name, needs=RECORDING, takes_turns=True))
    gains = [Item("remedies", name, "remedies.gains", name, 150.0, needs=RECORDING) for name in WORKLOADS]
    tune = Item("remedies", "tune", "remedies.tuned", "gpt2", 330.0, needs=("optuna", *RECORDING))
    found += [*gains[-2:], tune] if is_dry else [*gains[1:], tune, gains[0]]  # tune tries what gpt2 gains, too
    for name in RECORDED:
        found.append(Item("prediction", name, "prediction.recorded", name, needs=RECORDING))
    found += [
        Item("prediction", "power", "prediction.power", needs=("polars", "pynvml")),
        Item("prediction", "sweep", "sweep.swept", most_s=600.0),
    ]
    for name in ("launch", "device"):
        found.append(Item("overhead", name, "overhead.recorder", name, needs=RECORDING))
    return found


def chosen(wanted: Sequence[str], *, is_dry: bool) -> list[Item]:
    """The items of these parts (`faults`) or single ones (`faults/small_model`); all where none is named.

    Raises:
        ValueError: there is no such part or item.
    """
    every = items(is_dry=is_dry)
    for name in wanted:
        if not any(name in (item.part, item.path) for item in every):
            raise ValueError(f"there is no part or item {name!r}; parts are {', '.join(PARTS)}")
    return [item for item in every if not wanted or item.part in wanted or item.path in wanted]


def gpu_tests() -> list[str]:
    """Files of tests that are marked `gpu`, below the repository; first those that are about nothing else."""
    marked = re.compile(r"\bmark\.gpu\b|^@on_devices$", re.MULTILINE)
    files = sorted((REPOSITORY / "tests" / "unit").rglob("test_*.py"))
    files = [file for file in files if marked.search(file.read_text(encoding="utf-8"))]
    return [str(file.relative_to(REPOSITORY)) for file in sorted(files, key=lambda file: "on_devices" not in file.stem)]
