"""Price lists of others, whole and hostile."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.errors import UsageError
from stepscope.predict.cost.price_files import BadRows, ImportedPrices, read_price_file

DAY = date(2026, 11, 1)
SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"
GPUHUNT = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,provider\n"
INFO = "\"{'Gpus': [{'Name': 'V100', 'MemoryInfo': {'SizeInMiB': 16384}}], 'TotalGpuMemoryInMiB': 16384}\""


def read(tmp_path: Path, text: str | bytes, provider: str | None = "aws") -> ImportedPrices:
    path = tmp_path / "list.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_price_file(path, provider=provider, as_of=DAY)


def test_skypilot(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        f"{SKYPILOT}cpu,,,4.0,16.0,0.2,us-east-1,,\np3.8xlarge,V100,4.0,32.0,244.0,12.24,us-east-1,{INFO},4.5\n"
        f"p3.8xlarge,V100,4.0,32.0,244.0,12.24,us-east-1,{INFO},3.5\n",
    )

    assert (found.format, found.rows, found.without_gpu, found.bad) == ("SkyPilot", 3, 1, ())
    (price,) = found.prices
    assert (price.provider, price.instance, price.device, price.count) == ("aws", "p3.8xlarge", "V100-SXM2-16GB", 4)
    assert (price.on_demand_usd_h, price.spot_usd_h, price.region) == (12.24, 3.5, "us-east-1")
    assert (price.vcpus, price.memory_gib, price.gpu_memory_gb, price.as_of) == (32.0, 244.0, 16.0, DAY)
    assert price.source == "list.csv"


def test_gpuhunt_joins_both_prices_and_the_zones_of_a_region(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        f"{GPUHUNT}a2-highgpu-1g,us-central1-a,3.67,12,85,1,A100,40,False,gcp\n"
        "a2-highgpu-1g,us-central1-f,1.30,12,85,1,A100,40,True,gcp\ne2,us-central1-a,0.1,2,8,0,,,False,gcp\n",
        provider=None,
    )

    assert (found.format, found.without_gpu) == ("gpuhunt", 1)
    (price,) = found.prices
    assert (price.provider, price.region, price.device) == ("gcp", "us-central1", "A100-SXM4-40GB")
    assert (price.on_demand_usd_h, price.spot_usd_h) == (3.67, 1.3)


def test_deepview(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '[{"name": "gcp", "pue": 1.1, "instances": [{"name": "n1-highmem-4", "gpu": "v100", "vcpus": 4, "ram": 26,'
        ' "ngpus": 1, "cost": 2.72, "regions": ["us-central1", "asia-east1"]}, {"name": "cpu"}, 7]}]',
        provider=None,
    )

    assert found.format == "DeepView"
    assert [(price.region, price.device, price.on_demand_usd_h) for price in found.prices] == [
        ("us-central1", "V100-SXM2-16GB", 2.72),
        ("asia-east1", "V100-SXM2-16GB", 2.72),
    ]
    assert found.bad == (BadRows("an instance that is not an object", 1, 3),)


def test_our_own_columns_can_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prices", "--providers", "openrelay", "--format", "csv"]) == 0
    found = read(tmp_path, capsys.readouterr().out, provider=None)

    assert found.format == "stepscope"
    assert {price.device for price in found.prices} == {"RTX 3090", "RTX 4090"}
    assert {price.as_of for price in found.prices} == {date(2026, 9, 20)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (",A100,1,,,2.9,us,,", "an accelerator priced without its machine"),
        ("x,A10,1,1,1,-3,us,,", "a price that is not an amount"),
        ("x,A10,1,1,1,nan,us,,", "a price that is not an amount"),
        ("x,A10,1,1,1,inf,us,,", "a price that is not an amount"),
        ("x,A10,1,1,1,1_000,us,,", "a price that is not an amount"),
        ("x,A10,1,1,1,0,us,,", "a price of nothing"),
        ("x,A10,1,1,1,1e9,us,,", "a price above 100,000 USD an hour"),
        ("x,A10,1,1,1,,us,,", "no price"),
        ("x,A10,0,1,1,1,us,,", "a count of accelerators that is not a positive whole number"),
        ("x,A10,1.5,1,1,1,us,,", "a count of accelerators that is not a positive whole number"),
        ("x,A10,1,lots,1,1,us,,", "vCPUs that is not an amount"),
        ("=cmd|' /C calc'!A0,A10,1,1,1,1,us,,", "a name of the instance that begins like a formula"),
        ("x,@SUM(A1),1,1,1,1,us,,", "a name of the GPU that begins like a formula"),
        ("x\x1b[31m,A10,1,1,1,1,us,,", "a name of the instance with invisible characters"),
        (f"{'x' * 101},A10,1,1,1,1,us,,", "a name of the instance that is longer than 100 characters"),
        ("x", "no price of a machine"),
    ],
)
def test_bad_rows_are_counted_and_the_rest_is_kept(tmp_path: Path, row: str, reason: str) -> None:
    found = read(tmp_path, f"{SKYPILOT}good,A10,1,30,226,1.29,us,,\n{row}\n{row}\n")

    assert [price.instance for price in found.prices] == ["good"]
    if row == "x":
        assert (found.without_gpu, found.bad) == (2, ())
    else:
        assert found.bad == (BadRows(reason, 2, 3),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"\x89PNG\x00\xff", "is not text"),
        (b"a\x00b", "is not text"),
        (b"a,b,c\n1,2,3\n", "unknown format"),
        (b'{"a": 1}', "not a list of providers"),
        (b"[" * 100_000, "not readable JSON"),
        (b'[{"name": "gcp"', "not readable JSON"),
        (SKYPILOT.encode() + b'"' + b"x" * 200_000, "not readable CSV"),
        (SKYPILOT.encode(), "has no price of a machine with an accelerator: it has no rows"),
        (SKYPILOT.encode() + b"cpu,,,4,16,0.2,us,,\n", "of 1 rows 1 without an accelerator"),
    ],
)
def test_what_is_no_price_list_is_said_in_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value)


def test_a_list_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.predict.cost.price_files.LARGEST_FILE_MIB", 1)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read(tmp_path, b"x" * ((1 << 20) + 1))
    monkeypatch.setattr("stepscope.predict.cost.price_files.MOST_ROWS", 3)
    with pytest.raises(UsageError, match="more than 3 rows"):
        read(tmp_path, SKYPILOT + "x,A10,1,1,1,1,us,,\n" * 4)


def test_nobodys_prices(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--provider aws"):
        read(tmp_path, SKYPILOT + "x,A10,1,1,1,1,us,,\n", provider=None)
    with pytest.raises(UsageError, match="not a provider's name"):
        read(tmp_path, SKYPILOT + "x,A10,1,1,1,1,us,,\n", provider="../../etc")


def test_import_list_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "vms.csv"
    path.write_text(SKYPILOT + "x1,K80,1,1,1,0.9,us,,\nx2,A10,1,1,1,0.8,us,,\nx3,A10,1,1,1,bad,us,,\n")

    assert main(["prices", "import", str(path), "--provider", "Mine", "--as-of", "2026-10-02"]) == 0
    assert capsys.readouterr().out == (
        f"{path}: SkyPilot, 2 prices of mine of 2026-10-02, from 3 rows.\n"
        "  Left out: 1 row with a price that is not an amount, the first in line 4.\n"
        "  Kept, but without predictions: K80 (1). The device table lacks them, "
        "or the list does not say which form it means.\n"
    )
    assert main(["prices", "--providers", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["mine", "x2", "A10", "1", "$0.80"],
        ["mine", "x1", "K80", "1", "$0.90"],
    ]
    assert main(["prices", "remove", "mine"]) == 0
    assert capsys.readouterr().out == "Removed 2 imported prices.\n"
    assert main(["prices", "reset"]) == 0


def test_a_bad_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text(SKYPILOT + "x2,A10,1,1,1,0.8,us,,\n")
    bad.write_bytes(b"\x00")

    assert main(["prices", "import", str(good), str(bad), "--provider", "mine"]) == 2
    assert not (tmp_path / "data").exists()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["import"],
        ["import", "nothing.csv"],
        ["import", "x.csv", "--as-of", "2131-01-01"],
        ["import", "x.csv", "--as-of", "soon"],
        ["remove"],
        ["remove", "nobody"],
        ["list", "what"],
        ["--provider", "aws"],
        ["--providers", "aws,,gcp"],
        ["--providers", "nobody"],
        ["burn"],
    ],
)
def test_nonsense_is_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["prices", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
