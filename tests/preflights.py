"""train.py --preflight and --lr-find on several ranks, healthy and broken, in one process group: for test_preflight.py.

    torchrun --nproc_per_node=2 tests/preflights.py CELLS.json OUT

CELLS.json is a list of {"name", "argv", "parallel", "shard_size", "breakage"}; OUT/NAME.json is {"code", "lines"} of
rank 0, OUT/NAME is the cell's --ckpt-dir.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from fourscale import inspection, parallel, plots
from fourscale.cli import parse
from fourscale.config import TrainConfig
from fourscale.parallel import Topology
from fourscale.shards import TokenStream


@contextlib.contextmanager
def broken(what: str | None, topology: Topology) -> Iterator[None]:
    """While it lasts, something is wrong as it may be in a fork of this code or with a machine."""
    accumulate, read = parallel.accumulate, TokenStream._read_shard

    def unsynchronised(model: nn.Module, last: bool, *rest: Any) -> contextlib.AbstractContextManager[None]:
        return accumulate(model, False, *rest)

    def damaged(self: TokenStream, *args: Any) -> Any:
        ids = read(self, *args).copy()
        ids[-1] = 60_000
        return ids

    if what == "unsynchronised":
        parallel.accumulate = unsynchronised
    if what == "damaged on rank 1" and topology.rank == 1:
        TokenStream._read_shard = damaged
    try:
        yield
    finally:
        parallel.accumulate, TokenStream._read_shard = accumulate, read


def run_cell(cell: dict[str, Any], out: Path, base: Topology) -> None:
    topology = dataclasses.replace(base, parallel=cell["parallel"], shard_size=cell["shard_size"])
    flags = parse(TrainConfig, [*cell["argv"], "--ckpt-dir", str(out / cell["name"])])
    said = io.StringIO()
    with broken(cell["breakage"], topology), contextlib.redirect_stdout(said):
        code = train.pretrain(flags, topology)
    gc.collect()  # a wrapper that goes while the next cell is in a collective would hold it up
    if topology.main:
        table = {"code": code, "lines": said.getvalue().splitlines()}
        (out / f"{cell['name']}.json").write_text(json.dumps(table), encoding="utf-8")


def main() -> None:
    cells, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    plots.plot_loss = lambda run_dir: None  # half a second a run
    inspection.FIT_S = 60.0
    topology = parallel.start(device="cpu", timeout_s=60)
    for cell in cells:
        run_cell(cell, out, topology)
    parallel.stop(topology)


if __name__ == "__main__":
    main()
