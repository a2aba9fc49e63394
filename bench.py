"""Every speed and memory figure that the README quotes, measured anew: ours against a plain loop, in alternation.

    python bench.py                                        # training on this machine, against the plain loop
    python bench.py --what memory,checkpoint --json out.json
    python bench.py --what train --device cuda --d-model 768 --n-layers 12 --ctx 1024 --vocab-size 50257 --local-bsz 32
    python bench.py --what all --quick                     # does everything run here? figures mean nothing

Each section starts train.py and its neighbours as users do. Timings of a busy machine mean little: look at the ratios,
and at how they spread over the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourscale.cli import RunFailed, door, parse, say
from fourscale.flags import BenchConfig
from fourscale.measuring import (
    GPT2,
    MEDIUM,
    SMALL,
    alternate,
    gpu_names,
    plain,
    provenance,
    random_text,
    shape,
    spread,
    table,
    train,
)


@door
def main() -> None:
    cfg = parse(BenchConfig)
    cfg.check()
    results: dict[str, Any] = {"format": 1, **provenance(cfg), "sections": {}}
    for name in cfg.sections():
        say(f"---- {name} ----")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fourscale-bench-", dir=cfg.scratch) as scratch:
            figures = SECTIONS[name](cfg, Path(scratch))
        results["sections"][name] = figures | {"took_s": round(time.monotonic() - started, 1)}
        if cfg.json is not None:  # after each section: a later one may be interrupted
            cfg.json.write_text(json.dumps(results, indent=1) + "\n")
    if cfg.json is not None:
        say(f"figures in {cfg.json}")


# ---- training ------------------------------------------------------------------------------------------------------

RATES = ("ours_tokens_per_s", "plain_tokens_per_s")


def section_train(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Tokens per second of train.py and of the plain loop, on the same weights and data; their losses must agree.

    On a GPU without --local-bsz, each side runs at the batch of 16, 32 and 64 windows that is fastest for it.
    """
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and bool(gpu_names()))
    named = any(getattr(cfg.model, k) is not None for k in MEDIUM if k != "local_bsz")
    if cuda and not cfg.quick:
        cells = [(shape(cfg, GPT2), "bf16" if cfg.dtype == "auto" else cfg.dtype)]
    else:
        dtypes = ["fp32", "bf16"] if cfg.dtype == "auto" else [cfg.dtype]
        shapes = [SMALL] if cfg.quick else [MEDIUM] if named else [MEDIUM, SMALL]
        cells = [(shape(cfg, s), dtype) for s in shapes for dtype in dtypes]
    out: dict[str, Any] = {"cells": []}
    rows: list[list[object]] = [
        ["d, layers, ctx", "ours", "plain", "ours tok/s", "plain tok/s", "ratio", "least..most"]
    ]
    for what, dtype in cells:
        pair = Pair(cfg, scratch, what, dtype, "bf16" if cuda else "fp32", "cuda" if cuda else "cpu")
        if cuda and cfg.local_bsz is None and not cfg.quick:
            pair.find_batches((16, 32, 64))
        cell = pair.compare()
        out["cells"].append(cell)
        rates = [f"{cell[name]['median']:,.0f}" if name in cell else "" for name in RATES]
        rows.append([f"{what['d_model']}, {what['n_layers']}, {what['ctx']}", dtype, cell["plain_dtype"], *rates])
        ratio = cell.get("ratio")
        rows[-1] += [f"{ratio['median']:.3f}", f"{ratio['least']:.2f}..{ratio['most']:.2f}"] if ratio else ["", ""]
        if cell["ours_mfu"]:
            say(f"MFU {100 * cell['ours_mfu']:.1f}% of one device, by 6 N a token")
    table(rows)
    if not cuda and not named and cfg.ranks is None:
        out["two_ranks_of_one_thread"] = split(cfg, scratch)
    return out


