"""# What it finds
Lines or one function of the input pipeline that take most of the time to make a batch, and what kind of work they do.

Kinds of work are a value that is computed again for each sample, a Python loop over elements, a search through a list,
single rows of a table, and ever longer slices. Where there are none, the rule reports a function, or the sampler, whose
time workers alone would not hide.

# Why it costs time
Batches arrive no faster than the dataset's `__getitem__`, its transform and the collate function make them. Loading in
more processes divides the time only as long as there are processors for them.

# How it is measured
The recorder times the dataset's items, transforms and collate functions in the main process and its workers; other
recordings show them as Python frames inside the main process's data loader. The finding names the innermost of your
functions that takes at least half of the time to make a batch.

If batches are made in the main process and lines were recorded, their time is known line by line; functions that run
very many quick lines are sampled every 3 ms. The recorder reads in the source what these lines do:

- a value is computed again: the hashes of two steps before the recording are equal in at least half of the calls, or
  its statement reads nothing that depends on the function's arguments, draws no random number and reads no stream;
- a loop: a `for`, `while` or comprehension inside the function, not the one that asks for batches, whose lines run at
  least 8 times for each sample;
- a search: `in` or `.index()` of a name that the source binds to a list, or that was a list of at least 64 entries;
- rows: `.iloc[...]`, `.loc[...]`, and what uses the row;
- growing slices: `x[:i]` or `x[i:]` in a loop over `i`, or a loop over `range(i)` or `range(i, n)` inside it that reads
  by its own variable alone;
- masks: comparisons of an attribute or item, such as a whole column of a table, with a value;
- draws: NumPy's `choice(..., replace=False)` and `choice(..., p=...)`, which go through all entries;
- conversions: `torch.tensor(...)`, `numpy.array(...)` and the like of a variable or a part of one.

The kinds are tried in this order, except that conversions and loops come last. The first that takes at least 30 % of
the time to make a batch is named, with the functions of the same file that it calls; a conversion or a loop must take
half. The saving comes from a replay in which these lines take no time (a value that is computed again), 10 % (a loop)
or 5 % (the others) of what they took. Such a finding is shown even if more workers would hide the time; so is a
function that runs in workers, if its source shows such work.

For a function, the saving is what the step would lose of its waits for data if the function took 50 us per sample (a
collate function 10 us), as when its results are cached or prepared before training; making it twice as fast saves about
half of that. The rule reports nothing if worker processes would remove most of the waits without a change to the
function: `input-bound` reports that.

# Known false positives
Python code runs several times slower while its lines or stacks are recorded, so a function that is a Python loop looks
slower than it is. The trace's warnings say how much time the recording took. A value that is computed again may be
needed anew if the program changes it in a way that its source does not show.

# What to do
Do what the finding says about its line: compute the value once, work on whole arrays, look up in a dictionary, index
arrays instead of a table, carry a running result. Do the work once instead of in every epoch (cache it, or prepare
files beforehand), for a whole batch instead of for each item, with NumPy or torch instead of a Python loop, or on the
device.

# Reference
TensorFlow profiler, "Input pipeline analyzer": input operators ranked by self time; PyTorch performance tuning guide.
"""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.costs import calls_at
from stepscope.diagnosis.lines.function_work import FunctionWork, Work, figures_of, least, left_of, remedy_of, said_of
from stepscope.diagnosis.loading import (
    CARRIES_MOST,
    HANDED_OUT_NS,
    INDEXED,
    NEARLY_ALL,
    READING,
    Costly,
    Loading,
    costly_function,
    loading_of,
    places_of,
    repeated_work,
    sample_ns,
    settings_figures,
)
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.whatif.changes import scaled_cause

_WHAT: Final = {
    "item": "the dataset's item",
    "transform": "the transform",
    "collate": "the collate function",
    "sampler": "the sampler",
}


