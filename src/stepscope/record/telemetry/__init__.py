"""What a run says about itself while it goes on: logged values, norms, throughput, and how busy the machine is.

    log.py       the user's part: `Telemetry`, `telemetry()`, `log()`; values handed to trackers
    values.py    a logged value becomes a number, without waiting for a device; norms by hooks, learning rates
    sampler.py   the thread that samples processes and devices
    store.py     rows wait in memory, a thread writes them into one SQLite file
    export.py    to Weights & Biases, TensorBoard and CSV

Nothing here imports torch, numpy or polars (export.py excepted): it all runs inside the user's program.
"""
