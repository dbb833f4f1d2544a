"""A program at several power limits: set, measured and put back, on devices that only remember what they were told."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.commands.record.run import power_limits
from stepscope.errors import UsageError
from stepscope.record.energy import DeviceLimits, Limit, LimitRun, device_limits, measure_limits
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.report.energy import limits_document
from stepscope.report.text import text_of
from tests.unit.predict.test_energy import measured


class Gpu:
    """A device's power limit, milliwatts."""

    def __init__(self, limit: int = 400_000, bounds: tuple[int, int] = (100_000, 400_000), fails_at: int = -1) -> None:
        self.limit, self.bounds, self.fails_at = limit, bounds, fails_at
        self.told: list[int] = []

    def get_power_management_limit(self) -> int:
        return self.limit

    def get_power_management_limit_constraints(self) -> tuple[int, int]:
        return self.bounds

    def set_power_management_limit(self, limit: int) -> None:
        if limit == self.fails_at:
            raise PermissionError("Insufficient Permissions")
        self.limit = limit
        self.told.append(limit)


class Gpus:
    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "it", RunManifest(("train.py",)))


def leave(folder: RunFolder, process: int, joules: float) -> None:
    content = {"process": process, "energy": measured(joules).to_json()}
    (folder.rank_folder(0) / f"recording-{process}.json").write_text(json.dumps(content))


def test_every_limit_is_set_measured_and_put_back(folder: RunFolder) -> None:
    gpus = [Gpu(), Gpu(350_000)]
    seen: list[list[int]] = []
    said: list[str] = []

    def program() -> int:
        seen.append([gpu.limit for gpu in gpus])
        leave(folder, 100 + len(seen), 200.0 if len(seen) == 1 else 150.0)
        return 0

    runs = measure_limits([300, 200], DeviceLimits(Gpus(*gpus)), folder, program, said.append)

    assert seen == [[300_000, 300_000], [200_000, 200_000]]
    assert [gpu.limit for gpu in gpus] == [400_000, 350_000]
    assert runs == [LimitRun(300, 0, 8_000_000.0, 2.0, 2), LimitRun(200, 0, 8_000_000.0, 1.5, 2)]
    assert said == ["power limit 300 W", "power limit 200 W"]
    assert [run["limit_w"] for run in json.loads((folder.path / "power-limits.json").read_text())["runs"]] == [300, 200]


def test_a_program_that_fails_leaves_the_limits_as_they_were(folder: RunFolder) -> None:
    gpu = Gpu()

    def program() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        measure_limits([300, 200], DeviceLimits(Gpus(gpu)), folder, program, lambda text: None)
    assert gpu.limit == 400_000


def test_a_signal_leaves_the_limits_as_they_were(folder: RunFolder) -> None:
    gpu, before = Gpu(), signal.getsignal(signal.SIGTERM)

    def program() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with pytest.raises(SystemExit) as ended:
        measure_limits([300, 200], DeviceLimits(Gpus(gpu)), folder, program, lambda text: None)
    assert (ended.value.code, gpu.limit) == (128 + signal.SIGTERM, 400_000)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_program_is_not_started_again(folder: RunFolder) -> None:
    runs = measure_limits([300, 200], DeviceLimits(Gpus(Gpu())), folder, lambda: 130, lambda text: None)

    assert runs == [LimitRun(300, 130, None, None, 0)]


def test_without_permission(folder: RunFolder) -> None:
    gpus = [Gpu(), Gpu(fails_at=300_000)]

    with pytest.raises(UsageError, match="cannot be changed: Insufficient Permissions; that needs root, or zeusd"):
        measure_limits([300, 200], DeviceLimits(Gpus(*gpus)), folder, lambda: 0, lambda text: None)
    assert [gpu.limit for gpu in gpus] == [400_000, 400_000]


def test_a_limit_that_cannot_be_put_back_is_told_with_the_command(folder: RunFolder) -> None:
    gpus = [Gpu(fails_at=400_000), Gpu()]

    with pytest.raises(UsageError, match=r"do so by hand: device 0 .*: nvidia-smi -i 0 -pl 400"):
        measure_limits([300, 200], DeviceLimits(Gpus(*gpus)), folder, lambda: 0, lambda text: None)
    assert gpus[1].limit == 400_000


def test_what_the_devices_allow() -> None:
    devices = DeviceLimits(Gpus(Gpu(), Gpu(bounds=(150_000, 300_000))))

    assert [devices.watts(limit) for limit in (Limit(1.0, True), Limit(0.6, True), Limit(250))] == [300, 180, 250]
    for limit in (Limit(0.4, True), Limit(400)):
        with pytest.raises(UsageError, match="the devices allow 150 to 300 W"):
            devices.watts(limit)


def test_without_the_package_or_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("zeus", "zeus.device.gpu", "zeus.device.cpu"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(UsageError, match=r"the package zeus is missing: pip install 'stepscope\[energy\]'"):
        device_limits()
    assert main(["run", "--power-limits", "60%,100%", "train.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_of_this_machine_with_zeus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("zeus.device.gpu")
    try:
        gpu.get_gpus()
    except Exception:
        with pytest.raises(UsageError, match="no driver of an NVIDIA or AMD device answers"):
            device_limits()


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("60%,80%,100%", [Limit(0.6, True), Limit(0.8, True), Limit(1.0, True)]),
        ("250, 300.5", [Limit(250.0), Limit(300.5)]),
        ("300,250,300", [Limit(300.0), Limit(250.0)]),
    ],
)
def test_limits_from_the_command_line(text: str, limits: list[Limit]) -> None:
    assert power_limits(text) == limits


class TestText:
    def test_the_best_limit(self) -> None:
        runs = [LimitRun(400, 0, 1e7, 2.0, 5), LimitRun(300, 0, 1.03e7, 1.6, 5), LimitRun(200, 0, 1.5e7, 1.9, 5)]

        lines = text_of(limits_document(runs), width=120).splitlines()
        assert re.split(r"\s{2,}", lines[2]) == ["300 W", "10.3 ms", "3.0 % more", "1.60 J", "20.0 % less", "0"]
        assert lines[-1] == "300 W needs the least energy: 20.0 % less than 400 W, with 3.0 % more time."

    def test_the_highest_is_best(self) -> None:
        runs = [LimitRun(300, 0, 2e7, 2.0, 5), LimitRun(400, 0, 1e7, 1.6, 5)]

        assert text_of(limits_document(runs), width=120).endswith("The highest limit, 400 W, needs the least energy.\n")

    def test_nothing_measured(self) -> None:
        assert "Nothing was measured" in text_of(limits_document([LimitRun(300, 1, None, None, 0)]), width=120)
