"""train.py run several times in one group of ranks, with faults put into it: test_faults.py starts it by torchrun.

    faulty.py CASES.json

CASES.json is a list of {"flags": [...], "fault": null or {"kind", "rank", "updates"}}. Each is one run through the
door; how it ended on each rank, [{"code", "out", "err"}, ...], is written to CASES.json.RANK.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from fourscale import cli, parallel, publish
from fourscale.model import GPT

FORWARD = GPT.forward


class Exited(BaseException):
    """In place of the end of the process."""


def inject(kind: str, rank: int | None, updates: list[int]) -> None:
    """Break the loss of some updates (counted from 0, of one micro-batch each) on one rank, or on all."""
    count = -1
    here = rank is None or rank == int(os.environ["RANK"])

    def forward(self: GPT, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        sums = FORWARD(self, *args, **kwargs)
        if not torch.is_grad_enabled() or args[0].numel() == 1:  # of the held-out loss; of DDP's first buckets
            return sums
        count += 1
        if not here or count not in updates:
            return sums
        if kind == "spike":
            return sums * 100
        if kind == "gradient":  # the loss stays as it is
            sums.register_hook(lambda grad: grad * math.inf)
            return sums
        return sums * math.nan

    GPT.forward = forward


def one_run(case: dict[str, Any]) -> dict[str, Any]:
    GPT.forward = FORWARD
    if case.get("fault"):
        inject(**case["fault"])
    sys.argv = ["train.py", *case["flags"]]
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in streams)
    try:
        train.main()
        code = 0
    except Exited as e:
        code = e.args[0]
    except SystemExit as e:
        code = e.code
    finally:
        texts = [s.buffer.getvalue().decode() for s in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = streams
    return {"code": code, "out": texts[0], "err": texts[1]}


def main() -> None:
    cases = Path(sys.argv[1])
    cli.SPEAKER_FIRST_S = 0.1
    # The group is joined once and outlives the runs; a directory is let go as by the end of the process.
    start, stop, run_dir = parallel.start, parallel.stop, publish.RunDir
    joined: list[parallel.Topology] = []
    directories: list[publish.RunDir] = []

    def start_once(*args: Any) -> parallel.Topology:
        if not joined:
            joined.append(start(*args))
        return joined[0]

    class Remembered(run_dir):
        def __init__(self, *args: Any):
            directories.append(self)
            super().__init__(*args)

    def raise_exited(code: int) -> None:
        raise Exited(code)

    end, os._exit = os._exit, raise_exited
    parallel.start, parallel.stop, publish.RunDir = start_once, lambda topology: None, Remembered
    results = []
    for case in json.loads(cases.read_text()):
        results.append(one_run(case))
        for directory in directories:
            directory._lock.release()
        directories.clear()
        joined[0].barrier()
    cases.with_name(f"{cases.name}.{os.environ['RANK']}").write_text(json.dumps(results))
    os._exit = end
    stop(joined[0])


if __name__ == "__main__":
    main()
