"""# What it finds
Steps that wait because the next batch is not ready.

# Why it costs time
While the training process reads, decodes and collates a batch, nothing launches work. The device finishes its queued
work and waits. Loading ahead of time in other processes hides this as long as there are processors for them.

# How it is measured
Idle time of the device whose following work was launched late, while the launching thread was inside the data loader
(`enumerate(DataLoader)#...`, `torch/utils/data/dataloader.py: __next__`), and the idle time after it until the device
has work again, unless the host synchronises in between. A batch loaded before the device's first work in the recording
counts like the others. Without a device: time of the main thread inside the loader. If a library function, not one of
yours, takes most of the time to make a batch and the trace has frames of it, the finding names it. If the dataset's own
functions take at least half of the time, and their source draws no random numbers and reads no stream, the finding says
that their results can be kept.

The saving is what a step would lose of this time with the number of workers that the remedy names. A step cannot be
shorter than its computation, than the time to make a batch divided by the workers, or than the processor time of both
divided by the processors that the program may use. Workers hold a parallel computation up if they take its processors,
and processors that other programs used while steps were recorded do not count. Without a device, receiving a batch from
a worker takes 1.4 ms, multiplied by how much recording slowed the loading. A limit that the recording does not
show is ignored. Where more workers cannot help, the remedy is cheaper batches: the saving is the wait or, without
workers, the part of it in functions that take more than 50 us for a sample, except PyTorch's own.

Where the existing workers make batches as fast as they are used, the median wait is the time to receive a batch: the
worker passes each tensor as a file descriptor, in a thread that must wait for the Python code that makes the next
batch. The saving is that time less one millisecond per batch, or what the main process would save by making the batches
itself if that is more; otherwise it is the waits beyond the median.

# Known false positives
The first batch after workers start counts too, so record steady steps. A loader whose transforms run Python loops looks
slower than it is while stacks or lines are recorded.

# What to do
Give the loader worker processes and let them run ahead: `num_workers`, `prefetch_factor`, `persistent_workers`,
`pin_memory`. Where the processors are already busy, make batches cheaper: cache or prepare what is the same in every
epoch, or move the work to the device.

# Reference
XProf's input-pipeline analysis calls a step moderately input-bound from 5 % and highly from 20 %.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stepscope.analysis.input_pipeline import RECEIVED_NS
from stepscope.diagnosis.lines.function_work import MOST, Work
from stepscope.diagnosis.loading import (
    INDEXED,
    KEPT_ITERATOR,
    Costly,
    Loading,
    cheaper_share,
    costly_function,
    loading_of,
    places_of,
    processors_in_words,
    reading_lines,
    repeated_work,
    settings_figures,
)
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.trace.naming import package_path
from stepscope.whatif.changes import scaled_cause

_WORTHWHILE: Final = 0.25
"""Share of the waits that workers must remove to be the remedy."""
_BY_TRIAL: Final = (
    "# or let these numbers be found by trial:\n"
    "from stepscope.remedies import tune_loader\n"
    "loader = tune_loader(dataset, step_ms=..., batch_size=...).loader()"
)


def check(view: View, limits: Limits) -> Answers:
    loading = loading_of(view)
    cost = loading.wait_ns
    if not limits.reached(cost):
        return
    if _are_handed_out_singly(view, loading):
        yield _of_single_samples(view, loading)
        return
    saving, basis, remedy = _of_workers_that_keep_up(loading) if loading.keeps_up else _advice(view, loading)
    if (loading.keeps_up or loading.is_begun_anew) and not limits.reached(saving):
        return
    waiting = "the device waits for" if view.device is not None else "the main thread spends its time on"
    is_making_slow = not loading.keeps_up and not loading.is_begun_anew
    costly = costly_function(view, loading) if is_making_slow else None
    library = None if costly is not None or not is_making_slow else costly_function(view, loading, of_users=False)
    figures = _figures(view, loading)
    kept = repeated_work(view, loading) if is_making_slow else None
    if kept is not None:
        figures.append(Figure(f"share of it in {kept.function}", kept.share, "share", MOST))
        remedy = _kept_first(_kept_text(kept), remedy)
    read, reading = reading_lines(view, loading) if is_making_slow and kept is None else (0.0, ())
    if read >= MOST:
        figures.append(Figure("share of it in lines that read or decode files", read, "share", MOST))
        remedy = _kept_first(_read_text(read), remedy)
    if library is not None:  # the library may have a faster function
        figures += [Figure(f"share of it in {_called(library)}", library.share, "share")]
        text = f"{remedy.text} {library.share:.0%} of the time to make a batch goes to {_called(library)}."
        remedy = replace(remedy, text=text)
    yield Found(
        f"for {view.percent(cost)} of the {view.period} {waiting} the data loader",
        saving,
        basis=basis,
        confidence="medium",  # only a trial shows whether workers find free processors
        weighed_ns=cost,
        figures=[
            view.ns_per_step("time lost", cost),
            *figures,
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=remedy,
        where=(reading if read >= MOST else ()) or places_of(view, loading, costly),
        change=scaled_cause("input", 1.0 - saving / cost),
    )


_MUCH: Final = 0.25
"""Share of the steps from which handing out single samples is worth a loop without a loader."""


def _are_handed_out_singly(view: View, loading: Loading) -> bool:
    """Whether all that happens for a batch is to take its samples from tensors, and to put them together."""
    stages = [each for each in view.program.input_stages if each.stage in ("item", "transform", "collate")]
    items = [each.name for each in stages if each.stage == "item"]
    is_plain = bool(items) and all(name.startswith("TensorDataset.") for name in items)
    libraries = all("torch/utils/data/" in (each.file or "") for each in stages)
    return is_plain and libraries and not loading.workers and view.share(loading.wait_ns) >= _MUCH


def _of_single_samples(view: View, loading: Loading) -> Found:
    return Found(
        f"for {view.percent(loading.wait_ns)} of the {view.period} samples that are in memory are handed out one by "
        "one, and put together again",
        int(loading.wait_ns * (1 - INDEXED)),
        basis=f"time inside the data loader, but for {INDEXED:.0%} of it",
        confidence="medium",
        weighed_ns=loading.wait_ns,
        figures=[
            view.ns_per_step("time lost", loading.wait_ns),
            Figure("share of it that taking whole batches needs", INDEXED, "share"),
            *_figures(view, loading),
        ],
        intervals=view.longest(loading.pieces, "waiting for data"),
        remedy=Remedy(
            "Take whole batches from the tensors, by slices or by shuffled indices, without a DataLoader.",
            "for batch in inputs.split(batch_size):                        # in order\n"
            "for chosen in torch.randperm(len(inputs)).split(batch_size):  # shuffled\n"
            "    batch, target = inputs[chosen], targets[chosen]",
        ),
        where=places_of(view, loading, None),
        change=scaled_cause("input", INDEXED),
    )


def _figures(view: View, loading: Loading) -> list[Figure]:
    figures = [view.count_per_step("batches loaded", loading.calls), *settings_figures(loading)]
    if loading.load is not None:
        figures.append(Figure("worker processes that make batches fast enough", loading.load.workers_needed(), "count"))
    return figures


def _kept_text(kept: Work) -> str:
    return (
        f"{kept.share:.0%} of it goes to {kept.function}, most to the line named first. Its source draws no random "
        "numbers, so that a sample comes out the same in each epoch: keep it in memory or in a file the first time. "
        "Workers come second:"
    )


def _read_text(share: float) -> str:
    return (
        f"{share:.0%} of it reads and decodes files, which gives the same in each epoch: keep the decoded samples in "
        "memory, or in one memory-mapped file, at the size that training uses. Workers come second:"
    )


def _kept_first(text: str, remedy: Remedy) -> Remedy:
    """The remedy after another one: to keep samples."""
    code = "samples = [dataset[index] for index in range(len(dataset))]      # once, before training; or in a file\n"
    return replace(remedy, text=f"{text} {remedy.text[:1].lower()}{remedy.text[1:]}", code=f"{code}{remedy.code}")


def _called(library: Costly) -> str:
    """A library's function with its file, the path starting at the installed package."""
    return f"{library.name} of {package_path(library.file)}"


