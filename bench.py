"""Every speed and memory figure that the README quotes, measured anew: ours against a plain loop, in alternation.

    python bench.py                                        # training on this machine, against the plain loop
    python bench.py --what memory,checkpoint --json out.json
    python bench.py --what train --device cuda --d-model 768 --n-layers 12 --ctx 1024 --vocab-size 50257 --local-bsz 32
    python bench.py --what all --quick                     # does everything run here? figures mean nothing

Each section starts train.py and its neighbours as users do. Timings of a busy machine mean little: look at the ratios,
and at how they spread over the rounds.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourscale import overheads, scaling
from fourscale.budget import CARDS
from fourscale.cli import RunFailed, door, parse, say
from fourscale.config import TrainConfig
from fourscale.measuring import (
    GPT2,
    MEDIUM,
    ROOT,
    SMALL,
    BenchConfig,
    alternate,
    gpu_names,
    launcher,
    plain,
    provenance,
    random_text,
    run,
    shape,
    spread,
    table,
    train,
    train_unsaved,
)


@door
def main() -> None:
    cfg = parse(BenchConfig)
    cfg.check()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it has started, and takes the scratch away
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
        plain_dtype = ("bf16" if cuda else "fp32") if cfg.dtype == "auto" else cfg.dtype
        pair = Pair(cfg, scratch, what, dtype, plain_dtype, "cuda" if cuda else "cpu")
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
    one.env, two.env = {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}
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
        self.rounds = cfg.rounds or (1 if cfg.quick else 5 if small else 2 if device == "cuda" else 3)
        self.batch = dict.fromkeys(("ours", "plain"), what["local_bsz"])
        self.ranks, self.env = cfg.ranks or 1, {}
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
        flags |= {"eval_every": 0, "ckpt_every": 0, "sample_tokens": 0, "log_every": every, "async_ckpt": "off"}
        if self.ranks == 1:
            rows = train_unsaved(self.scratch / "ours", flags, self.env)
        else:
            rows = train(self.scratch / "ours", flags, self.ranks, self.env)
            shutil.rmtree(self.scratch / "ours")
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
        """Let each side run at the size that is fastest for it, by two intervals; what doesn't fit is none."""
        whole, self.updates = self.updates, 2 * self.every
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
        self.updates = whole

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


# ---- scaling -------------------------------------------------------------------------------------------------------

COUNTED = (
    *((2, "ddp", "adamw"), (2, "fsdp", "adamw"), (2, "ddp", "muon"), (2, "fsdp", "muon")),
    *((4, "ddp", "adamw"), (4, "fsdp", "adamw"), (4, "hsdp", "adamw"), (4, "hsdp", "muon")),
)
RECIPES = {"gpt2-124m": 1, "1.3b": 8, "7b": 16}  # GPUs that they are written for


