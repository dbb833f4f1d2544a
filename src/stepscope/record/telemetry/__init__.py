"""Telemetry of a run: logged values, norms, throughput, and the load of the machine.

    log.py       the user's part: `Telemetry`, `telemetry()`, `log()`; values passed to trackers
    values.py    converts logged values to numbers without waiting for a device; norms by hooks, learning rates
    sampler.py   the thread that samples processes and devices
    store.py     buffers rows in memory; a thread writes them to one SQLite file

Nothing here imports torch, numpy or polars: it all runs inside the user's program. `stepscope.trace.telemetry` reads
and exports what it wrote.
"""