def check(view: View, limits: Limits) -> Answers:
    loading = loading_of(view)
    if not limits.reached(loading.wait_ns):
        return
    costly = costly_function(view, loading)
    is_sampler = costly is not None and costly.stage == "sampler"
    works = FunctionWork(view, loading.pieces, loading.samples_per_step(view))
    work = None if is_sampler or loading.workers or loading.is_begun_anew else works.costliest()
    if work is not None:
        yield _of_work(view, loading, work, works)
    if work is not None or costly is None or (_is_enough(view, loading) and not is_sampler):
        return
    source = works.in_source(costly.file, costly.line, costly.share) if loading.workers and not is_sampler else None
    if source is None and _would_more_do(view, loading) and not is_sampler:
        return
    saving = _saving_ns(view, loading, costly)
    kept = repeated_work(view, loading) if saving < limits["share"] * view.length_ns else None
    if kept is not None and not is_sampler and sample_ns(view) >= HANDED_OUT_NS:
        yield _of_kept(view, loading, kept)
        return
    where = places_of(view, loading, costly)
    costliest = _of_samples(view, where)
    remedy = _remedy(costly, costliest, calls_at(view, costliest) if costliest is not None else ())
    if source is not None:
        remedy, where = remedy_of(source, is_collate=costly.stage == "collate"), (*source.where, *where)
    yield Found(
        f"{_WHAT[costly.stage]} {costly.name} takes {costly.share:.0%} of the time to make a batch, for which the "
        f"{view.period} waits {view.percent(loading.wait_ns)} of its time",
        saving,
        basis="what the waits for data would lose if the function only handed out samples from memory, cached or "
        "prepared before training; half of it if it were twice as fast",
        confidence="medium",
        weighed_ns=loading.wait_ns if is_sampler else None,
        figures=[
            view.share_figure("waiting for data", loading.wait_ns),
            Figure("share of the time to make a batch", costly.share, "share", CARRIES_MOST),
            Figure("time of one call", costly.total_ns // max(costly.calls, 1), "ns"),
            Figure("calls per batch", costly.calls / max(loading.calls, 1), "count"),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=remedy,
        where=where,
        change=scaled_cause("input", 1.0 - saving / loading.wait_ns),
    )


def _of_samples(view: View, places: tuple[Location, ...]) -> Location | None:
    """The costliest place that can be in what makes samples: a function that steps the optimizer only asks for them."""
    loops = {(each.file, each.function) for each in view.locations(view.pieces_of("optimizer"))}
    return next((each for each in places if (each.file, each.function) not in loops), None)


def _of_kept(view: View, loading: Loading, kept: Work) -> Found:
    """Samples that cost little each, and nothing where they are prepared once and taken a batch at a time."""
    return Found(
        f"{kept.function} makes each sample anew, although it comes out the same in each epoch: {kept.share:.0%} of "
        f"the time to make a batch, for which the {view.period} waits {view.percent(loading.wait_ns)} of its time",
        int(loading.wait_ns * kept.share * (1 - INDEXED)),
        basis=f"the waits for data, by the share of them in these functions, but for {INDEXED:.0%} of it",
        confidence="medium",
        weighed_ns=loading.wait_ns,
        figures=[
            Figure("share of the time to make a batch", kept.share, "share", least(kept)),
            Figure("time of one sample", sample_ns(view), "ns", HANDED_OUT_NS),
            Figure("share of it that taking whole batches needs", INDEXED, "share"),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=Remedy(
            "Its source draws no random numbers: prepare all samples once, as whole tensors, and take a batch of them "
            "by its indices; then nothing runs for each sample.",
            "inputs = prepare(dataset.images)                              # once, all of them, before training\n"
            "for chosen in torch.randperm(len(inputs)).split(batch_size):  # instead of a DataLoader\n"
            "    batch, target = inputs[chosen], labels[chosen]",
        ),
        where=kept.where,
        change=scaled_cause("input", 1.0 - kept.share * (1 - INDEXED)),
    )


def _of_work(view: View, loading: Loading, work: Work, works: FunctionWork) -> Found:
    share = work.share
    saving = int(loading.wait_ns * share * (1 - left_of(work)))
    remains = f", but for {left_of(work):.0%} of it" if left_of(work) else ""
    return Found(
        f"{said_of(view, work)}: {share:.0%} of the time to make a batch, for which the {view.period} waits "
        f"{view.percent(loading.wait_ns)} of its time",
        saving,
        basis=f"the waits for data, by the share of them in these lines{remains}",
        confidence="medium",
        weighed_ns=loading.wait_ns,
        figures=[
            Figure("share of the time to make a batch", share, "share", least(work)),
            *figures_of(work),
            *settings_figures(loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=remedy_of(work, is_collate=_is_collate(view, work), hides=_HIDES),
        where=work.where,
        change=works.scaled(work, left_of(work)),
    )


_HIDES: Final = (
    " Worker processes (num_workers) come second: they hide this time as long as processors are free, and do not "
    "remove it."
)


def _is_collate(view: View, work: Work) -> bool:
    """Whether the function is one that collates batches."""
    stages = {(each.file, each.line) for each in view.program.input_stages if each.stage == "collate"}
    return (work.where[0].file, work.begin) in stages


def _is_enough(view: View, loading: Loading) -> bool:
    """Whether the existing workers make batches fast enough, so that the waits are for something else."""
    load, now = loading.load, loading.workers
    if load is None:
        return now == 0
    return bool(now) and (load.step_ns(now or 0) - load.ahead_ns) * view.step_count < CARRIES_MOST * loading.wait_ns


def _would_more_do(view: View, loading: Loading) -> bool:
    """Whether additional workers would remove nearly all of the waits."""
    load, now = loading.load, loading.workers
    if load is None:
        return False
    workers = load.workers_needed()
    return (now is None or now < workers) and loading.saved_ns(view, workers) >= NEARLY_ALL * loading.wait_ns


def _saving_ns(view: View, loading: Loading, costly: Costly) -> int:
    if costly.stage == "sampler":
        return int(loading.wait_ns * costly.share)
    if loading.load is None or not loading.workers:
        return int(loading.wait_ns * costly.avoidable)
    return loading.saved_ns(view, loading.workers, costly.avoidable * loading.load.batch_ns)


def _remedy(costly: Costly, costliest: Location | None, called: tuple[str, ...]) -> Remedy:
    """What to change.

    Args:
        costliest: the line that takes most, if known; `called`: names of what it calls.
    """
    if costly.stage == "sampler":
        return Remedy(
            f"{costly.name} runs in the main process, however many workers there are: sort and shuffle once in an "
            "epoch, or sort once and shuffle whole batches, and hand out indices from the result.",
            "def __iter__(self):\n"
            "    order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)   # better once, in __init__\n"
            "    batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]\n"
            "    yield from random.sample(batches, len(batches))",
        )
    if costly.stage == "collate":
        return Remedy(
            f"Let {costly.name} build the whole batch at once instead of element by element; what does not depend on "
            "the batch belongs in the dataset, prepared before training.",
            "def collate(samples):\n"
            "    inputs, targets = zip(*samples)\n"
            "    return torch.stack(inputs), torch.tensor(targets)",
        )
    function = costly.name.rpartition(".")[2]
    inner = costly.name if costliest is None or costliest.function == function else costliest.function
    names = " and ".join(f"{name}()" for name in called[:3])
    text = (
        f"Let {costly.name} work on arrays instead of in a Python loop, or keep its results: what is the same in every "
        "epoch needs to be computed once."
    )
    if not READING.isdisjoint(called):
        text = (
            f"The costliest line of {inner} calls {names}: read and decode each sample once, and keep what comes "
            "of it in memory or in one memory-mapped file (numpy.memmap, Arrow)."
        )
    elif names:
        text = (
            f"The costliest line of {inner} calls {names} for each sample: do what is the same in every epoch "
            "once, before training, and keep its result, at the size that the model sees; do what is random on whole "
            "batches, with tensor operators."
        )
    return Remedy(
        text,
        "def prepared(self, index):                 # once for each sample, kept in memory or in a file\n"
        "    if index not in self.cache:\n"
        f"        self.cache[index] = self.{function}(index)\n"
        "    return self.cache[index]",
    )


RULE: Final = Rule(
    id="slow-input-function",
    title="One function makes batches slow",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to waiting for this function")},
    check=check,
    needs=("lines",),
    replaces=("input-bound",),
)
