"""Remove paths, host, user and process names, and secrets from what is shared: reports, traces and tables."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import polars as pl

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS

_T = TypeVar("_T")

_REDACTED: Final = "[redacted]"
_SUFFIXES: Final = "pyx?|pyc|ipynb|so|cpp|cc|cuh?|h|hpp|json|gz|zst|zip|pb|nsys-rep|sqlite|pt|log|txt|ya?ml"
_DOMAIN: Final = r"(?:(?:\.[a-z][a-z0-9-]{0,62}){2,8}(?![^\W_]))?"
"""The domain after a host name."""
_NAME: Final = r"[^\\/\s'\"<>|:*?()\[\]{},;]+"
_FOLDER: Final = rf"(?:(?!\s)(?:(?!\.(?:{_SUFFIXES})(?![\w.\\/-]))[^\\/\n\t'\"<>|:*?;]){{1,100}}(?<!\s)[\\/]+)"
"""A folder's name, which may hold blanks because a separator follows, and never continues after a file name."""
_ANY_PATH: Final = re.compile(
    rf"""(?:
        # A home folder, also inside of a name such as triton_/home/jane/kernel.py
        (?:file:)?(?:(?<![^\W_])[A-Za-z]:)?(?<![\\/])[\\/]+(?:home|Users)[\\/]+{_FOLDER}*(?:{_NAME})?
      | (?<![A-Za-z0-9\\/.~-])(?:file:/{{0,2}})?
        (?:
            (?:[A-Za-z]:[\\/]+|\\\\+|~[\w.-]*[\\/]|\.{{1,2}}[\\/])(?:{_NAME}[\\/]+)?{_FOLDER}*(?:{_NAME})?
          | /+{_NAME}/+{_FOLDER}*(?:{_NAME})?
        )
        # A relative path, told from "tokens/s" by its ending
      | (?<![\w\\/.~-])(?:[\w.@+-]+[\\/]+)+[\w.@+-]+\.(?:{_SUFFIXES})\b
    )""",
    re.VERBOSE,
)
_SECRET: Final = re.compile(
    r"""
    (?P<before>
        (?<![\w-])[\w-]{0,40}?
        (?:token(?!s|i[sz])|secret|passw(?:or)?d|passphrase|credential|(?:api|access|private)[_-]?key|authorization
          |(?-i:[A-Z]_KEY)|(?<=-)key)
        [\w-]{0,40}["']?\s*[=:]\s*["']?(?:(?:bearer|basic)\s+)?
      | (?<![\w-])--?[\w-]{0,40}?(?:token(?!s|i[sz])|secret|passw(?:or)?d|[_-]key|credential)[\w-]{0,40}\s+
      | \b(?:bearer|basic)\s+(?=\S{8})
      | :// (?=[^\s/@]{1,200}@)
    )
    (?P<value>[^\s"',;&@]+(?:(?<=:)[^\s/@]*)?)
  | (?<![^\W_])(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|AKIA|ASIA|AIza|ya29\.)[\w-]{12,}
  | (?<![^\W_])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*
  | (?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){0,8}\.[A-Za-z]{2,}\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Values of variables and options that name a secret, tokens by their form, and e-mail addresses."""
_INSTALLED: Final = re.compile(r".*(?:site-packages|dist-packages|lib/python\d[\d.]*)/(.+)")
_HOME: Final = r"""[\\/](?:home|Users)[\\/]+([^\\/\n'"<>|:*?;()]{1,64})(?:[\\/]|$)"""
_ONLY_HOME: Final = re.compile(r".*/(?:home|Users)/+[^/]*/*")
_PUBLIC_PACKAGES: Final = frozenset(
    """torch torchvision torchaudio torchao torchtune triton numpy scipy pandas polars sklearn PIL jax jaxlib flax optax
    tensorflow keras transformers datasets accelerate peft trl diffusers tokenizers safetensors huggingface_hub timm
    lightning pytorch_lightning lightning_fabric deepspeed apex xformers flash_attn bitsandbytes vllm ray wandb
    tensorboard matplotlib tqdm stepscope torch_xla torchrec torch_geometric fbgemm_gpu megatron sglang numba cupy
    asyncio collections concurrent ctypes email encodings html http importlib json logging multiprocessing re sqlite3
    unittest urllib xml zoneinfo""".split()  # noqa: SIM905
)
_EVERYONE: Final = frozenset({"root", "user", "users", "admin", "ubuntu", "runner", "home", "localhost", "shared"})
_WORDS: Final = frozenset({"rule", "severity", "confidence", "unit", "kind", "format", "step_source", "saving_from"})
"""Fields of stepscope's own vocabulary, in which names are never replaced."""


class Redactor:
    """Redacts everything that is shared of one trace in the same way.

    Args:
        names: words to remove, such as this machine's and this user's name.
        paths: paths to shorten as a whole, wherever they occur; others are recognised by their form.
    """

    def __init__(self, names: Sequence[str], paths: Sequence[str] = ()) -> None:
        words = sorted(
            {name for name in names if len(name) > 2 and name.lower() not in _EVERYONE}, key=len, reverse=True
        )
        joined = "|".join(map(re.escape, words))
        self._names = re.compile(rf"(?<![^\W_])(?:{joined})(?![^\W_]){_DOMAIN}", re.IGNORECASE) if words else None
        # Known paths are replaced first: only they show where a path with spaces ends.
        self._paths = sorted({path for path in paths if "/" in path or "\\" in path}, key=len, reverse=True)

    @classmethod
    def of(cls, diagnosis: Diagnosis, names: Sequence[str] = ()) -> Redactor:
        """A redactor that also knows the diagnosis's paths and host, and the user names in its home folders."""
        own_names, own_paths = secrets_in(diagnosis)
        return cls([*names, *own_names], own_paths)

    def redact(self, thing: _T) -> _T:
        """Redact a table, a trace, or a dataclass such as a diagnosis or a picture, recursively."""
        return cast(_T, self.value("", thing))

    def text(self, text: str) -> str:
        for path in self._paths:
            text = text.replace(path, self.path(path))
        text = _SECRET.sub(lambda match: (match["before"] or "") + _REDACTED, text)
        text = _ANY_PATH.sub(lambda match: _short(match[0]), text)
        return self._names.sub(_REDACTED, text) if self._names else text

    def path(self, path: str) -> str:
        short = _SECRET.sub(lambda match: (match["before"] or "") + _REDACTED, _short(path))
        return self._names.sub(_REDACTED, short) if self._names else short

    def table(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns([self._series(frame[name]) for name in frame.columns if _may_hold_text(frame[name])])

    def value(self, name: str, value: Any) -> Any:
        """Redact any value, by the name of its field or column."""
        if isinstance(value, str):
            return self._string(name, value)
        if isinstance(value, pl.DataFrame):
            return self.table(value)
        if isinstance(value, Trace):
            return self._trace(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.value(field, item) for field, item in zip(value._fields, value, strict=True)))
        if isinstance(value, (tuple, list, set, frozenset)):
            return type(value)(self.value(name, item) for item in value)
        if isinstance(value, dict):
            return {self._key(key): self.value(key, item) for key, item in value.items()}
        if isinstance(value, msgspec.Struct):
            fields = value.__struct_fields__
            return msgspec.structs.replace(value, **{name: self.value(name, getattr(value, name)) for name in fields})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: self.value(name, getattr(value, name)) for name in names})
        return value

    def _key(self, key: Any) -> Any:
        """Redact keys with blanks or separators; other keys are most often stepscope's own words."""
        return self.text(key) if isinstance(key, str) and not key.isidentifier() else key

    def _trace(self, trace: Trace) -> Trace:
        tables = functools.cache(lambda name: self.table(trace.table(name)))
        metadata, warnings = self.value("metadata", trace.metadata), self.value("warnings", trace.warnings)
        return Trace(metadata, warnings, lambda name: tables(name).lazy(), _owner=trace)

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


