"""What a search can change of a program: knobs with their values, and configurations of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from stepscope.errors import UsageError

Kind: TypeAlias = Literal["apply", "option", "variable"]
"""A word of `stepscope run --apply`, an option of the program, or a variable of its environment."""
Losses: TypeAlias = Literal["reordered", "compiled", "tf32", "half"]
"""How close the losses stay, the closest first; see `stepscope.tune.trials`."""

ON: Final = ""
"""The value of a knob that is a switch."""
MOST_VALUES: Final = 16
_VARIABLE: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_OPTION: Final = re.compile(r"-{0,2}[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing that can be changed; that it is left as it is, is always one of the choices.

    Attributes:
        name: of the `--apply` word, such as "workers"; of an option as it is written, "--fused"; of a variable.
        values: what it can be set to; "" is a switch that is on.
        losses: how close the losses stay.
        draws: whether other random numbers may be drawn, so that the losses are those of another seed.
        needs: another knob without which it changes nothing; "" where there is none.
        source: where it comes from: "finding", "standard" or "user".
        why: in words.
        promised_ns: nanoseconds of a step that the finding promises; None where nothing is promised.
        code: the remedy as code.
        diff: the change of the user's own lines.
    """

    name: str
    values: tuple[str, ...] = (ON,)
    kind: Kind = "apply"
    losses: Losses = "reordered"
    draws: bool = False
    needs: str = ""
    source: Literal["finding", "standard", "user"] = "standard"
    why: str = ""
    promised_ns: int | None = None
    code: str = ""
    diff: str = ""

    def shown(self, value: str) -> str:
        """The setting for people: "workers=4", "fuse-optimizer", "--loader-workers 4", "OMP_NUM_THREADS=1"."""
        return " ".join(self.words(value))

    def words(self, value: str) -> tuple[str, ...]:
        """What stands for it in `--apply`, in the program's arguments or before the program."""
        if value == ON:
            return (self.name,)
        if self.kind == "option" and not self.name.endswith("="):
            return (self.name, value)
        return (f"{self.name.removesuffix('=')}={value}",)

    def to_json(self) -> dict[str, Any]:
        """For the study."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Knob:
        """The reverse; what is not known is passed over."""
        known = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        return cls(**{**known, "values": tuple(map(str, known["values"]))})


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """Knobs that are set, by name; those that are not named are left as the program has them."""

    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Configuration:
        """The configuration with these settings."""
        return cls(tuple(sorted(settings.items())))

    def with_setting(self, name: str, value: str) -> Configuration:
        """The same with one knob set, too or otherwise."""
        return Configuration.of({**dict(self.settings), name: value})

    def without(self, name: str) -> Configuration:
        """The same with one knob left as the program has it."""
        return Configuration(tuple(pair for pair in self.settings if pair[0] != name))

    def value(self, name: str) -> str | None:
        """What a knob is set to; None where it is left alone."""
        return dict(self.settings).get(name)

    @property
    def key(self) -> str:
        """One text for each configuration."""
        return json.dumps(self.settings)

    @classmethod
    def from_key(cls, key: str) -> Configuration:
        """The reverse of `key`."""
        return cls.of({str(name): str(value) for name, value in json.loads(key)})


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched.

    Attributes:
        knobs: the most promising first.
        said: what was left out and why, a sentence each.
    """

    knobs: tuple[Knob, ...] = ()
    said: tuple[str, ...] = ()

    def knob(self, name: str) -> Knob:
        """The knob of that name.

        Raises:
            KeyError: there is none.
        """
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise KeyError(name)

    def shown(self, configuration: Configuration) -> str:
        """The settings of a configuration, for people."""
        known = {knob.name for knob in self.knobs}
        settings = [pair for pair in configuration.settings if pair[0] in known]
        return ", ".join(self.knob(name).shown(value) for name, value in settings) or "nothing"

    def apply_words(self, configuration: Configuration) -> tuple[str, ...]:
        """What `stepscope run --apply` takes for it."""
        return self._words(configuration, "apply")

    def arguments(self, configuration: Configuration) -> tuple[str, ...]:
        """What stands behind the program's own arguments."""
        return self._words(configuration, "option")

    def variables(self, configuration: Configuration) -> dict[str, str]:
        """What is set in the program's environment."""
        return {name: value for name, value in configuration.settings if self.knob(name).kind == "variable"}

    def _words(self, configuration: Configuration, kind: Kind) -> tuple[str, ...]:
        chosen = ((self.knob(name), value) for name, value in configuration.settings)
        return tuple(word for knob, value in chosen if knob.kind == kind for word in knob.words(value))

    def losses_of(self, configuration: Configuration) -> tuple[Losses, bool]:
        """How close losses of a configuration stay: the least close of its knobs, and whether any draws others."""
        knobs = [self.knob(name) for name, _ in configuration.settings]
        order: tuple[Losses, ...] = ("reordered", "compiled", "tf32", "half")
        least: Losses = max((knob.losses for knob in knobs), key=order.index, default="reordered")
        return least, any(knob.draws for knob in knobs)

    def to_json(self) -> dict[str, Any]:
        """For the study."""
        return {"knobs": [knob.to_json() for knob in self.knobs], "said": list(self.said)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Space:
        """The reverse of `to_json`."""
        return cls(tuple(map(Knob.from_json, content["knobs"])), tuple(map(str, content["said"])))


def user_knob(text: str) -> Knob:
    """A knob of the program's own, as `--knob` takes it.

    "--batched-loss" is a switch, "--loader-workers=0,2,4" an option with values, "data.workers=0,2" an argument of that
    form, "env:OMP_NUM_THREADS=1,2" a variable.

    Raises:
        UsageError: it is none of these.
    """
    name, equals, listed = text.partition("=")
    variable = _VARIABLE.fullmatch(name)
    if variable is None and not _OPTION.fullmatch(name):
        raise UsageError(f"{text!r} is no knob: write --knob --loader-workers=0,2,4 or --knob --fused-optimizer")
    values = tuple(dict.fromkeys(value.strip() for value in listed.split(","))) if equals else (ON,)
    if equals and "" in values:
        raise UsageError(f"{text!r} has an empty value: write --knob {name}=0,2,4")
    if len(values) > MOST_VALUES:
        raise UsageError(f"{text!r} has {len(values)} values; at most {MOST_VALUES} are tried")
    if variable is not None:
        if not equals:
            raise UsageError(f"{text!r} needs values: write --knob {name}=1,2")
        return Knob(variable[1], values, "variable", source="user", why="a knob of yours")
    if not name.startswith("-"):
        if not equals:
            raise UsageError(f"{text!r} is no knob: an option begins with -, other arguments are written name=0,2")
        name = f"{name}="
    return Knob(name, values, "option", source="user", why="a knob of yours")


def named_once(knobs: Iterable[Knob]) -> list[Knob]:
    """The knobs with those of one name put together: the values of all, the rest from the first."""
    found: dict[str, Knob] = {}
    for knob in knobs:
        first = found.get(knob.name)
        found[knob.name] = knob if first is None else _together(first, knob)
    return list(found.values())


def _together(first: Knob, second: Knob) -> Knob:
    values = tuple(dict.fromkeys([*first.values, *second.values]))
    content: dict[str, Any] = {**first.to_json(), "values": values}
    for name in ("code", "diff", "needs"):
        content[name] = content[name] or getattr(second, name)
    return Knob.from_json(content)


def program_words(command: Sequence[str], space: Space, configuration: Configuration) -> list[str]:
    """The command with the configuration's options behind its own arguments."""
    return [*command, *space.arguments(configuration)]


_CODE: Final = {
    "fuse-optimizer": "from stepscope.remedies import fuse_optimizer\n\noptimizer = fuse_optimizer(optimizer)",
    "clip-in-one-pass": "from stepscope.remedies import clip_grad_norm\n\nclip_grad_norm(model.parameters(), max_norm)",
    "zero-grad": "optimizer.zero_grad(set_to_none=True)",
    "workers": "DataLoader(dataset, ..., num_workers={value})",
    "prefetch": "DataLoader(dataset, ..., prefetch_factor={value})",
    "pin-memory": "DataLoader(dataset, ..., pin_memory=True)",
    "persistent-workers": "DataLoader(dataset, ..., persistent_workers=True)",
    "non-blocking": "batch = batch.to(device, non_blocking=True)",
    "bf16": (
        "from stepscope.remedies import mixed_precision\n\n"
        'precision = mixed_precision("bf16")  # its guard compares the first losses with full precision\n'
        "loss = precision.loss(lambda: loss_of(model(batch), target))\n"
        "precision.backward(loss)\n"
        "precision.step(optimizer)"
    ),
    "fp16": (
        "from stepscope.remedies import mixed_precision\n\n"
        'precision = mixed_precision("fp16")  # its guard compares the first losses with full precision\n'
        "loss = precision.loss(lambda: loss_of(model(batch), target))\n"
        "precision.backward(loss)\n"
        "precision.step(optimizer)"
    ),
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "compile": "model = torch.compile(model, mode={quoted})",
    "channels-last": (
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(device, memory_format=torch.channels_last)"
    ),
    "cudnn-benchmark": "torch.backends.cudnn.benchmark = True",
    "batched-loss": "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    "chunked-loss": (
        "from stepscope.remedies import chunked_cross_entropy\n\n"
        "loss = chunked_cross_entropy(logits.flatten(0, 1), targets.flatten())"
    ),
    "deferred-logging": (
        "from stepscope.remedies import DeferredScalars\n\n"
        "with DeferredScalars(writer) as scalars:\n"
        "    for step, batch in enumerate(loader):\n"
        "        ...\n"
        "        scalars.add(step, loss=loss)  # in place of loss.item()"
    ),
    "quiet-progress": "from stepscope.remedies import every\n\nbar = every({number})(tqdm(loader))",
    "garbage-at-steps": (
        "from stepscope.remedies import collect_garbage_at_steps\n\n"
        "with collect_garbage_at_steps() as garbage:\n"
        "    for batch in loader:\n"
        "        ...\n"
        "        garbage.step()"
    ),
    "threads": "torch.set_num_threads({value})",
    "allocator": "stepscope run --allocator {value} train.py",
    "no-debug": "torch.autograd.set_detect_anomaly(False)",
    "bucket-mb": "DistributedDataParallel(model, bucket_cap_mb={value})",
    "gradient-view": "DistributedDataParallel(model, gradient_as_bucket_view=True)",
    "static-graph": "DistributedDataParallel(model, static_graph=True)",
    "no-find-unused": "DistributedDataParallel(model, find_unused_parameters=False)",
}


def code_of(name: str, value: str) -> str:
    """The remedy of an `--apply` word as code; "" for a word that is not known here."""
    return _CODE.get(name, "").format(value=value, quoted=f'"{value or "default"}"', number=value or 50)