def _of_workers_that_keep_up(loading: Loading) -> tuple[int, str, Remedy]:
    """Saving over the span, its basis and the remedy, if workers make batches as fast as they are used."""
    late = loading.wait_ns - loading.received_ns
    received = max(loading.received_ns - loading.calls * RECEIVED_NS, 0)
    alone = max(loading.wait_ns - int(loading.calls * (loading.batches.clock_ns or 0.0)), 0)
    if late >= max(received, alone):
        return late, "waits beyond what every batch takes to be received", _ahead(loading)
    if alone >= received:
        return alone, "time to receive batches from workers, less what it takes to make them", _alone(loading)
    return received, "time to receive batches that workers have made, less a millisecond each", _received(loading)


def _advice(view: View, loading: Loading) -> tuple[int, str, Remedy]:
    """Saving over the span, its basis and the remedy."""
    waits = (
        "idle time of the device while the launching thread was loading data"
        if view.device is not None
        else "time of the main thread inside the data loader"
    )
    if loading.is_begun_anew:
        made_ns = int(loading.calls * (loading.batches.clock_ns or 0.0))
        return (
            max(loading.wait_ns - made_ns, 0),
            f"{waits}, less the time to make the batches themselves",
            KEPT_ITERATOR,
        )
    now = loading.workers
    pinned = view.device is not None
    if loading.load is None and not loading.has_no_free_core:
        many = _more_workers(pinned=pinned) if now is None or now > 0 else _workers(loading, 4, pinned=pinned)
        return loading.wait_ns, waits, many
    if loading.load is None:
        return loading.wait_ns, f"{waits}, if batches cost nothing", _cheaper(loading)
    workers = loading.load.workers_needed()
    gain = loading.saved_ns(view, workers)
    if (now is not None and now >= workers) or gain < _WORTHWHILE * loading.wait_ns:
        if now:
            return loading.wait_ns, f"{waits}, if batches cost nothing", _cheaper(loading)
        cheaper = cheaper_share(view, loading)
        spent = f"{waits}, in functions that take longer than handing out samples that are in memory"
        return int(loading.wait_ns * cheaper), spent, _cheaper(loading)
    if gain < loading.wait_ns:
        leave = "one worker" if workers == 1 else f"{workers} workers"
        on = f" on {processors_in_words(loading.processors)}" if loading.processors else ""
        waits += f", less what {leave} would leave of it{on}"
    return gain, waits, _workers(loading, workers, pinned=pinned)