def secrets_in(diagnosis: Diagnosis) -> tuple[list[str], list[str]]:
    """Names and paths to redact in a diagnosis: its host and the users of its home folders, and its paths."""
    paths = list(_paths_in(diagnosis))
    return [*names_in_homes(paths), *filter(None, [diagnosis.metadata.host])], paths


def names_in_homes(paths: Iterable[str]) -> list[str]:
    """Names of the users in whose home folders the paths are."""
    return [match[1] for path in paths for match in re.finditer(_HOME, path)]


def secrets_of(trace: Trace) -> tuple[list[str], list[str]]:
    """Names and paths to redact in a trace: host and user names, and paths with blanks."""
    names, paths = {trace.metadata.host or ""}, {trace.metadata.path}
    for table, schema in SCHEMAS.items():
        for column in (name for name, dtype in schema.items() if dtype == pl.String):
            texts = trace.scan(table).select(pl.col(column).unique()).drop_nulls()
            if column in ("file", "source_file"):
                spaced = texts.filter(pl.col(column).str.contains(r"\s")).collect()
                paths.update(spaced[column])
            users = texts.select(pl.col(column).str.extract_all(_HOME).explode().drop_nulls().unique()).collect()
            names.update(match[1].strip() for text in users[column] for match in re.finditer(_HOME, text))
    names.update(names_in_homes(paths))
    names.update(name.split(".")[0] for name in [trace.metadata.host or ""])
    return sorted(filter(None, names)), sorted(paths)


def _short(path: str) -> str:
    """The path inside its installed package, or only its last part."""
    path = path.replace("\\", "/")
    if _ONLY_HOME.fullmatch(path):
        return _REDACTED
    installed = _INSTALLED.fullmatch(path)
    if installed is not None:
        return installed[1]
    if path.split("/", 1)[0] in _PUBLIC_PACKAGES:
        return path
    return path.rstrip("/").rsplit("/", 1)[-1]


def _may_hold_text(series: pl.Series) -> bool:
    return series.dtype == pl.String or series.dtype.is_nested()


def _paths_in(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, str):
        if name in ("path", "file"):
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _paths_in(item, name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _paths_in(getattr(value, field.name), field.name)
