"""What machines cost: the shipped table, what names of GPUs mean, the user's own file."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import device_table
from stepscope.predict.cost.prices import Price, PriceStore, named_gpu, newest, shipped_prices, unpriced_devices
from stepscope.report.predict import price_table

TODAY = date(2026, 11, 22)
A10 = Price(
    provider="lambda",
    instance="1x A10",
    gpu="A10",
    gpu_memory_gb=None,
    device="A10",
    count=1,
    vcpus=30.0,
    memory_gib=226.0,
    link=None,
    region=None,
    on_demand_usd_h=1.29,
    spot_usd_h=None,
    as_of=date(2026, 9, 20),
    source="https://example.com/prices",
)


def test_no_prices() -> None:
    assert newest([]) == []
    assert price_table([], TODAY).height == 0


@pytest.mark.parametrize("price", shipped_prices(), ids=lambda price: f"{price.provider}-{price.instance}")
def test_every_shipped_price_has_a_device_a_day_and_a_source(price: Price) -> None:
    assert price.device == price.gpu
    assert price.device in {row.name for row in device_table()}
    assert price.on_demand_usd_h or price.spot_usd_h
    assert 0 < (price.usd_h(spot=False) or 1) / price.count < 20
    assert date(2025, 1, 1) <= price.as_of <= TODAY
    assert re.fullmatch(r"https://[\w.-]+/\S+", price.source)
    assert price.count in (1, 2, 4, 8)


def test_the_shipped_table_has_each_machine_once() -> None:
    assert len(newest(shipped_prices())) == len(shipped_prices()) == 66


def test_age() -> None:
    assert A10.age_days(TODAY) == 63
    assert not A10.is_old(date(2026, 12, 19))
    assert A10.is_old(date(2026, 12, 20))


def test_the_price_seen_last_counts() -> None:
    older = replace(A10, on_demand_usd_h=0.75, as_of=date(2025, 1, 1))
    same_day = replace(A10, on_demand_usd_h=1.0)
    elsewhere = replace(A10, region="us-east-1", as_of=date(2024, 1, 1))
    renamed = replace(A10, gpu="NVIDIA A10", as_of=date(2026, 10, 1))

    assert newest([A10, older]) == [A10]
    assert newest([A10, same_day]) == [same_day]
    assert newest([A10, elsewhere]) == [A10, elsewhere]
    assert newest([A10, renamed]) == [renamed]


def test_devices_without_a_price() -> None:
    assert unpriced_devices([A10], ["A10", "P4"]) == ["P4"]


@pytest.mark.parametrize(
    ("name", "memory_gb", "instance", "device"),
    [
        ("T4", None, "", "T4"),
        ("L4", 22.4, "", "L4"),
        ("NVIDIA A100 80GB PCIe", None, "", "A100-PCIe-80GB"),
        ("A100-80GB-SXM", None, "", "A100-SXM4-80GB"),
        ("A100", 40, "p4d.24xlarge", "A100-SXM4-40GB"),
        ("a100", None, "a2-highgpu-1g", "A100-SXM4-40GB"),
        ("A100-80GB", None, "Standard_NC24ads_A100_v4", "A100-PCIe-80GB"),
        ("A100-80GB", None, "Standard_ND96amsr_A100_v4", "A100-SXM4-80GB"),
        ("v100", None, "NC6s v3", "V100-PCIe-16GB"),
        ("V100", 16, "p3.8xlarge", "V100-SXM2-16GB"),
        ("H100", 80, "gpu-h100-sxm_1gpu-16vcpu-200gb", "H100-SXM"),
        ("H100-SXM", None, "", "H100-SXM"),
        ("A6000", 48, "", "RTX A6000"),
        ("RTX4090", 24, "", "RTX 4090"),
        ("MI300X", None, "", "MI300X"),
        ("H100 NVL", 94, "", "H100-NVL"),
        ("H100 NVL", 80, "", None),
        ("A10G", 24, "", "A10G"),
        ("MI250", None, "", None),
        ("L40", 48, "", "L40"),
        ("T4", 80, "", None),
        ("H200", 141, "", None),  # an SXM module or a PCIe card
        ("H200", None, "p5en.48xlarge", "H200-SXM"),
        ("H200 SXM", None, "", "H200-SXM"),
        ("H20", 96, "", "H20-96GB"),
        ("RTX 4000", None, "", None),
        ("RTX 6000", None, "", None),
        ("B2", None, "", None),
        ("", None, "", None),
        ("NVIDIA", None, "", None),
    ],
)
def test_what_a_name_means(name: str, memory_gb: float | None, instance: str, device: str | None) -> None:
    assert named_gpu(name, memory_gb=memory_gb, instance=instance).device == device


def test_a_name_that_could_mean_several() -> None:
    named = named_gpu("A100-80GB")
    assert (named.device, named.candidates) == (None, ("A100-PCIe-80GB", "A100-SXM4-80GB"))


@pytest.mark.parametrize(
    ("name", "device", "count"),
    [
        ("tpu-v5litepod-8", "TPU v5e", 8),
        ("tpu-v4-16", "TPU v4", 8),
        ("v5p-8", "TPU v5p", 4),
        ("tpu-v4-1", "TPU v4", 1),
        ("tpu-v6e-4", "TPU v6e", 4),
    ],
)
def test_slices_of_tpus(name: str, device: str, count: int) -> None:
    assert (named_gpu(name).device, named_gpu(name).count) == (device, count)


def test_a_store_without_a_file(tmp_path: Path) -> None:
    store = PriceStore(tmp_path / "none")
    assert store.imported() == []
    assert store.known() == list(shipped_prices())
    assert store.remove(["aws"]) == 0
    assert not store.reset()


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    store = PriceStore(tmp_path)
    other = replace(A10, provider="else", spot_usd_h=0.3, region="here", gpu_memory_gb=24.0, link="PCIe", page="p")
    store.add([A10, other])
    assert store.imported() == [A10, other]

    cheaper = replace(A10, on_demand_usd_h=0.1 + 0.2)
    store.add([cheaper])
    assert store.imported() == [other, cheaper]

    assert store.remove(["else"]) == 1
    assert store.imported() == [cheaper]
    assert store.reset()
    assert store.imported() == []


def test_an_import_takes_the_place_of_an_older_shipped_price(tmp_path: Path) -> None:
    (shipped,) = (each for each in shipped_prices() if each.instance == "1x A10")
    newer = replace(shipped, on_demand_usd_h=1.1, as_of=date(2026, 11, 1), source="vms.csv")
    store = PriceStore(tmp_path)
    store.add([newer])
    assert [each for each in store.known() if each.device == "A10"] == [newer]


@pytest.mark.parametrize("text", ["x", "", "garbage\n1,2\n", "provider,instance\na,b\n", "\ufffe"])
def test_a_spoilt_store_says_how_to_go_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices.csv").write_text(text)
    store = PriceStore(tmp_path)
    if text == "\ufffe":
        (tmp_path / "prices.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="stepscope prices reset removes them"):
        store.imported()
    assert store.reset()
