"""Settings of data-parallel training: what DistributedDataParallel and Lightning are told, and the file of them."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.remedies import DataParallelSettings

ALL = DataParallelSettings(50, True, False, True)
ARGUMENTS = {
    "bucket_cap_mb": 50,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "find_unused_parameters": True,
}


def test_only_what_is_given_is_told() -> None:
    assert DataParallelSettings().arguments() == {}
    assert DataParallelSettings(static_graph=False).arguments() == {"static_graph": False}
    assert ALL.arguments() == ALL.accelerate_arguments() == ARGUMENTS


def test_settings_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(ALL.to_json())
    assert DataParallelSettings.load(path) == ALL
    assert DataParallelSettings.from_json(DataParallelSettings().to_json()) == DataParallelSettings()
    more = {**json.loads(ALL.to_json()), "reasons": {"static_graph": "measured"}}
    assert DataParallelSettings.from_json(json.dumps(more)) == ALL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", 'no object "settings"'),
        ('{"schema": 1, "settings": 3}', 'no object "settings"'),
        ('{"schema": 2, "settings": {}}', "settings of schema 2 cannot be read, only those of 1"),
        ('{"settings": {}}', "schema None"),
        ('{"schema": 1, "settings": {"bucket_mb": 3}}', "'bucket_mb' is not a setting"),
        ('{"schema": 1, "settings": {"bucket_cap_mb": "25"}}', "a number of MiB, not '25'"),
        ('{"schema": 1, "settings": {"bucket_cap_mb": true}}', "a number of MiB, not True"),
        ('{"schema": 1, "settings": {"bucket_cap_mb": 0}}', "bucket_cap_mb=0 is not a bucket size"),
        ('{"schema": 1, "settings": {"bucket_cap_mb": NaN}}', "bucket_cap_mb=nan is not a bucket size"),
        ('{"schema": 1, "settings": {"static_graph": 1}}', "static_graph must be True, False or None, not 1"),
    ],
)
def test_what_is_no_settings_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as found:
        DataParallelSettings.load(path)
    assert str(path) in str(found.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        DataParallelSettings.load(tmp_path / "missing.json")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not UTF-8"):
        DataParallelSettings.load(binary)
    binary.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="too large"):
        DataParallelSettings.load(binary)


def test_mistaken_settings() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb=-1 is not a bucket size"):
        DataParallelSettings(bucket_cap_mb=-1)
    with pytest.raises(TypeError, match="find_unused_parameters must be True, False or None, not 'no'"):
        DataParallelSettings(find_unused_parameters="no")  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL.static_graph = True  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"static_graph is given twice: by these settings \(False\)"):
        ALL.ddp(None, static_graph=True)  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank."""
    torch = pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_distributed_data_parallel_gets_them() -> None:
    import torch

    model = DataParallelSettings(2.5, True, False, True).ddp(
        torch.nn.Linear(2, 2), process_group=torch.distributed.group.WORLD
    )
    assert model.bucket_bytes_cap == int(2.5 * 2**20)
    assert (model.gradient_as_bucket_view, model.static_graph, model.find_unused_parameters) == (True, False, True)
    assert model.process_group is torch.distributed.group.WORLD
    assert DataParallelSettings().ddp(torch.nn.Linear(2, 2)).find_unused_parameters is False


@pytest.mark.slow
def test_lightning_gets_them_as_a_strategy() -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    strategy = ALL.lightning_strategy(process_group_backend="gloo")
    assert type(strategy) is strategies.DDPStrategy
    assert strategy._ddp_kwargs == ARGUMENTS
    assert strategy.process_group_backend == "gloo"


def test_on_gaudi_lightning_gets_its_own_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strategy:
        def __init__(self, **arguments: Any) -> None:
            self.arguments = arguments

    package = types.ModuleType("lightning_habana")
    strategies = types.ModuleType("lightning_habana.pytorch.strategies")
    package.HPU_AVAILABLE = True  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    strategies.HPUParallelStrategy = Strategy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning_habana", package)
    monkeypatch.setitem(sys.modules, "lightning_habana.pytorch.strategies", strategies)
    assert ALL.lightning_strategy().arguments == ARGUMENTS

    class Newer(Strategy):
        pass

    strategies.HPUDDPStrategy = Newer  # type: ignore[attr-defined]
    assert type(ALL.lightning_strategy()) is Newer


def test_without_lightning_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning", "lightning_habana"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match="neither lightning nor pytorch_lightning is installed"):
        ALL.lightning_strategy()
