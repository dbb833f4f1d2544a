"""Settings of data-parallel training: for DistributedDataParallel, as a Lightning strategy, kept in a JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["DataParallelSettings"]

SCHEMA: Final = 1
_LONGEST_FILE: Final = 1 << 20
_LARGEST_MB: Final = 1 << 20


@dataclass(frozen=True)
class DataParallelSettings:
    """Settings of DistributedDataParallel; None keeps torch's default.

    `stepscope data-parallel TRACE --json FILE` computes them from a recording of the ranks.

        model = DataParallelSettings.load("data_parallel.json").ddp(model)

    Attributes:
        bucket_cap_mb: size in MiB at which a bucket of gradients is sent. Torch's default is 25, and 1 for the first;
            newer versions apply a given size to the first, too.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves a copy of them; code must not
            call `detach_()` on them.
        static_graph: whether the same parameters are used in the same order in every step.
        find_unused_parameters: whether each step looks for parameters that got no gradient.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None

    def __post_init__(self) -> None:
        size = self.bucket_cap_mb
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, (int, float)):
                raise TypeError(f"bucket_cap_mb is a number of MiB, not {size!r}")
            if not math.isfinite(size) or not 0 < size <= _LARGEST_MB:
                raise ValueError(f"bucket_cap_mb={size!r} is no size of a bucket: give MiB above 0")
        for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} is True, False or None, not {value!r}")

    def arguments(self) -> dict[str, Any]:
        """The settings that are not None, as arguments of DistributedDataParallel."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def ddp(self, model: torch.nn.Module, **others: Any) -> DistributedDataParallel:
        """Wrap the model in DistributedDataParallel with these settings and other arguments of it.

        Raises ValueError for an argument that these settings also have.
        """
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, **self._with(others))

    def lightning_strategy(self, **others: Any) -> Any:
        """Return Lightning's strategy with these settings, for `Trainer(strategy=...)`.

        On Gaudi, with lightning_habana and a device, this is its HPUDDPStrategy or HPUParallelStrategy; otherwise
        DDPStrategy of lightning or pytorch_lightning, whichever is installed.

        Args:
            others: arguments of the strategy.

        Raises:
            RuntimeError: none of these packages is installed.
            ValueError: an argument that these settings also have.
        """
        arguments = self._with(others)
        if find_spec("lightning_habana") and import_module("lightning_habana").HPU_AVAILABLE:
            strategies = import_module("lightning_habana.pytorch.strategies")
            # Before HPUDDPStrategy existed, HPUParallelStrategy was the strategy itself.
            strategy = getattr(strategies, "HPUDDPStrategy", None) or strategies.HPUParallelStrategy
            return strategy(**arguments)
        for package in ("lightning", "pytorch_lightning"):
            if find_spec(package):
                home = "lightning.pytorch.strategies" if package == "lightning" else "pytorch_lightning.strategies"
                return import_module(home).DDPStrategy(**arguments)
        raise RuntimeError("neither lightning nor pytorch_lightning is installed: pip install lightning, or use ddp()")

    def accelerate_arguments(self) -> dict[str, Any]:
        """The settings that are not None, for `accelerate.DistributedDataParallelKwargs(**...)`."""
        return self.arguments()

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "settings": asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DataParallelSettings:
        """Read the JSON of `to_json` or `stepscope data-parallel --json`; other keys are ignored.

        Raises ValueError for anything else; the message says what was found.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"these are no settings of data-parallel training: not JSON ({error})") from error
        settings = found.get("settings") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(settings, dict):
            raise ValueError('these are no settings of data-parallel training: the JSON has no object "settings"')
        if found.get("schema") != SCHEMA:
            raise ValueError(f"settings of schema {found.get('schema')!r} cannot be read, only those of {SCHEMA}")
        known = [each.name for each in fields(cls)]
        strange = [name for name in settings if name not in known]
        if strange:
            raise ValueError(f"{strange[0]!r} is no setting of data-parallel training; there are {', '.join(known)}")
        try:
            return cls(**settings)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def load(cls, path: str | Path) -> DataParallelSettings:
        """Read the settings from a file; see `from_json`.

        Raises:
            OSError: it cannot be read.
            ValueError: its content is something else.
        """
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        try:
            if len(content) > _LONGEST_FILE:
                raise ValueError("these are no settings of data-parallel training: the file is too large")
            return cls.from_json(content.decode())
        except ValueError as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise ValueError(f"{path}: {reason}") from error

    def _with(self, others: dict[str, Any]) -> dict[str, Any]:
        own = self.arguments()
        twice = next((name for name in own if name in others), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice: by these settings ({own[twice]}) and as an argument")
        return {**own, **others}