def section_scaling(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Calls and bytes of collectives in an update, counted from profiles of real runs, over what --plan says; and what
    the recipes would come to on many H100s by a model of the links.

    With --ranks, of so many alone. On CPUs unless --device says cuda; gloo's reduce-scatter, an all-reduce within,
    counts as what it stands for.
    """
    what = shape(cfg, SMALL | {"local_bsz": 2})
    flags = what | {"data": random_text(scratch / "data", what["vocab_size"]), "data_dtype": "uint16", "grad_accum": 2}
    flags |= {"device": "cuda" if cfg.device == "cuda" else "cpu", "steps": 5, "profile": 2, "eval_every": 0}
    flags |= {"sample_tokens": 0, "verify_data": "off", "compile": cfg.compile, "act_ckpt": cfg.act_ckpt}
    flags |= {} if cfg.dtype == "auto" else {"dtype": cfg.dtype}
    out: dict[str, Any] = {"counted": [], "modelled": []}
    rows: list[list[object]] = [["ranks, mode, optimizer", "calls", "sent MiB", "--plan MiB", "ratio"]]
    cells = [c for c in COUNTED if cfg.ranks in (None, c[0])] or [(cfg.ranks, m, "adamw") for m in ("ddp", "fsdp")]
    for ranks, mode, optimizer in cells[:2] if cfg.quick else cells:
        run = scratch / f"{ranks}-{mode}-{optimizer}"
        mine = {"parallel": mode, "optimizer": optimizer} | ({"shard_size": 2} if mode == "hsdp" else {})
        train(run, flags | mine, ranks)
        seen = json.loads((run / "profile" / "profile.json").read_text())
        sent, planned = (sum(seen[f"{k}_bytes"].values()) for k in ("sent", "planned"))
        cell = {"ranks": ranks, **mine, "ratio": sent / planned if planned else None}
        kept = ("calls", "small_messages_bytes", "sent_bytes", "planned_bytes")
        out["counted"].append(cell | {name: seen[name] for name in kept})
        calls = sum(n for name, n in seen["calls"].items() if not name.startswith("other"))
        rows.append([f"{ranks} {mode} {optimizer}", calls, f"{sent / 2**20:.3f}", f"{planned / 2**20:.3f}"])
        rows[-1].append(f"{cell['ratio']:.4f}" if planned else "n/a")
    table(rows)
    launch = Path(__file__).resolve().parent / "launch"
    recipes = {name: scaling.recipe(launch / f"{name}.toml", gpus) for name, gpus in RECIPES.items()}
    card, share = CARDS["H100"], TrainConfig().expect_mfu
    for name, links in (("InfiniBand", scaling.Links()), ("Ethernet", scaling.ETHERNET)):
        say(f"modelled speed over as many times one H100's, %; {name} between nodes, MFU {share:g} on one")
        say("\n".join(scaling.table(recipes, links, share * card.bf16 * 1e12, card.memory[-1])))
        for cell in scaling.figures(recipes, links, share * card.bf16 * 1e12, card.memory[-1]):
            out["modelled"].append({"network": name, **cell})
    return out


# ---- learning ------------------------------------------------------------------------------------------------------

# Rates were tuned on seed 101 of tiny Shakespeare: 3e-3, 6e-3, 1e-2, 1.5e-2; Muon's 1.5e-3, 3e-3, 6e-3, 1e-2.
GPT2_ADAMW = {"arch": "gpt2", "optimizer": "adamw", "lr": 6e-3, "warmup": 100, "steps": 2000, "eval_every": 250}
MODERN_MUON = {"arch": "modern", "qk_norm": True, "optimizer": "muon", "lr": 3e-3, "warmup": 50, "steps": 700}
MODERN_MUON |= {"eval_every": 100}


def section_learn(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """The plain recipe, GPT-2's block and AdamW, against the modern block with QK-norm and Muon: all held-out text
    scored, over the tokens and the time of updates, evaluation apart. A round is a seed of --seeds."""
    data, what = scratch / "data", shape(cfg, SMALL)
    del what["vocab_size"]  # the text's
    source = ["--dataset", cfg.text or "stdlib", "--max-tokens", "1_000_000", "--val-fraction", "0.1"]
    run([sys.executable, ROOT / "prepare.py", *source, "--tokenizer", "char", "--out", data])
    common = what | {"data": data, "device": "cuda" if cfg.device == "cuda" else "cpu", "ckpt_every": 0}
    common |= {"dtype": "fp32" if cfg.dtype == "auto" else cfg.dtype, "sample_tokens": 0, "verify_data": "off"}
    common |= {"eval_tokens": 10**9, "compile": cfg.compile, "act_ckpt": cfg.act_ckpt}
    short = {"steps": 8, "warmup": 2, "eval_every": 4} if cfg.quick else {}
    seeds = cfg.seeds[: 1 if cfg.quick else cfg.rounds]
    curves: dict[str, list[list[dict[str, float]]]] = {"ours": [], "plain": []}

    def side(name: str, recipe: dict[str, Any]) -> Callable[[int], float]:
        def learn(i: int) -> float:
            seeded = {"seed": seeds[i], "data_seed": seeds[i]}
            rows = train(scratch / f"{name}-{i}", common | recipe | short | seeded)
            spent = list(itertools.accumulate(row["ms"] / 1e3 for row in rows))
            scored = [(row, s) for row, s in zip(rows, spent, strict=True) if "val_loss" in row]
            curves[name].append([{"tokens": r["tokens"], "s": round(s, 2), "loss": r["val_loss"]} for r, s in scored])
            return scored[-1][0]["val_loss"]

        return learn

    sides = {"plain": side("plain", GPT2_ADAMW), "ours": side("ours", MODERN_MUON)}
    finals = [pair for _, pair in alternate(len(seeds), sides)]
    rows: list[list[object]] = [["seed", "plain loss", "ours", "tokens", "time", "as low at tokens", "time"]]
    ratios: dict[str, list[float]] = {"tokens": [], "time": [], "reached_tokens": [], "reached_time": []}
    for seed, pair, ours, plain_curve in zip(seeds, finals, curves["ours"], curves["plain"], strict=True):
        end, whole = ours[-1], plain_curve[-1]
        reached = next((point for point in ours if point["loss"] <= whole["loss"]), None)
        each = [end["tokens"] / whole["tokens"], end["s"] / whole["s"]]
        each += [reached["tokens"] / whole["tokens"], reached["s"] / whole["s"]] if reached else []
        for name, value in zip(ratios, each, strict=False):
            ratios[name].append(value)
        told = [f"{value:.3f}" for value in each] + ["never"] * (4 - len(each))
        rows.append([seed, f"{pair['plain']:.4f}", f"{pair['ours']:.4f}", *told])
    table(rows)
    return {
        **{f"{name}_ratio": spread(values) for name, values in ratios.items() if values},
        "seeds_as_low": len(ratios["reached_tokens"]),
        **{f"{name}_loss": spread([pair[name] for pair in finals], 4) for name in sides},
        "seeds": list(seeds),
        "recipes": {"plain": GPT2_ADAMW, "ours": MODERN_MUON},
        "curves": curves,
    }


# ---- memory --------------------------------------------------------------------------------------------------------


def section_memory(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """The most memory that updates of train.py take, over the plain loop's, both in one dtype: of the whole process on
    a CPU, of tensors on CUDA; and what a rank holds between updates under fsdp at 1, 2 and 4 ranks."""
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and bool(gpu_names()))
    what = shape(cfg, SMALL if cfg.quick else GPT2)
    data, n = random_text(scratch / "data", what["vocab_size"]), cfg.updates or 3
    same = what | {"grad_accum": cfg.grad_accum, "lr": 1e-3, "warmup": 1, "device": "cuda" if cuda else "cpu"}
    out: dict[str, Any] = {**what, "device": same["device"]}
    lines: list[list[object]] = [["dtype", "ours MiB", "plain MiB", "ratio"]]
    dtypes = (cfg.dtype,) if cfg.dtype != "auto" else ("bf16",) if cuda else ("fp32", "bf16")
    for dtype in dtypes:

        def ours(i: int, dtype: str = dtype) -> float:
            flags = {"steps": n, "data": data, "data_dtype": "uint16", "dtype": dtype, "act_ckpt": cfg.act_ckpt}
            flags |= {"eval_every": 0, "ckpt_every": 0, "sample_tokens": 0, "log_every": n, "compile": cfg.compile}
            return train_unsaved(scratch / "ours", same | flags)[-1]["peak_memory"] / 2**20

        def theirs(i: int, dtype: str = dtype) -> float:
            flags = {"updates": n, "log_every": n, "data": str(data / "train.bin"), "dtype": dtype}
            flags["compile"] = cfg.compile and cuda
            return plain(same | flags, scratch / "plain.json")["peak_bytes"] / 2**20

        rounds = [r for _, r in alternate(cfg.rounds or 1, {"plain": theirs, "ours": ours})]
        ratio = spread([r["ours"] / r["plain"] for r in rounds])
        out[dtype] = {f"{k}_mib": spread([r[k] for r in rounds], 1) for k in ("ours", "plain")} | {"ratio": ratio}
        lines.append([dtype, *(f"{out[dtype][k]['median']:,.0f}" for k in ("ours_mib", "plain_mib")), ratio["median"]])
    table(lines)
    if cuda:
        return out  # what follows is counted on CPUs, and the same there
    held, dims = {}, {k: v for k, v in what.items() if k != "local_bsz"}
    for ranks in (1, 2, 4):
        file = scratch / f"{ranks}.json"
        start = [*launcher(2)[:-1], f"--nproc_per_node={ranks}", "-m", "fourscale.statebytes"]
        run([*start, json.dumps(dims), "fsdp", file], {"PYTHONPATH": str(ROOT)})
        held[ranks] = max(json.loads(file.read_text()), key=lambda r: sum(r.values()))
    out["fsdp_bytes_a_rank"] = {str(k): v | {"ratio": sum(v.values()) / sum(held[1].values())} for k, v in held.items()}
    lines = [[k, *held[int(k)].values(), f"{v['ratio']:.4f}"] for k, v in out["fsdp_bytes_a_rank"].items()]
    table([["ranks", *held[1], "share of one"], *lines])
    return out


SECTIONS: dict[str, Callable[[BenchConfig, Path], dict[str, Any]]] = {
    "train": section_train,
    "memory": section_memory,
    "loader": overheads.section_loader,
    "checkpoint": overheads.section_checkpoint,
    "sample": overheads.section_sample,
    "prepare": overheads.section_prepare,
    "startup": overheads.section_startup,
    "scaling": section_scaling,
    "learn": section_learn,
}

if __name__ == "__main__":
    main()