def _workers(loading: Loading, workers: int, *, pinned: bool) -> Remedy:
    code = (
        f"loader = DataLoader(dataset, ..., num_workers={workers}, prefetch_factor=2,\n"
        f"                    persistent_workers=True{_PINNED if pinned else ''})\n"
        f"{_BY_TRIAL}"
    )
    apply = (f"workers={workers}", "persistent-workers")
    text = "Batches are loaded in the main process: load them in worker processes, ahead of time"
    if loading.workers:
        now = "One worker process" if loading.workers == 1 else f"{loading.workers} worker processes"
        text = f"{now} cannot make batches as fast as they are used"
    if loading.load is not None:
        enough = "one worker" if workers == 1 else f"{workers} workers"
        free = "" if loading.processors else " if there is a processor free for each"
        text += f"; {enough} can keep up with the computation{free}"
    return Remedy(f"{text}.", code, apply)


_PINNED: Final = ", pin_memory=True"
"""What a loader needs where a device copies its batches."""


def _more_workers(*, pinned: bool) -> Remedy:
    return Remedy(
        "Worker processes load already, and are too slow or too few: raise num_workers towards the number of "
        "CPU cores and prefetch_factor, and profile the dataset's __getitem__ and collate_fn by themselves.",
        "loader = DataLoader(dataset, ..., num_workers=os.cpu_count(), prefetch_factor=4,\n"
        f"                    persistent_workers=True{_PINNED if pinned else ''})\n"
        f"{_BY_TRIAL}",
        apply=("prefetch=4", "persistent-workers"),
    )


def _ahead(loading: Loading) -> Remedy:
    them = "it" if loading.workers == 1 else "them"
    return Remedy(
        f"{_make(loading)} batches as fast as they are used, but not far enough ahead: keep {them} alive between "
        f"epochs and let {them} prefetch more.",
        f"loader = DataLoader(dataset, ..., num_workers={loading.workers}, prefetch_factor=8,\n"
        "                    persistent_workers=True)\n"
        f"{_BY_TRIAL}",
        ("prefetch=8", "persistent-workers"),
    )


def _alone(loading: Loading) -> Remedy:
    return Remedy(
        f"{_make(loading)} batches in less time than the main process takes to receive them: make them in the main "
        "process itself.",
        "loader = DataLoader(dataset, ..., num_workers=0)",
        ("workers=0",),
    )


def _received(loading: Loading) -> Remedy:
    return Remedy(
        f"{_make(loading)} batches as fast as they are used, but each takes long to be received: let tensors be "
        "handed over by name instead of by file descriptors, or hand over fewer and larger ones.",
        'torch.multiprocessing.set_sharing_strategy("file_system")      # once, before the loader is made',
    )


def _make(loading: Loading) -> str:
    return "One worker process makes" if loading.workers == 1 else f"{loading.workers} worker processes make"


def _cheaper(loading: Loading) -> Remedy:
    why = "More workers would not remove the wait"
    if loading.has_no_free_core:
        why = (
            f"No core is free for a worker, as other programs kept {loading.other_cores:.1f} of "
            f"{processors_in_words(loading.processors or 0)} busy"
        )
    elif loading.processors:
        why = f"More workers than {processors_in_words(loading.processors)} can run would not remove the wait"
    return Remedy(
        f"{why}: make batches cheaper. Cache what is the same in every epoch, or prepare it once before training.",
        "samples = [prepare(sample) for sample in dataset]      # once, before training\n"
        "loader = DataLoader(samples, ...)",
    )


RULE: Final = Rule(
    id="input-bound",
    title="The device waits for data",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to loading data")},
    check=check,
    remedies={
        "jax": Remedy(
            "Load batches in worker processes, and put the next ones on the device while this one computes.",
            "loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=4)\n"
            "waiting = collections.deque()\n"
            "for batch in loader:\n"
            "    waiting.append(jax.device_put(batch))             # returns at once\n"
            "    if len(waiting) > 2:\n"
            "        state, loss = train_step(state, waiting.popleft())",
        ),
        "torch_xla": Remedy(
            "Load batches in worker processes, and put the next ones on the device while this one computes.",
            "loader = torch_xla.distributed.parallel_loader.MpDeviceLoader(\n"
            "    DataLoader(dataset, ..., num_workers=4), torch_xla.device())",
        ),
    },
)
