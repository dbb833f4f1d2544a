"""How fast the page's timeline is: its index, until it is painted, frames while it moves, and answers to a zoom.

    python benchmarks/page_speed.py [--events 1000000] [FILE]

A headless Chromium that draws without a GPU opens `stepscope view` of a simulated training's trace, or of FILE. A
frame's work lasts from its beginning until the browser has painted it; the script is the page's own part of it. Other
programs that run beside it lengthen all of them. With --goals, exits 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.long_trace import simulated, write_long_trace_of
from stepscope import open_trace
from stepscope.analysis.step_view import StepView
from stepscope.view.rows import slices_in_files, slices_of
from stepscope.view.timeline import TimelineIndex
from tests.browser import Browser

GOALS = {"painted_ms": 1000, "frame_p95_ms": 16, "answer_p95_ms": 200}
FRAMES = 240
SCRIPT = """
(async () => {
  const canvas = document.querySelector(".timeline-lanes");
  const box = canvas.getBoundingClientRect();
  const work = [], intervals = [], scripts = [];
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => request((now) => {
    const begin = performance.now();
    draw(now);
    scripts.push(performance.now() - begin);
  });
  const painted = () => new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(0);
  });
  let last = 0;
  for (let number = 0; number < FRAMES; number++) {
    const phase = number % 120;
    const zoom = phase < 40 ? -60 : phase < 80 ? 0 : 60;
    const x = box.left + box.width * (0.3 + 0.04 * ((number * 7) % 10));
    const at = { clientX: x, clientY: box.top + 40, bubbles: true, cancelable: true };
    const turn = zoom ? { deltaY: zoom, ctrlKey: true } : { deltaX: 40 };
    canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ...turn }));
    await new Promise(request).then(async (now) => {
      if (last) intervals.push(now - last);
      last = now;
      const begin = performance.now();
      await painted();
      work.push(performance.now() - Math.min(begin, now));
    });
  }
  window.requestAnimationFrame = request;
  return { work, intervals, scripts };
})()
"""


def measured(trace: Path) -> dict[str, Any]:
    """Times in milliseconds of a trace's page."""
    command = [sys.executable, "-m", "stepscope", "view", str(trace), "--no-browser", "--port", "8993"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = next(line for line in map(str.strip, server.stdout or ()) if "token=" in line)
        address = next(word for word in address.split() if "token=" in word)
        with tempfile.TemporaryDirectory() as folder:
            browser = Browser(Path(folder) / "profile")
            try:
                return _in(browser, address)
            finally:
                browser.close()
    finally:
        server.terminate()
        server.wait()


def indexed(file: Path) -> dict[str, float]:
    """Milliseconds to build the index of a trace's slices, and of a window 1,500 pixels wide at nine zooms."""
    trace = open_trace(file)
    index = TimelineIndex(StepView(trace))
    main = index.view.lane
    begin = time.perf_counter()
    slices = (slices_in_files if index.in_files else slices_of)(trace, main)
    built = time.perf_counter() - begin
    first, last = index.bounds
    _ = index.window(first, last)
    windows = []
    for zoom in range(9):
        start = first + (last - first) // 3
        begin = time.perf_counter()
        index.window(start, start + max((last - first) >> 2 * zoom, 1), 1500)
        windows.append(time.perf_counter() - begin)
    return {"slices": len(slices.start), "index_ms": built * 1e3, "window_ms": max(windows) * 1e3}


def _in(browser: Browser, address: str) -> dict[str, Any]:
    browser.resize(1440, 900)
    browser.open(address)
    for document in ("diagnosis", "timeline?width=10", "stretch"):  # what is computed once
        browser.script(f"fetch('api/{document}').then(answer => answer.text()).then(() => 0)")
    browser.open(browser.script("location.origin") + "/?again#view=timeline")
    _wait_for(browser, "performance.getEntriesByName('timeline-painted').length")
    painted = browser.script("performance.getEntriesByName('timeline-painted')[0].startTime")
    time.sleep(1)
    browser.script("performance.clearResourceTimings()")
    frames = browser.script(SCRIPT.replace("FRAMES", str(FRAMES)))
    time.sleep(1)
    entries = "performance.getEntriesByType('resource')"
    answers = browser.script(f"{entries}.filter(each => each.name.includes('api/timeline')).map(each => each.duration)")
    spread = {f"{name}_p{share}_ms": float(np.percentile(values, share)) for name, values, share in (
        ("frame", frames["work"], 50), ("frame", frames["work"], 95),
        ("script", frames["scripts"], 50), ("script", frames["scripts"], 95),
        ("interval", frames["intervals"], 50), ("interval", frames["intervals"], 95),
        ("answer", answers or [0.0], 50), ("answer", answers or [0.0], 95),
    )}  # fmt: skip
    return {"painted_ms": painted, **spread, "frames": len(frames["work"]), "answers": len(answers)}


def _wait_for(browser: Browser, condition: str) -> None:
    for _ in range(600):
        if browser.script(condition):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the page did not come to {condition}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?")
    parser.add_argument("--events", type=int, default=1_000_000, help="of the simulated trace (default: %(default)s)")
    parser.add_argument("--goals", action="store_true", help="exit 1 if a goal is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = options.file or Path(folder) / "long.json"
        if options.file is None:
            write_long_trace_of(trace, simulated(), options.events)
        result = indexed(trace) | measured(trace)
    print(json.dumps({name: round(value, 1) for name, value in result.items()}, indent=2))
    missed = [name for name, most in GOALS.items() if result[name] > most]
    if missed:
        print("missed: " + ", ".join(f"{name} {result[name]:.0f} > {GOALS[name]}" for name in missed))
    return 1 if missed and options.goals else 0


if __name__ == "__main__":
    sys.exit(main())
