"""A coding assistant makes a slow program faster, by the tools alone, and proves it."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import environment

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the extra mcp is not installed")

SLOW = """\
import torch
import torch.nn.functional as F

LENGTH = 192
torch.set_num_threads(1)
model = torch.nn.Linear(32, 96)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(logits, targets):
    loss = torch.zeros(())
    for position in range(LENGTH):
        loss = loss + F.cross_entropy(logits[:, position], targets[:, position])
    return loss / LENGTH


for step in range(30):
    inputs, targets = torch.randn(8, LENGTH, 32), torch.randint(96, (8, LENGTH))
    optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    optimizer.step()
"""


def test_from_a_slow_program_to_a_proven_gain(tmp_path: Path) -> None:
    import mcp  # here, as that takes each process of the tests more than a second

    (tmp_path / "train.py").write_text(SLOW)
    options = ["mcp", "--folder", str(tmp_path), "--allow", "train.py", "--write"]
    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "stepscope", *options], env=environment(), cwd=tmp_path
    )

    async def session() -> dict[str, str]:
        async with mcp.Client(server) as client:

            async def ask(tool: str, **arguments: Any) -> str:
                result = await client.call_tool(tool, arguments)
                assert not result.is_error, result.content
                text: str = result.content[0].text
                return text

            said = {"before": await ask("record", program="train.py", steps=10, name="before")}
            said["findings"] = await ask("findings", trace="before", rule="loop-in-step")
            said["shown"] = await ask("apply_diff", trace="before", rule="loop-in-step")
            assert (tmp_path / "train.py").read_text() == SLOW
            said["applied"] = await ask("apply_diff", trace="before", rule="loop-in-step", write=True)
            said["after"] = await ask("record", program="train.py", steps=10, name="after")
            said["compared"] = await ask("compare", before="before", after="after")
            return said

    said = asyncio.run(session())

    first = json.loads(said["findings"].partition("\n<<< ")[2].partition("\n")[2].rpartition("\n>>> ")[0])
    assert first["findings"][0]["rule"] == "loop-in-step"
    assert first["of"] == 1
    assert any("train.py:" in place for place in first["findings"][0]["where"]), first
    assert "Not applied, but would apply: train.py" in said["shown"]
    assert "Applied: train.py" in said["applied"]
    assert "for position" not in (tmp_path / "train.py").read_text()
    assert "loop-in-step" not in said["after"]
    assert "faster" in said["compared"].lower() or "The machine was busy" in said["compared"]
    assert "train.py:13 loss_of" in said["compared"]
