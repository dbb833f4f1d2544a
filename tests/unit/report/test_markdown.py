import dataclasses

import pytest

from stepscope.diagnosis.diagnosis import Unreadable
from stepscope.diagnosis.finding import Remedy
from stepscope.report.markdown import code, escape, markdown_report, markdown_reports
from stepscope.trace import Metadata
from tests.unit.hand_built import INPUT_BOUND, empty, full

EMPTY_MARKDOWN = """\
**No device was recorded; 0 ns recorded, without steps.**

Nothing was found that would save a noticeable part of the recording.
"""

FULL_MARKDOWN = """\
**Rank 3, device 0 (NVIDIA H100): a step takes 120.3 ms (mean of 10, annotated), over the recording idle 47.2 %, \
busy 52.8 %; biggest cause: the host was loading data (33.2 %).**

## 1. The device waits 40.0 ms a step for the DataLoader

- **Saves** 40.0 ms of 120.3 ms per step (33.2 %); the idle time with the cause input; attributed, not replayed; \
confidence high
- **Where** `/home/jane doe/project/train.py:88 main` (90.0 % of it)
- **Where** `/opt/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py:12 __next__` (10.0 % of it)
- **Change** Load batches in worker processes.
- **Rule** `input-bound`

```python
loader = DataLoader(
    dataset, num_workers=8
)
```

## 2. The profiler \\\\x1b\\[31mitself \\[bold\\]took\\[/bold\\] 3 % \\| &lt;b&gt;of&lt;/b&gt; the time &#64;all

- **Note** counted; confidence low
- **Change** Record without stacks.
- **Rule** `profiler-overhead`

2 more findings save less than 1 % of the step; --all shows them.

## Why device 0 was idle: 568.0 ms of 1.20 s

| cause | time | share | what it means |
| --- | ---: | ---: | --- |
| input | 400.0 ms | 33.2 % | the host was loading data |
| python | 166.0 ms | 13.8 % | the host was running Python code between operators; \
60.0 ms of it after cudaStreamSynchronize |
| 2 others | 2.0 ms | 0.2 % |  |

## Kernels, the costliest first

| name | total | share |
| --- | ---: | ---: |
| gemm&lt;a\\|b&gt; | 50.0 ms | 40.0 % |

## Operators, the costliest first

| name | calls | host self |
| --- | ---: | ---: |
| aten::mm | 1,000 | 50.0 ms |

showing 1 of 431 operators, --top 0 for all

## What this trace cannot answer

- Is memory fragmented? No allocations were recorded. How: profile\\_memory=True

## While reading the trace

- 1 x truncated: /home/jane doe/runs/trace.json ends early
"""


def test_the_empty_diagnosis() -> None:
    assert markdown_report(empty(), top=5) == EMPTY_MARKDOWN


def test_the_whole_report() -> None:
    assert markdown_report(full(), top=1) == FULL_MARKDOWN


def test_files_that_could_not_be_read_are_listed() -> None:
    unreadable = [Unreadable("a_b.json", "a_b.json is *empty*")]
    listed = "## 1 file could not be read, and is not in this report\n\n- a\\_b.json is \\*empty\\*.\n"
    assert markdown_reports([full()], top=1, unreadable=unreadable) == f"{FULL_MARKDOWN}\n{listed}"
    several = markdown_reports([full(), full()], top=1, unreadable=unreadable)
    assert f"the DataLoader |\n\n{listed}\n# rank 3\n" in several


def test_several_ranks_begin_with_a_table() -> None:
    report = markdown_reports([full(), empty(metadata=Metadata(rank=4), step_ns=90)], top=1)
    assert report == (
        "# stepscope: 2 ranks\n\n"
        "| rank | step | busy | idle | exposed communication | top finding |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
        "| 3 | 120.3 ms | 52.8 % | 47.2 % | 0.6 % | The device waits 40.0 ms a step for the DataLoader |\n"
        "| 4 | 90 ns |  |  |  |  |\n\n"
        f"# rank 3\n\n{FULL_MARKDOWN}\n# rank 4\n\n{EMPTY_MARKDOWN.replace('0 ns', '90 ns')}"
    )


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("aten::mm", "aten::mm"),
        ("<script>&", "&lt;script&gt;&amp;"),
        ("a|b\nc", "a\\|b\\\\nc"),
        ("[x](http://y)", "\\[x\\](http&#58;//y)"),
        ("@everyone", "&#64;everyone"),
    ],
)
def test_escape(name: str, escaped: str) -> None:
    assert escape(name) == escaped


@pytest.mark.parametrize(
    ("name", "span"), [("", ""), ("a_b", "`a_b`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("a\nb", "`a\\nb`")]
)
def test_a_span_of_code_cannot_be_left(name: str, span: str) -> None:
    assert code(name) == span


def test_a_block_of_code_cannot_be_left() -> None:
    hostile = dataclasses.replace(INPUT_BOUND, remedy=Remedy("Change it.", "a = 1\n````\n<b>\x1b[0m"))
    assert "`````python\na = 1\n````\n<b>\\x1b[0m\n`````\n" in markdown_report(full(findings=(hostile,)), top=1)
