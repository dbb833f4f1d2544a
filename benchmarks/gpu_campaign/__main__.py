"""The command line of the campaign: `scripts/gpu_campaign`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_campaign.plan import PARTS, REPOSITORY, chosen
from benchmarks.gpu_campaign.results import Results, problems
from benchmarks.gpu_campaign.runner import Campaign

EPILOG = """\
A call with the same --out continues: what is done is not repeated, what failed is tried again. Nothing is installed or
downloaded, and no setting of the device is changed. docs/gpu-campaign.md explains parts and results.

examples:
  scripts/gpu_campaign --out results                       all parts, 25 minutes
  scripts/gpu_campaign --out results --limit 9             no more than 9 minutes; call it again for the rest
  scripts/gpu_campaign --out results --only faults         one part
  scripts/gpu_campaign --out /tmp/dry --dry-run            every part on the CPU with tiny sizes
"""


def main() -> int:
    """Run the campaign; returns 0, 1 if an item failed, 2 for a mistake, 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_campaign",
        description="Use half an hour of a GPU: tests, planted faults, remedies, timings for predictions, overhead.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="where the results are kept")
    parser.add_argument("--limit", metavar="MINUTES", type=float, help="for all parts (25; with --dry-run 60)")
    parser.add_argument(
        "--only", metavar="PART", action="append", default=[], help=f"{', '.join(PARTS)}, or PART/ITEM; repeatable"
    )
    parser.add_argument("--device", default=None, help="such as cuda:1 (default: cuda:0, with --dry-run cpu)")
    parser.add_argument("--dry-run", action="store_true", help="every part on the CPU with tiny sizes")
    options = parser.parse_args()
    device = options.device or ("cpu" if options.dry_run else "cuda:0")
    try:
        items = chosen(options.only, is_dry=options.dry_run)
        results = Results.opened(options.out.resolve())
        if results.about and results.about["device"] != device:
            raise ValueError(f"{options.out} has results of {results.about['device']}, not of {device}: name another")
        if not options.dry_run and (reason := without_gpu()):
            raise ValueError(f"{reason}; --dry-run tries every part on the CPU")
    except ValueError as error:
        parser.error(str(error))
    results.about.setdefault("device", device)
    results.about.setdefault("is_dry", options.dry_run)
    results.about.setdefault("began", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    results.about["commit"] = commit() or results.about.get("commit")
    jobs = (os.cpu_count() or 1) if options.dry_run else 1  # times of a dry run mean nothing
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    campaign = Campaign(
        results,
        items,
        (options.limit or (60.0 if options.dry_run else 25.0)) * 60,
        device=device,
        is_dry=options.dry_run,
        jobs=jobs,
        say=lambda text: print(text, flush=True),
    )
    try:
        campaign.run()
    except KeyboardInterrupt:
        print(f"interrupted; the same call continues. What is done: {options.out / 'summary.md'}")
        return 130
    print(f"\n{(results.folder / 'summary.md').read_text(encoding='utf-8').split(chr(10) * 2)[1]}")
    print(f"All of it: {options.out / 'summary.md'}")
    left = sum(results.items.get(item.path, {}).get("outcome") in (None, "interrupted") for item in items)
    if left:
        print(f"Not reached: {left} of {len(items)} items; the same call continues with them.")
    failed = any(results.items.get(item.path, {}).get("outcome") == "failed" for item in items)
    return int(failed or any(problems(results.folder)))


def without_gpu() -> str:
    """Why nothing can be run on a GPU here; empty if it can. Asks another process, so that this one holds no memory."""
    program = (
        "import torch, sys; sys.exit(0 if torch.cuda.is_available() else f'torch {torch.__version__} sees no GPU')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def commit() -> str | None:
    """The checkout's commit; None where there is no git."""
    try:
        words = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
