"""Where a training could run: hours, cost, the front, and what is said about them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.commands import main
from stepscope.commands.plan.predict import budget, counts, hours, iterations
from stepscope.errors import UsageError
from stepscope.machine.devices import named_device
from stepscope.predict.batch import MemoryNeed
from stepscope.predict.cost.plan import Machine, Plan, Refused, Request, make_plan, pareto_front
from stepscope.predict.cost.prices import Price
from stepscope.predict.limits import named_link
from stepscope.predict.prediction import StepPrediction, StepPredictor, predicted_steps
from stepscope.report.html import html_of
from stepscope.report.plan import asked_sentence, hours_words, plan_document, plan_json, recommendation
from stepscope.report.text import text_of
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.whatif.experiment import Experiment
from tests.unit.recording import Recording
from tests.unit.rendered import written

TODAY = date(2026, 11, 22)
SEEN = "by a price of 2026-11-12 (10 days old)"
US = 1000
SAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_per_token_loss_cpu.json.gz"
A100 = Device("0", "NVIDIA A100-SXM4-80GB")


def copying(path: str = "trace.json", name: str = "NVIDIA A100-SXM4-80GB") -> Trace:
    """Three steps of 1000 us on an A100: 100 of Python, then copies in its memory that the host waits for."""
    recording = Recording(Metadata(devices=(Device("0", name),), path=path, format="kineto"))
    for step in range(3):
        begin = step * 1000 * US
        recording.step(begin, 1000 * US, step)
        recording.frame(begin, 1000 * US, "train.py(3): step")
        recording.launch(begin + 90 * US, 5 * US, 2 * step)
        recording.work(begin + 100 * US, 890 * US, "Memcpy DtoD", 2 * step, kind="copy_on_device")
        recording.launch(begin + 96 * US, 894 * US, 2 * step + 1, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def price(device: str | None = "A100-SXM4-80GB", usd_h: float | None = 2.0, **changes: object) -> Price:
    values: dict[str, object] = {
        "provider": "cloud", "instance": "big", "gpu": device or "X1", "gpu_memory_gb": None, "device": device,
        "count": 1, "vcpus": None, "memory_gib": None, "link": None, "region": None, "on_demand_usd_h": usd_h,
        "spot_usd_h": None, "as_of": date(2026, 11, 12), "source": "https://example.com", "page": None,
    }  # fmt: skip
    return Price(**{**values, **changes})  # type: ignore[arg-type]


def planned(prices: list[Price], trace: Trace | None = None, **request: object) -> Plan:
    predictor = StepPredictor(Experiment(trace or copying()))
    return make_plan(predictor, prices, Request(**{"iterations": 3.6e6, **request}), today=TODAY)  # type: ignore[arg-type]


def machine(hours: float, usd: float, name: str = "A10", *, limit: str = "compute", spread: float = 0.0) -> Machine:
    """One that takes so long and costs so much, by steps of a millisecond."""
    step = 1e6
    prediction = StepPrediction(named_device(name), step, step, step, step, 0.0, limit, None, True, None)
    return Machine(
        price=price(name, usd / hours, instance=f"m{hours:g}"),
        prediction=prediction,
        scaled=None,
        step_ns=step,
        step_low_ns=step * (1 - spread),
        step_high_ns=step * (1 + spread),
        steps=hours * 3.6e6,
        usd_h=usd / hours,
    )


def plan_of(machines: list[Machine], **request: object) -> Plan:
    front = set(pareto_front([(each.hours, each.usd) for each in machines]))
    predictor = StepPredictor(Experiment(copying()))
    return Plan(
        recorded=predicted_steps(predictor, ()),
        request=Request(**{"iterations": 3.6e6, **request}),  # type: ignore[arg-type]
        recorded_devices=1,
        recorded_batch=None,
        batch=None,
        batch_factor=1.0,
        today=TODAY,
        machines=tuple(
            sorted((replace(each, on_front=at in front) for at, each in enumerate(machines)), key=lambda each: each.usd)
        ),
    )


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1.0, 1.0)], [0]),
        ([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], [0, 1, 2]),
        ([(1.0, 3.0), (2.0, 3.0), (3.0, 4.0)], [0]),
        ([(2.0, 1.0), (1.0, 1.0)], [1]),
        ([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)], [0, 1]),
    ],
)
def test_the_front(points: list[tuple[float, float]], front: list[int]) -> None:
    assert pareto_front(points) == front


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    beaten = {at for at, (x, y) in enumerate(points) if any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)}
    assert set(pareto_front(points)) == set(range(len(points))) - beaten


def test_an_hour_at_two_dollars() -> None:
    """3.6 million steps of a millisecond are an hour."""
    plan = planned([price()])

    (found,) = plan.machines
    assert (found.step_ns, found.steps) == (1_000_000, 3.6e6)
    assert (found.hours, found.hours_low, found.hours_high) == (1.0, 1.0, 1.0)
    assert (found.usd, found.usd_low, found.usd_high) == (2.0, 2.0, 2.0)
    assert found.on_front
    assert found.scaled is None
    assert "T4" in plan.without_price
    assert "A100-SXM4-80GB" not in plan.without_price


def test_energy_is_the_estimate_of_all_steps() -> None:
    """Between what an A100 draws without work and its limit, for an hour."""
    (found,) = planned([price(region="us-east-1", provider="aws")]).machines

    assert found.kwh is not None
    assert 0.059 <= found.kwh[0] < found.kwh[1] <= 0.4
    assert found.kilograms is not None
    assert 0.05 < found.kilograms[1] < 0.4


def test_of_several_regions_the_cheapest_counts() -> None:
    plan = planned([price(region="a", usd_h=3.0), price(region="b", usd_h=2.0), price(region="c", usd_h=None)])
    assert [each.price.region for each in plan.machines] == ["b"]


def test_machines_that_are_left_out_are_counted_by_reason() -> None:
    plan = planned(
        [
            price(),
            price(usd_h=None, spot_usd_h=1.0, instance="spot"),
            price(None, instance="odd"),
            price("T4", instance="t1"),
            price("T4", instance="t2"),
            price(count=2, instance="two"),
        ],
        counts=(1,),
    )

    assert {each.price.instance for each in plan.machines} == {"big", "t1", "t2"}
    assert plan.refused == (
        Refused("", "only a spot price is known", 1),
        Refused("X1", "the device table lacks it, or has several devices of that name", 1),
    )


def test_spot_prices() -> None:
    plan = planned([price(spot_usd_h=0.5), price(instance="other")], spot=True)
    assert [(each.price.instance, each.usd) for each in plan.machines] == [("big", 0.5)]
    assert plan.refused == (Refused("", "only an on-demand price is known", 1),)


def test_what_cannot_be_shared_is_refused_with_the_reason() -> None:
    plan = planned([price(count=8), price("Gaudi2", count=8, instance="gaudi")])
    assert plan.machines == ()
    assert [each.what for each in plan.refused] == ["8 x A100-SXM4-80GB", "8 x Gaudi2"]
    assert "no gradients" in plan.refused[0].reason
    assert "--link" in plan.refused[1].reason
    assert recommendation(plan)[0].startswith("No machine has both a known price and a prediction")


def test_a_machine_without_the_asked_link_is_refused_with_what_it_has() -> None:
    from stepscope.readers import open_trace

    trace = open_trace(SAMPLE)
    plan = planned([price("L4", 1.0), price("L4", 4.0, count=4, instance="four")], trace, link=named_link("nvlink5"))

    assert [each.price.count for each in plan.machines] == [1]
    assert plan.refused[0].reason.startswith("the L4 has no nvlink5: it has pcie3, pcie4")


def test_several_devices_need_fewer_steps_that_are_predicted_not_divided() -> None:
    from stepscope.readers import open_trace

    trace = open_trace(SAMPLE)
    plan = planned([price("L4", 1.0), price("L4", 4.0, count=4, instance="four")], trace, link=named_link("1GB/s+20us"))

    one, four = sorted(plan.machines, key=lambda each: each.price.count)
    assert (one.steps, four.steps) == (3.6e6, 0.9e6)
    assert four.scaled is not None
    assert four.step_ns == four.scaled.step_ns > one.step_ns
    assert four.hours == pytest.approx(0.9e6 * four.scaled.step_ns / 3.6e12)
    assert four.hours > one.hours / 4
    assert four.usd > one.usd


def test_devices_that_infer_exchange_nothing() -> None:
    recording = Recording(Metadata(devices=(A100,), path="trace.json", format="kineto"))
    for step in range(3):
        begin = step * 1000 * US
        recording.step(begin, 1000 * US, step)
        recording.operator(begin, 100 * US, "aten::copy_")
        recording.launch(begin + 90 * US, 5 * US, step)
        recording.work(begin + 100 * US, 890 * US, "Memcpy DtoD", step, kind="copy_on_device")

    plan = planned([price(), price(count=8, usd_h=10.0, instance="eight")], recording.trace())

    one, eight = sorted(plan.machines, key=lambda each: each.price.count)
    assert (eight.scaled, eight.step_ns, eight.hours) == (None, one.step_ns, one.hours / 8)
    assert [note for note in plan.notes if "exchange nothing" in note]


def test_a_larger_batch_needs_fewer_steps() -> None:
    from stepscope.readers import open_trace

    experiment = Experiment(open_trace(SAMPLE))
    usual, larger = (
        make_plan(predictor, [price("L4", 1.0)], Request(1e5), today=TODAY)
        for predictor in (
            StepPredictor(experiment, recorded_batch=8),
            StepPredictor(experiment, batch=32, recorded_batch=8),
        )
    )

    assert (usual.machines[0].steps, larger.machines[0].steps) == (1e5, 0.25e5)
    assert (larger.recorded_batch, larger.batch, larger.batch_factor) == (8, 32, 4.0)
    assert "now with 32 samples a device and step" in text_of(plan_document(larger), width=300, top=0)


def test_the_cheapest_and_what_faster_ones_cost() -> None:
    plan = plan_of([machine(8, 10), machine(4, 14, "L4"), machine(2, 40, "T4"), machine(9, 20, "P4")], deadline_h=12)

    assert recommendation(plan)[:3] == [
        f"The cheapest within 12 h is 1 x A10 at cloud (m8): 8.0 h for $10.00, {SEEN}.",
        f"2.0 times as fast for 40% more: 1 x L4 at cloud (m4), 4.0 h for $14.00, {SEEN}.",
        f"4.0 times as fast for 4.0 times the money: 1 x T4 at cloud (m2), 2.0 h for $40.00, {SEEN}.",
    ]


def test_hardly_faster_ones_are_not_named() -> None:
    plan = plan_of([machine(8, 10), machine(4, 14, "L4"), machine(3.9, 40, "T4"), machine(7.9, 11, "P4")])
    assert [sentence.split(":")[0] for sentence in recommendation(plan)] == [
        "The cheapest is 1 x A10 at cloud (m8)",
        "2.0 times as fast for 40% more",
    ]


def test_a_band_that_reaches_past_the_deadline() -> None:
    plan = plan_of([machine(11, 10, spread=0.2)], deadline_h=12, budget_usd=11)
    assert recommendation(plan)[:3] == [
        "The cheapest within 12 h and for at most $11.00 is 1 x A10 at cloud (m11): 11.0 h (8.8 to 13.2 h) for $10.00 "
        f"($8.00 to $12.00), {SEEN}.",
        "Not certain: its time may reach 13.2 h, past the deadline.",
        "Not certain: its cost may reach $12.00, over the budget.",
    ]


def test_nothing_meets_what_was_asked() -> None:
    plan = plan_of([machine(20, 10), machine(15, 30, "L4")], deadline_h=12, budget_usd=5)
    assert recommendation(plan)[:3] == [
        "No machine does it within 12 h and for at most $5.00.",
        f"The fastest is 1 x L4 at cloud (m15): 15.0 h for $30.00, {SEEN}; 25.0 % too long.",
        f"The cheapest is 1 x A10 at cloud (m20): 20.0 h for $10.00, {SEEN}; 2.0 times the budget.",
    ]
    within = plan_of([machine(20, 4), machine(10, 6, "L4")], deadline_h=12, budget_usd=5)
    assert recommendation(within)[1:3] == [
        f"The fastest within the budget is 1 x A10 at cloud (m20): 20.0 h for $4.00, {SEEN}; 66.7 % too long.",
        f"The cheapest within the deadline is 1 x L4 at cloud (m10): 10.0 h for $6.00, {SEEN}; 20.0 % over the budget.",
    ]


def test_where_the_host_limits_a_faster_device_does_not_pay() -> None:
    said = recommendation(plan_of([machine(8, 10, limit="host"), machine(7, 20, "L4", limit="compute")]))
    assert any(line.startswith("On A10 the host limits the step") for line in said)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.001, "3.6 s"), (0.5, "30 min"), (1.0, "1.0 h"), (99.0, "99.0 h"), (240.0, "10.0 days"), (48e3, "2,000 days")],
)
def test_times(value: float, words: str) -> None:
    assert hours_words(value) == words


def test_the_text() -> None:
    text = text_of(plan_document(plan_of([machine(8, 10), machine(9, 20, "L4")])), width=120, top=0)

    assert text.startswith("trace.json: a step takes 1.0 ms on A100-SXM4-80GB.\n3,600,000 iterations of the recorded")
    assert "Nothing is both cheaper and faster than this\n" in text
    assert "$1.25, 2026-11-12" in text
    assert "--format csv" not in text


def test_old_prices_are_marked() -> None:
    old = machine(8, 10)
    plan = plan_of([replace(old, price=replace(old.price, as_of=date(2025, 3, 6)))])
    text = text_of(plan_document(plan), width=120, top=0)
    assert "$1.25, 2025-03-06: check it" in text
    assert "The price is more than 90 days old" in text


def test_nothing_at_all() -> None:
    plan = plan_of([])
    assert "see below what was left out" in text_of(plan_document(plan), width=80, top=20)
    assert b"<section" in html_of(plan_document(plan))
    assert written(plan_json(plan))["machines"] == []


def test_hostile_names_are_text_everywhere() -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    bad = machine(8, 10)
    plan = plan_of([replace(bad, price=replace(bad.price, instance=name, provider="=cmd"))])

    assert "\x1b" not in text_of(plan_document(plan), width=120, top=0)
    page = html_of(plan_document(plan)).decode()
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_the_page_draws_every_machine() -> None:
    page = html_of(
        plan_document(
            plan_of([machine(8, 10), machine(4, 20, "L4"), machine(9, 30, "T4")], deadline_h=5, budget_usd=25)
        )
    )
    text = page.decode()
    assert text.count("data-tip=") == 3
    assert text.count('<i class="dot front') == 2
    assert "deadline 5 h" in text
    assert "budget $25.00" in text
    assert 'href="http' not in text
    assert " src=" not in text


def test_the_json() -> None:
    found = json.loads(json.dumps(written(plan_json(plan_of([machine(8, 10)], deadline_h=12)))))
    assert (found["schema"], found["asked"]["deadline_h"], found["today"]) == (1, 12, "2026-11-22")
    (row,) = found["machines"]
    assert (row["hours"], row["usd"], row["device"], row["meets"]) == (8.0, 10.0, "A10", True)
    assert (row["price_as_of"], row["price_age_days"], row["price_is_old"]) == ("2026-11-12", 10, False)


@pytest.mark.parametrize(
    ("text", "value"), [("4e6", 4e6), ("4,000,000", 4e6), ("1", 1.0), ("2.5e3", 2500.0), ("100", 100.0)]
)
def test_iterations(text: str, value: float) -> None:
    assert iterations(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("12h", 12.0), ("90min", 1.5), ("90m", 1.5), ("2d", 48.0), ("1w", 168.0), ("1.5 h", 1.5)]
)
def test_deadlines(text: str, value: float) -> None:
    assert hours(text) == value


@pytest.mark.parametrize(("text", "value"), [("500", 500.0), ("$1,200.50", 1200.5), ("0.5 USD", 0.5)])
def test_budgets(text: str, value: float) -> None:
    assert budget(text) == value


def test_counts() -> None:
    assert set(counts("8,1, 2,2")) == {1, 2, 8}


@pytest.fixture
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--iterations", "many"],
        ["--iterations", "0"],
        ["--iterations", "nan"],
        ["--iterations", "-4"],
        ["--iterations", "1e99"],
        ["--iterations", "9", "--deadline", "12"],
        ["--iterations", "9", "--deadline", "0h"],
        ["--iterations", "9", "--deadline", "soon"],
        ["--iterations", "9", "--budget", "-5"],
        ["--iterations", "9", "--budget", "inf"],
        ["--iterations", "9", "--gpus", "0"],
        ["--iterations", "9", "--gpus", "1,,2"],
        ["--iterations", "9", "--gpus", "3"],
        ["--iterations", "9", "--providers", "nobody"],
        ["--iterations", "9", "--link", "rope"],
        ["--iterations", "9", "--precision", "fp1"],
        ["--iterations", "9", "--json", "-", "--html", "-"],
    ],
)
@pytest.mark.usefixtures("_own")
def test_nonsense_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SAMPLE), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("_own")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(SAMPLE), "--iterations", "1e5", "--redact", "--json", "plan.json", "--html", "plan.html"]
    assert main(words) == 0

    out = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["trace"]["path"] == SAMPLE.name
    assert len(found["machines"]) > 30
    assert all(math.isfinite(row["usd"]) and row["hours_low"] <= row["hours"] for row in found["machines"])
    assert found["recommendation"][0].split(":")[0] in out.replace("\n", " ")
    assert (tmp_path / "plan.html").read_bytes().startswith(b"<!doctype html>")


def test_a_device_without_steps_is_no_reason_to_fail() -> None:
    with pytest.raises(UsageError, match="nothing to predict"):
        planned([price()], Trace.from_tables({}))


@pytest.mark.traces
def test_a_recording_of_eight_ranks_is_its_own_plan(traces_folder: Path) -> None:
    """On the machine that it was recorded on, its steps take about as long as they did."""
    from stepscope.readers import open_trace

    trace = open_trace(traces_folder / "kineto" / "a100_ddp_rank3of8.json.gz")
    plan = planned([price("A100-SXM4-40GB", 10.0, count=8), price("A100-SXM4-40GB", 1.0)], trace, iterations=1e6)

    one, eight = sorted(plan.machines, key=lambda each: each.price.count)
    assert plan.recorded_devices == 8
    assert (one.steps, eight.steps) == (8e6, 1e6)
    assert eight.step_ns == pytest.approx(plan.recorded.measured_ns, rel=0.1)
    assert one.step_ns < eight.step_ns


@pytest.mark.traces
def test_what_four_tpus_copy_is_not_told(traces_folder: Path) -> None:
    from stepscope.readers import open_trace

    trace = open_trace(traces_folder / "xplane" / "tpu_x4_inference.xplane.pb")
    plan = planned([price("H100-SXM")], trace)

    assert (plan.recorded_devices, plan.machines) == (4, ())
    assert "copies and communication over links of unknown bandwidth" in plan.refused[0].reason


@pytest.mark.parametrize(("at_least", "said"), [(True, "needs at least 2.00 GiB"), (False, "needs 2.00 GiB")])
def test_a_lower_bound_of_the_memory_is_called_one(at_least: bool, said: str) -> None:
    plan = planned([price()])
    plan = replace(plan, recorded=replace(plan.recorded, memory=MemoryNeed(2 << 30, at_least, "")))

    assert f"The step {said} of a device's memory." in text_of(plan_document(plan), width=120, top=0)


def test_doubts_stand_above_what_is_recommended() -> None:
    plan = plan_of([machine(10.0, 20.0)])
    doubtful = replace(plan, recorded=replace(plan.recorded, why_not="the device waited 42% of the time"))
    text = text_of(plan_document(doubtful), width=120, top=0)

    doubt = "Not certain: the device waited 42% of the time, so the steps are not replayed and the bands are wide."
    assert text.count(doubt) == 1
    assert text.index(doubt) < text.index("The cheapest is")
    assert (
        b"Not certain: the device waited 42% of the time"
        in html_of(plan_document(doubtful)).partition(b"The cheapest is")[0]
    )


@pytest.mark.parametrize(("passes", "said"), [(1, True), (2, False)])
def test_samples_are_counted_where_a_step_is_one_batch(passes: int, said: bool) -> None:
    """A step of two batches has more samples than its batch, so that none are counted."""
    recording = Recording(Metadata(path="trace.json", devices=(A100,)))
    recording.step(0, 2000 * US, 0)
    for number in range(passes):
        start = number * 500 * US
        shapes = {"input_shapes": "[[16, 64], [64, 64]]", "input_types": '["float", "float"]'}
        recording.operator(start, 100 * US, "aten::linear", **shapes)
        recording.launched(start + 10 * US, start + 20 * US, 50 * US, "kernel", number + 1)
    plan = planned([price()], recording.trace())

    assert plan.recorded_batch == 16
    assert (" (16 samples a device, " in asked_sentence(plan)) == said
