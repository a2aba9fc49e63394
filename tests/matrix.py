"""Many short runs of train.py's loop in one torchrun: the cells of test_matrix.py of one world size.

    torchrun --nproc_per_node=N tests/matrix.py CELLS.json OUT

CELLS.json is a list of {"name", "directory", "argv", "parallel", "shard_size", "dtype", "backend"}, the last of
torch.compile. A cell trains in OUT/DIRECTORY, and OUT/NAME.json says of each rank what it read in each update, and a
hash of the weights that the run began with.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from fourscale import corpus, order, parallel, plots
from fourscale.cli import parse
from fourscale.config import TrainConfig
from fourscale.parallel import Topology


def digest(model: nn.Module) -> str:
    """One hash of all weights, the same however they are sharded. Collective."""
    out = hashlib.sha256()
    for name, p in model.named_parameters():
        full: Tensor = p.full_tensor() if isinstance(p, DTensor) else p
        out.update(name.removeprefix("module.").encode() + full.detach().cpu().contiguous().numpy().tobytes())
    return out.hexdigest()


@contextmanager
def recorded(into: dict[str, Any]) -> Iterator[None]:
    """Write down what a run does, and let it compile nothing once it is warm."""
    windows, supervised, build, warm_up = corpus.Corpus.windows, order.supervised, parallel.build, parallel.warm_up
    lengths: list[int] = []

    def count(*args: Any) -> np.ndarray:
        lengths[:] = (result := supervised(*args)).tolist()
        return result

    def read(self: corpus.Corpus, parts: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        weighed = [row for row in zip(parts.tolist(), starts.tolist(), lengths, strict=True) if row[2]]
        into["read"].append(weighed)  # of one update: part, first token, supervised tokens
        return windows(self, parts, starts, length)

    def built(*args: Any) -> nn.Module:
        wrapped = build(*args)
        into["weights"] = digest(wrapped)
        return wrapped

    def warmed(*args: Any) -> float:
        seconds = warm_up(*args)
        into["compiled"] = True
        torch.compiler.set_stance("fail_on_recompile")
        return seconds

    into |= {"read": [], "compiled": False}
    corpus.Corpus.windows, order.supervised, parallel.build, parallel.warm_up = read, count, built, warmed
    try:
        yield
    finally:
        corpus.Corpus.windows, order.supervised, parallel.build, parallel.warm_up = windows, supervised, build, warm_up
        torch.compiler.set_stance("default")


def run_cell(cell: dict[str, Any], out: Path, base: Topology) -> None:
    topology = dataclasses.replace(base, **{k: cell[k] for k in ("parallel", "shard_size", "dtype")})
    flags = parse(TrainConfig, [*cell["argv"], "--ckpt-dir", str(out / cell["directory"])])
    told: dict[str, Any] = {}
    with recorded(told):
        train.pretrain(flags, topology)
    gc.collect()  # a wrapper that goes while the next cell is in a collective would hold it up
    ranks = topology.gather(told)
    if topology.main:
        (out / f"{cell['name']}.json").write_text(json.dumps(ranks), encoding="utf-8")


def main() -> None:
    cells, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    plots.plot_loss = lambda run_dir: None  # half a second a cell
    compiler = torch.compile
    topology = parallel.start(device="cpu", timeout_s=60)
    for cell in cells:
        backend = cell["backend"]
        torch.compile = lambda f, backend=backend, **options: compiler(f, backend=backend, **options)
        run_cell(cell, out, topology)
    parallel.stop(topology)


if __name__ == "__main__":
    main()