def split(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """train.py on two ranks of one thread over one rank of two threads, for the same updates: the ratio of tokens/s."""
    one = Pair(cfg, scratch, SMALL if cfg.quick else MEDIUM, "fp32", "fp32", "cpu")
    two = Pair(cfg, scratch, SMALL if cfg.quick else MEDIUM, "fp32", "fp32", "cpu")
    two.ranks, two.batch = 2, {"ours": one.batch["ours"] // 2}
    rounds = [r for _, r in alternate(min(3, one.rounds), {"one": one.ours, "two": two.ours})]
    ratio = spread([r["two"] / r["one"] for r in rounds])
    say(f"two ranks of one thread over one of two, fp32: {ratio['median']:.3f}")
    return {"ratio": ratio, **{f"{name}_tokens_per_s": spread([r[name] for r in rounds], 1) for name in ("one", "two")}}


class Pair:
    """One shape on both sides: ours in `dtype`, the plain loop in `plain_dtype`."""

    def __init__(
        self, cfg: BenchConfig, scratch: Path, what: dict[str, int], dtype: str, plain_dtype: str, device: str
    ):
        self.cfg, self.scratch, self.what, self.device = cfg, scratch, what, device
        self.dtype, self.plain_dtype = dtype, plain_dtype
        self.data = random_text(scratch / f"data{what['vocab_size']}", what["vocab_size"])
        small = what["d_model"] < 256
        self.updates = cfg.updates or (4 if cfg.quick else 200 if small else 12)
        self.every = max(1, self.updates // 4)
        self.rounds = cfg.rounds or (1 if cfg.quick else 7 if small else 2 if device == "cuda" else 5)
        self.batch = dict.fromkeys(("ours", "plain"), what["local_bsz"])
        self.ranks = cfg.ranks or 1
        self.losses: dict[str, list[float]] = {}
        self.mfu: list[float] = []
        self.tried: dict[str, dict[int, float | None]] = {"ours": {}, "plain": {}}
        self.sides = {"ours": self.ours} if cfg.alone else {"plain": self.plain, "ours": self.ours}

    def ours(self, i: int) -> float:
        """Tokens per second of train.py."""
        cfg, every = self.cfg, self.every
        flags = self.what | {"local_bsz": self.batch["ours"], "grad_accum": cfg.grad_accum, "lr": 1e-3, "warmup": 1}
        flags |= {"steps": self.updates + every, "data": self.data, "data_dtype": "uint16", "dtype": self.dtype}
        flags |= {"device": self.device, "compile": cfg.compile, "act_ckpt": cfg.act_ckpt, "parallel": cfg.parallel}
        flags |= {"eval_every": 0, "ckpt_every": 0, "sample_tokens": 0, "log_every": every}
        rows = train(self.scratch / f"ours-{len(list(self.scratch.iterdir()))}", flags, self.ranks)
        self.losses["ours"] = [r["loss"] for r in rows]
        self.mfu += [r["mfu"] for r in rows[2 * every - 1 :] if r.get("mfu")]
        # The rows of an interval share its pace; the first interval is warm-up.
        return statistics.median(r["tokens_per_s"] for r in rows[2 * every - 1 :: every])

    def plain(self, i: int) -> float:
        """Tokens per second of the plain loop."""
        told = self.what | {"local_bsz": self.batch["plain"], "grad_accum": self.cfg.grad_accum, "lr": 1e-3}
        told |= {"updates": self.updates + self.every, "log_every": self.every, "device": self.device}
        told |= {"data": str(self.data / "train.bin"), "dtype": self.plain_dtype}
        told |= {"compile": self.cfg.compile and self.device == "cuda"}
        result = plain(told, self.scratch / "plain.json")
        self.losses["plain"] = result["losses"]
        return statistics.median(result["tokens_per_s"][2:])

    def find_batches(self, sizes: tuple[int, ...]) -> None:
        """Let each side run at the size that is fastest for it; what doesn't fit is none."""
        for name, side in self.sides.items():
            for size in sizes:
                self.batch[name] = size
                try:
                    self.tried[name][size] = round(side(0), 1)
                except RunFailed as e:
                    self.tried[name][size] = None
                    say(f"{name}, batch {size}: {e}")
            self.batch[name] = max(sizes, key=lambda size: self.tried[name][size] or 0)
            say(f"{name}: tokens/s by batch {self.tried[name]}")

    def compare(self) -> dict[str, Any]:
        """Alternate the sides; raises RunFailed where their losses differ, so that they don't train the same model."""
        self.mfu.clear()
        rounds = [r for _, r in alternate(self.rounds, self.sides)]
        apart = None
        if not self.cfg.alone and self.ranks == self.cfg.grad_accum == 1 and self.batch["ours"] == self.batch["plain"]:
            ours = dict(enumerate(self.losses["ours"], 1))
            logged = [i for i in ours if i == 1 or i % self.every == 0]
            apart = max(abs(ours[i] - loss) for i, loss in zip(logged, self.losses["plain"], strict=True))
            if apart > (0.05 if "bf16" in (self.dtype, self.plain_dtype) else 5e-3):
                raise RunFailed(
                    f"bench.py: the losses of the two loops differ by {apart:.4f} nats; one of them is wrong"
                )
        return {
            **{k: v for k, v in self.what.items() if k != "local_bsz"},
            "local_bsz": self.batch,
            "tokens_per_s_by_batch": self.tried,
            "grad_accum": self.cfg.grad_accum,
            "ranks": self.ranks,
            "device": self.device,
            "ours_dtype": self.dtype,
            "plain_dtype": self.plain_dtype,
            "compile": self.cfg.compile,
            "updates": self.updates,
            **{f"{name}_tokens_per_s": spread([r[name] for r in rounds], 1) for name in self.sides},
            **({} if self.cfg.alone else {"ratio": spread([r["ours"] / r["plain"] for r in rounds])}),
            "ours_mfu": round(statistics.median(self.mfu), 4) if self.mfu else None,
            "losses_apart": apart,
        }


SECTIONS: dict[str, Callable[[BenchConfig, Path], dict[str, Any]]] = {
    "train": section_train,
}

if __name__ == "__main__":
    main()
