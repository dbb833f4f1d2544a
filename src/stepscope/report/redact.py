"""Taking out what tells who measured and where, before a report is shared.

Paths lose everything but their base name, or their place inside an installed package; host, user and process names
go. Names of operators, kernels, functions and devices stay: without them a report says nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import polars as pl

from stepscope.diagnosis.diagnosis import Diagnosis

_T = TypeVar("_T")

_REDACTED: Final = "[redacted]"
_NAME: Final = r"[^\\/\s'\"<>|:*?()\[\]{},;]+"
_SUFFIXES: Final = "pyx?|pyc|ipynb|so|cpp|cc|cuh?|h|hpp|json|gz|zst|zip|pb|nsys-rep|sqlite|pt|log|txt|ya?ml"
_ANY_PATH: Final = re.compile(
    rf"""(?<![\w\\/.~-])(?:file:/{{0,2}})?
    (?:
        # A home folder, whose name may hold spaces
        (?:[A-Za-z]:)?[\\/]+(?:home|Users)[\\/][^\\/\n'"<>|:*?]{{1,64}}(?=[\\/])(?:[\\/]+{_NAME})*[\\/]*
      | (?:[A-Za-z]:[\\/]+|\\\\|~[\w.-]*[\\/]|\.{{1,2}}[\\/])(?:{_NAME}[\\/]+)*(?:{_NAME})?
      | /+(?:{_NAME}/+)+(?:{_NAME})?
        # A relative path, told from "tokens/s" by its ending
      | (?:[\w.@+-]+[\\/]+)+[\w.@+-]+\.(?:{_SUFFIXES})\b
    )""",
    re.VERBOSE,
)
_INSTALLED: Final = re.compile(r".*(?:site-packages|dist-packages|lib/python\d[\d.]*)/(.+)")
_HOME: Final = re.compile(r"(?:home|Users)[\\/]+([^\\/\n'\"<>|:*?]{1,64})[\\/]")
_PUBLIC_PACKAGES: Final = frozenset(
    """torch torchvision torchaudio torchao torchtune triton numpy scipy pandas polars sklearn PIL jax jaxlib flax optax
    tensorflow keras transformers datasets accelerate peft trl diffusers tokenizers safetensors huggingface_hub timm
    lightning pytorch_lightning lightning_fabric deepspeed apex xformers flash_attn bitsandbytes vllm ray wandb
    tensorboard matplotlib tqdm stepscope torch_xla torchrec torch_geometric fbgemm_gpu megatron sglang numba cupy
    asyncio collections concurrent ctypes email encodings html http importlib json logging multiprocessing re sqlite3
    unittest urllib xml zoneinfo""".split()  # noqa: SIM905
)
_EVERYONE: Final = frozenset({"root", "user", "users", "admin", "ubuntu", "runner", "home", "localhost", "shared"})
_WORDS: Final = frozenset(
    {"rule", "severity", "confidence", "unit", "kind", "format", "backend", "step_source", "saving_from", "device"}
)
"""Fields of stepscope's own vocabulary, which no name may be replaced in."""


def redact(diagnosis: Diagnosis, names: Sequence[str] = ()) -> Diagnosis:
    """The diagnosis without paths, host, user and process names; `names` as `Redactor.of` takes them."""
    return Redactor.of(diagnosis, names).redact(diagnosis)


def redact_table(frame: pl.DataFrame, names: Sequence[str] = ()) -> pl.DataFrame:
    """The table with the same done to every text in it, nested ones included."""
    return Redactor(names).redact(frame)


class Redactor:
    """Does the same to everything that is shared of one trace.

    Args:
        names: words to take out, such as this machine's and this user's name.
        paths: paths to shorten as a whole, wherever they stand; others are recognised by their form.
    """

    def __init__(self, names: Sequence[str], paths: Sequence[str] = ()) -> None:
        words = sorted(
            {name for name in names if len(name) > 2 and name.lower() not in _EVERYONE}, key=len, reverse=True
        )
        self._names = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)") if words else None
        # Known paths are replaced as a whole first: only of them can be told where a path with spaces ends.
        self._paths = sorted({path for path in paths if "/" in path or "\\" in path}, key=len, reverse=True)

    @classmethod
    def of(cls, diagnosis: Diagnosis, names: Sequence[str] = ()) -> Redactor:
        """With the diagnosis's own paths and host, and the users' names in its paths of home folders."""
        paths = tuple(_paths_in(diagnosis))
        found = [match[1] for path in paths for match in _HOME.finditer(path)]
        host = [diagnosis.metadata.host] if diagnosis.metadata.host else []
        return cls([*names, *found, *host], paths)

    def redact(self, thing: _T) -> _T:
        """A table, or a dataclass such as a diagnosis or a picture with everything in it."""
        return cast(_T, self.value("", thing))

    def text(self, text: str) -> str:
        for path in self._paths:
            text = text.replace(path, self.path(path))
        text = _ANY_PATH.sub(lambda match: _short(match[0]), text)
        return self._names.sub(_REDACTED, text) if self._names else text

    def path(self, path: str) -> str:
        short = _short(path)
        return self._names.sub(_REDACTED, short) if self._names else short

    def table(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns([self._series(frame[name]) for name in frame.columns if _may_hold_text(frame[name])])

    def value(self, name: str, value: Any) -> Any:
        """Any part of a diagnosis, by the name of the field or column it stands in."""
        if isinstance(value, str):
            return self._string(name, value)
        if isinstance(value, pl.DataFrame):
            return self.table(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self.value(name, item) for item in value)
        if isinstance(value, dict):
            return {key: self.value(key, item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return dataclasses.replace(value, **{f.name: self.value(f.name, getattr(value, f.name)) for f in fields})
        return value

    def _string(self, name: str, value: str) -> str | None:
        if name in _WORDS:
            return value
        if name == "host":
            return None
        if name == "process_name":
            return _REDACTED
        return self.path(value) if name in ("path", "file") else self.text(value)

    def _series(self, series: pl.Series) -> pl.Series:
        if series.dtype != pl.String:
            values = [self.value(series.name, value) for value in series.to_list()]
            return pl.Series(series.name, values, series.dtype)
        texts = series.drop_nulls().unique()
        after = pl.Series([self._string(series.name, text) for text in texts], dtype=pl.String)
        redacted: pl.Series = series.replace_strict(texts, after, default=None, return_dtype=pl.String)
        return redacted


def _short(path: str) -> str:
    """The path inside its installed package, or only the last part of it."""
    path = path.replace("\\", "/")
    installed = _INSTALLED.fullmatch(path)
    if installed is not None:
        return installed[1]
    if path.split("/", 1)[0] in _PUBLIC_PACKAGES:
        return path
    return path.rstrip("/").rsplit("/", 1)[-1]


def _may_hold_text(series: pl.Series) -> bool:
    return series.dtype == pl.String or series.dtype.is_nested()


def _paths_in(value: Any, name: str = "") -> Iterator[str]:
    """Every path of a diagnosis: the trace's and those of places in code."""
    if isinstance(value, str):
        if name in ("path", "file"):
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _paths_in(item, name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _paths_in(getattr(value, field.name), field.name)
