"""The notebooks of docs/notebooks, executed as Jupyter does it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NOTEBOOKS: Final = sorted(FOLDER.glob("*.ipynb"))
_LONGEST_CELL_S: Final = 300


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of this run; an error in a cell is raised. Needs nbclient and ipykernel."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    folders = [str(Path(sys.executable).parent), str(FOLDER.parents[1] / ".venv" / "bin")]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*folders, os.environ["PATH"]]),
        "COLUMNS": "110",
        "NO_COLOR": "1",
    }
    client = NotebookClient(
        notebook, timeout=_LONGEST_CELL_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute(env=environment)
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return _cleaned(found)


def _cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """Without the times of execution, and what differs between versions of Jupyter."""
    notebook["metadata"] = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook["cells"]:
        cell["metadata"] = {}
    return notebook


def outputs(notebook: dict[str, Any]) -> list[str]:
    """The text of each code cell's outputs, of HTML without its marks."""
    return [
        " ".join(text for output in cell["outputs"] for text in _texts(output))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def _texts(output: dict[str, Any]) -> list[str]:
    data = output.get("data", {})
    parts = ["".join(output.get("text", "")), "".join(data.get("text/plain", ""))]
    html = re.sub(r"<[^>]+>", " ", "".join(data.get("text/html", "")))
    return [" ".join(each.split()) for each in (*parts, html)]
