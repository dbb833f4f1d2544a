"""One item in a process of its own.

python -m benchmarks.gpu_campaign.child faults.planted small_model --device cuda:0 --seconds 60 --folder work
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_campaign.plan import At, NotHere


def main() -> int:
    """Do the item; `result.json` in its folder says what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", help="module, of this package unless it has a dot, and function")
    parser.add_argument("about")
    parser.add_argument("--device", required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    module, _, function = options.work.rpartition(".")
    at = At(options.device, options.dry, options.folder, options.seconds)
    said: dict[str, object]
    try:
        work = getattr(import_module(module if "." in module else f"benchmarks.gpu_campaign.{module}"), function)
        said = {"outcome": "done", "result": work(at, options.about)}
    except NotHere as reason:
        said = {"outcome": "skipped", "error": str(reason)}
    except Exception as error:
        traceback.print_exc()
        said = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    (options.folder / "result.json").write_text(json.dumps(said), encoding="utf-8")
    return int(said["outcome"] == "failed")


if __name__ == "__main__":
    sys.exit(main())
