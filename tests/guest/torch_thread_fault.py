"""torch 2.13 alone crashes here: a profiler that a thread started, for that thread, is stopped after the thread ended.

The recording goes with the thread's own state, and stopping it then follows a pointer into nothing (exit code -11).
A profiler of all threads is not affected, and neither is one that the main thread started.
"""

import threading

import torch
from torch.profiler import ProfilerActivity, profile

profiler = profile(activities=[ProfilerActivity.CPU])


def work() -> None:
    profiler.prepare_trace()
    profiler.start_trace()
    torch.ones(2) + 1


thread = threading.Thread(target=work)
thread.start()
thread.join()
profiler.stop_trace()
profiler.export_chrome_trace("trace.json")
