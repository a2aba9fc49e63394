"""Sections of bench.py on what surrounds the updates: data, checkpoints, start-up, sampling, preparing.

Imports no torch until a section needs it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale import budget
from fourscale.cli import RunFailed, say
from fourscale.config import ModelConfig
from fourscale.measuring import (
    GPT2,
    MEDIUM,
    ROOT,
    SMALL,
    BenchConfig,
    alternate,
    flags_of,
    plain,
    random_text,
    run,
    shape,
    spread,
    table,
    train,
)

if TYPE_CHECKING:
    from fourscale.shards import TokenStream

LARGE = 100_000_000_000  # tokens of the corpus that the order is computed for
CPU, H100 = 5e11, 0.5 * 989e12  # FLOP/s of a laptop's cores, and of a GPU that is kept half busy
# Recipes: the ranks that their comments name, and how fast each computes.
RANKS = {"laptop": (1, CPU), "gpt2-124m": (1, H100), "1.3b": (8, H100), "7b": (16, H100)}
DOORS = ("train", "prepare", "eval_ppl", "eval_bench", "sample", "export_hf", "import_hf", "check", "health", "bench")
QUIET = {"eval_every": 0, "sample_tokens": 0, "verify_data": "off"}


# ---- loader ----------------------------------------------------------------------------------------------------------


def section_loader(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """What a rank's batch costs to order and to read, against the time its GPU takes for it; what real runs wait."""
    stream = random_shards(scratch / "shards", 4_000_000 if cfg.quick else 200_000_000)
    out: dict[str, Any] = {"corpus_tokens": LARGE, "shard_bytes": stream.total * 2, "recipes": {}, "runs": {}}
    rows: list[list[object]] = [["recipe", "windows", "order ms", "warm ms", "cold ms", "update ms", "warm", "cold"]]
    for name, (ranks, speed) in RANKS.items():
        recipe = tomllib.loads((ROOT / "launch" / f"{name}.toml").read_text(encoding="utf-8"))
        cell = out["recipes"][name] = one_rank(cfg, stream, recipe, ranks, speed)
        rows.append([name, cell["windows"], *(f"{cell[k]:.2f}" for k in ("order_ms", "warm_ms"))])
        rows[-1] += ["n/a" if cell["cold_ms"] is None else f"{cell['cold_ms']:.2f}", f"{cell['update_ms']:,.0f}"]
        rows[-1] += [f"{100 * cell[k]:.2f}%" if cell.get(k) else "n/a" for k in ("warm_share", "cold_share")]
    table(rows)
    say("update ms: at 0.5 TFLOP/s of a laptop, of an H100 kept half busy; a thread hides the shares of it")
    if out["recipes"]["gpt2-124m"]["cold_ms"] is None:
        say("cold: this file system keeps its pages whatever is advised, so there is no figure")
    laptop = MEDIUM | {"d_model": 320, "n_heads": 5, "vocab_size": 8192}
    for name, what in ({"small": SMALL} | ({} if cfg.quick else {"laptop": laptop})).items():
        flags = what | QUIET | {"data": random_text(scratch / name, what["vocab_size"]), "data_dtype": "uint16"}
        flags |= {"steps": 6 if cfg.quick else 200 if name == "small" else 40, "log_every": 1, "device": "cpu"}
        waits = [(r["data_ms"], r["ms"]) for r in train(scratch / f"run-{name}", flags)[2:]]
        cell = {"data_ms": statistics.median(d for d, _ in waits), "ms": statistics.median(ms for _, ms in waits)}
        out["runs"][name] = cell | {"share": sum(d for d, _ in waits) / sum(ms for _, ms in waits)}
        say(f"{name}: train.py waits {cell['data_ms']:.3f} of {cell['ms']:.1f} ms, {out['runs'][name]['share']:.2%}")
    return out


def one_rank(cfg: BenchConfig, stream: TokenStream, recipe: dict[str, Any], ranks: int, speed: float) -> dict[str, Any]:
    """One recipe: the order of a rank's rows of an update in a corpus of LARGE tokens, and their reading from
    `stream`, as train.py does both. Milliseconds are medians."""
    import numpy as np
    import torch

    from fourscale.order import Mixture

    ctx, count = recipe["ctx"], recipe["global_bsz"] // ranks
    times = 5 if cfg.quick else 40
    large = Mixture([LARGE], [Fraction(1)], ctx, 1234)
    at = np.arange(count)
    large.starts(at)
    tracemalloc.start()
    order_ms = [timed(lambda i=i: large.starts(i * recipe["global_bsz"] + at)) for i in range(times)]
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    order_ms = [timed(lambda i=i: large.starts(i * recipe["global_bsz"] + at)) for i in range(times)]
    small = Mixture([stream.total], [Fraction(1)], ctx, 1234)

    def load(i: int) -> None:
        _, starts = small.starts(i * count + at)
        tokens = torch.from_numpy(stream.windows(starts, ctx + 1)).view(-1, 1, ctx + 1)
        mask = torch.arange(ctx) >= torch.full((count, 1, 1), ctx)
        tokens[..., :-1].contiguous(), tokens[..., 1:].masked_fill(mask, -1)

    warm_up(stream)
    warm = [timed(lambda i=i: load(i)) for i in range(times)]
    cold = []
    for i in range(min(times, 10)):
        if not forget(stream):
            break
        cold.append(timed(lambda i=i: load(i)))
    model = ModelConfig(**{k: v for k, v in recipe.items() if k in ModelConfig.__dataclass_fields__})
    model = budget.size_model(model, 8192 if speed == CPU else 50_257, "cuda")  # as the recipes have it
    update_ms = 1e3 * count * ctx * budget.flops_per_token(model) / speed
    medians = {"warm": statistics.median(warm), "cold": statistics.median(cold) if cold else None}
    return {
        "ranks": ranks,
        "windows": count,
        "order_ms": statistics.median(order_ms),
        "order_least_ms": min(order_ms),
        "order_peak_bytes": peak,
        "order_kept_bytes": kept,
        "warm_ms": medians["warm"],
        "cold_ms": medians["cold"],
        "warm_tokens_per_s": round(1e3 * count * ctx / medians["warm"]),
        "update_ms": update_ms,
        **{f"{k}_share": v / update_ms for k, v in medians.items() if v is not None},
    }


def random_shards(directory: Path, tokens: int, pieces: int = 4) -> TokenStream:
    """Shards of uniform ids below 50,257, on the disk and not only in its cache."""
    import numpy as np

    from fourscale.shards import Shard, TokenStream, shard_name

    directory.mkdir()
    rng, each, shards = np.random.default_rng(0), tokens // pieces, []
    for i in range(pieces):
        path = directory / shard_name("train", i)
        with path.open("wb") as f:
            f.write(rng.integers(0, 50_257, each, dtype=np.uint16).tobytes())
            f.flush()
            os.fsync(f.fileno())
        shards.append(Shard(path, each, i * each))
    return TokenStream("train", shards, np.dtype("<u2"), 50_257, None, "")


def warm_up(stream: TokenStream) -> None:
    for shard in stream.shards:
        shard.path.read_bytes()


def forget(stream: TokenStream) -> bool:
    """Ask the system to drop the shards from its page cache; False where it keeps them, or can't be asked."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    for shard in stream.shards:
        fd = os.open(shard.path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            middle = shard.path.stat().st_size // 8192 * 4096
            if os.preadv(fd, [bytearray(512)], middle, os.RWF_NOWAIT):  # only what needs no disk
                return False
        except BlockingIOError:
            continue
        except OSError:
            return False
        finally:
            os.close(fd)
    return True


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def section_checkpoint(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """How long saves hold the loop, asynchronous against synchronous, and what they do to the updates beside them."""
    what = shape(cfg, SMALL if cfg.quick else GPT2 | {"ctx": 64, "local_bsz": 1})
    every, saves = (4, 3) if cfg.quick else (16, 4)
    flags = what | QUIET | {"data": random_text(scratch / "data", what["vocab_size"]), "data_dtype": "uint16"}
    flags |= {"steps": every * saves, "ckpt_every": every, "keep": 1, "log_every": 1, "device": "cpu"}
    seen: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}

    def side(mode: str, i: int) -> float:
        ckpt_dir = scratch / f"{mode}{i}"
        argv = [sys.executable, ROOT / "train.py", "--ckpt-dir", ckpt_dir, *flags_of(flags | {"async_ckpt": mode})]
        told = run(argv)
        rows = [json.loads(line) for line in (ckpt_dir / "metrics.jsonl").read_text().splitlines()]
        seen[mode].append(saved(rows, told, every))
        return statistics.median(seen[mode][-1]["held_s"])

    rounds = cfg.rounds or (1 if cfg.quick else 2)
    for _ in alternate(rounds, {"off": lambda i: side("off", i), "on": lambda i: side("on", i)}):
        pass
    on, off = seen["on"], seen["off"]
    sync = statistics.median(s for r in off for s in r["held_s"])
    first, later = ([s for r in on for s in r["held_s"][part]] for part in (slice(0, 1), slice(1, None)))
    out = {
        **what,
        "mib": on[0]["mib"],
        "sync_s": spread([s for r in off for s in r["held_s"]]),
        "held_first_s": spread(first),
        "held_later_s": spread(later),
        "held_first_ratio": round(statistics.median(first) / sync, 4),
        "held_later_ratio": round(statistics.median(later) / sync, 4),
        "written_mib_per_s": spread([m for r in on for m in r["mib_per_s"]], 1),
        "update_ms": spread([r["update_ms"] for r in on], 1),
        "update_beside_a_save_ms": spread([r["beside_ms"] for r in on if r["beside_ms"]] or [0.0], 1),
        "update_ratio": spread([r["beside_ms"] / r["update_ms"] for r in on if r["beside_ms"]] or [0.0]),
    }
    say(f"a checkpoint of {out['mib']:,.0f} MiB; a synchronous save holds the loop {sync:.2f} s")
    for name in ("first", "later"):
        held = out[f"held_{name}_s"]["median"]
        say(f"an asynchronous one, {name}: {held:.3f} s, {out[f'held_{name}_ratio']:.1%} of that")
    beside, ms = out["update_beside_a_save_ms"]["median"], out["update_ms"]["median"]
    rate = out["written_mib_per_s"]["median"]
    say(f"updates: {ms:.0f} ms, while {rate:,.0f} MiB/s are written and hashed beside them {beside:.0f} ms")
    return out


def saved(rows: Sequence[dict[str, Any]], told: str, every: int) -> dict[str, Any]:
    """Of a run with a row an update: held_s of each save on its way, its copy and its publishing together; updates
    beside saves and apart from them."""
    lines = re.findall(r"step (\d+) \| saved \S+ \(([\d.,]+) (MiB|GiB) in ([\d.]+) s\)", told)
    took = {int(n): float(s) for n, _, _, s in lines}
    size = float(lines[0][1].replace(",", "")) * (1024 if lines[0][2] == "GiB" else 1)
    held: dict[int, float] = {}
    for row in rows:
        if "save_s" in row:
            n = (row["update"] - 1) // every * every  # the save before this update
            held[n] = held.get(n, 0.0) + row["save_s"]
    begun = {n: rows[n - 1]["elapsed_s"] for n in held}
    beside, apart = [], []
    for row in rows[2:]:
        n = (row["update"] - 1) // every * every
        ended = begun.get(n, 0.0) + took.get(n, 0.0)
        if row["elapsed_s"] - row["ms"] / 1e3 > ended:
            apart.append(row["ms"])
        elif row["elapsed_s"] < ended:  # an update in which the save ended is neither
            beside.append(row["ms"])
    return {
        "mib": size,
        "held_s": list(held.values()),
        "mib_per_s": [size / s for n, s in took.items() if n in held and s > 0],
        "update_ms": statistics.median(apart),
        "beside_ms": statistics.median(beside) if beside else None,
    }


# ---- start-up --------------------------------------------------------------------------------------------------------


def section_startup(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Seconds until --help and a usage error, and from a command to its first update, fresh and resumed."""
    env = {"PYTHONDONTWRITEBYTECODE": ""}  # else every start compiles our modules anew
    times = cfg.rounds or (1 if cfg.quick else 5)
    out: dict[str, Any] = {"help_s": {}}
    for door in DOORS:
        seconds = [ended([ROOT / f"{door}.py", "--help"], env, 0) for _ in range(times + (not cfg.quick))]
        out["help_s"][door] = spread(seconds[-times:])
    out["usage_error_s"] = spread([ended([ROOT / "train.py", "--typo", "1"], env, 2) for _ in range(times)])
    slowest = max(out["help_s"], key=lambda door: out["help_s"][door]["median"])
    say(f"--help: at most {out['help_s'][slowest]['median']:.2f} s ({slowest}.py)")
    say(f"a usage error: {out['usage_error_s']['median']:.2f} s")
    what = SMALL | {"grad_accum": 1, "log_every": 1, "lr": 1e-3, "warmup": 1}
    data = random_text(scratch / "data", SMALL["vocab_size"], 100_000)
    flags = what | {"data": data, "data_dtype": "uint16", "device": "cpu", "sample_tokens": 0, "eval_every": 0}

    resumed: list[float] = []

    def fresh(i: int) -> float:
        rows = train(scratch / f"fresh{i}", flags | {"steps": 4, "stop_after": 2}, env=env)
        more = train(scratch / f"fresh{i}", flags | {"steps": 4, "resume": "must"}, env=env)
        resumed.append(next(r["elapsed_s"] for r in more if r["update"] == 3))
        return rows[0]["elapsed_s"]

    def plainly(i: int) -> float:
        told = what | {"updates": 4, "data": str(data / "train.bin")}
        return plain(told, scratch / "plain.json", env)["first_update_s"]

    for side in () if cfg.quick else (fresh, plainly):
        side(-1)  # writes bytecode, and brings files into memory
    resumed.clear()
    rounds = [r for _, r in alternate(times, {"plain": plainly, "fresh": fresh})]
    pairs = [r | {"resumed": seconds} for r, seconds in zip(rounds, resumed, strict=True)]
    for name in ("plain", "fresh", "resumed"):
        out[f"first_update_{name}_s"] = spread([p[name] for p in pairs])
    for name in ("fresh", "resumed"):
        out[f"{name}_ratio"] = spread([p[name] / p["plain"] for p in pairs])
        median = out[f"first_update_{name}_s"]["median"]
        say(f"first update, {name}: {median:.2f} s, {out[f'{name}_ratio']['median']:.2f} of the plain loop's")
    return out


def ended(argv: Sequence[object], env: dict[str, str], code: int) -> float:
    """Seconds that a door takes to end with `code`."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *map(str, argv)], env=os.environ | env, capture_output=True, text=True)
    if done.returncode != code:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RunFailed(f"bench.py: {Path(str(argv[0])).name} ended with {done.returncode}, not {code}: {last}")
    return time.perf_counter() - began


# ---- sampling --------------------------------------------------------------------------------------------------------


def section_sample(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Tokens per second of sample.py's decoding, with its cache and with every token computed again; and of batches."""
    import torch

    from fourscale.generate import Decoding, Text, generate
    from fourscale.model import GPT

    what = shape(cfg, SMALL if cfg.quick else MEDIUM | {"vocab_size": 8192})
    fields = {k: v for k, v in what.items() if k != "local_bsz"}
    device = torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")
    model = GPT(budget.size_model(ModelConfig(**fields), what["vocab_size"], device.type)).eval()
    model.init_weights(0)
    model.to(device)
    new = what["ctx"] - 8
    texts: dict[str, list[int]] = {}

    def cached(batch: int) -> Callable[[int], float]:
        def side(i: int) -> float:
            made = [Text([k + 1], torch.Generator()) for k in range(batch)]
            began = time.perf_counter()
            for _ in generate(model, made, new, Decoding(0.0), batch_size=batch):
                pass
            texts["cached"] = made[0].ids
            return batch * new / (time.perf_counter() - began)

        return side

    @torch.no_grad()
    def recomputed(i: int) -> float:
        ids = torch.tensor([[1]], device=device)
        began = time.perf_counter()
        for _ in range(new):
            logits = model(ids, last_only=True)[:, -1, : what["vocab_size"]]
            ids = torch.cat([ids, logits.float().argmax(-1, keepdim=True)], dim=1)
        texts["recomputed"] = ids[0].tolist()
        return new / (time.perf_counter() - began)

    sides = {"recomputed": recomputed, "1": cached(1), "16": cached(16)}
    for side in sides.values():
        side(-1)
    rounds = [r for _, r in alternate(cfg.rounds or (1 if cfg.quick else 5), sides)]
    cached(1)(0)
    if device.type == "cpu" and texts["cached"] != texts["recomputed"]:
        raise RunFailed("bench.py: the cache changed the text: the two sides do not do the same")
    out = {**what, "tokens": new, "device": device.type}
    for name, label in (("recomputed", "recomputed"), ("1", "cached"), ("16", "cached_batch_16")):
        out[f"{label}_tokens_per_s"] = spread([r[name] for r in rounds], 1)
    out["cache_ratio"] = spread([r["1"] / r["recomputed"] for r in rounds])
    out["batch_16_ratio"] = spread([r["16"] / r["1"] for r in rounds])
    say(
        f"{new} tokens: {out['cached_tokens_per_s']['median']:,.0f} tokens/s, {out['cache_ratio']['median']:.1f} times "
    )
    say(f"as fast as recomputing; sixteen texts at once {out['batch_16_ratio']['median']:.1f} times that")
    return out


# ---- preparing -------------------------------------------------------------------------------------------------------

# As nanoGPT's data/openwebtext/prepare.py has it, but that the text is at hand: datasets.map, then one memory map.
PLAIN_PREPARE = """
import sys, numpy as np, datasets
from fourscale import tokenization
source, workers, out, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
datasets.disable_progress_bars()
tokenizer = tokenization.build("gpt2", lambda: iter(()))
encoding = tokenizer._encoding
def encode(row):
    ids = encoding.encode_ordinary(row["text"])
    ids.append(tokenizer.eot_id)
    return {"ids": ids, "len": len(ids)}
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
rows = rows.map(encode, remove_columns=["text"], num_proc=workers)
total = int(np.sum(rows["len"], dtype=np.uint64))
ids = np.memmap(out, dtype=np.uint16, mode="w+", shape=(total,))
at, batches = 0, min(1024, len(rows))
for i in range(batches):
    batch = rows.shard(num_shards=batches, index=i, contiguous=True).with_format("numpy")
    part = np.concatenate(batch["ids"])
    ids[at : at + len(part)] = part
    at += len(part)
ids.flush()
print(total)
"""


def section_prepare(cfg: BenchConfig, scratch: Path) -> dict[str, Any]:
    """Tokens and text per second of prepare.py, gpt2 tokenizer, against datasets.map; whole commands, start to end."""
    corpus, size = stdlib_rows(scratch / "text.jsonl", 1 if cfg.quick else 3)
    out: dict[str, Any] = {"text_bytes": size}
    for workers in (1, 2):
        tokens: dict[str, int] = {}

        def ours(i: int, workers: int = workers, tokens: dict[str, int] = tokens) -> float:
            to = scratch / f"ours{workers}-{i}"
            argv = [ROOT / "prepare.py", "--dataset", corpus, "--workers", workers, "--out", to]
            seconds = ended(argv, {}, 0)
            splits = json.loads((to / "manifest.json").read_text())["splits"].values()
            tokens["ours"] = sum(split["tokens"] for split in splits)
            return seconds

        def theirs(i: int, workers: int = workers, tokens: dict[str, int] = tokens) -> float:
            argv = ["-c", PLAIN_PREPARE, corpus, workers, scratch / "plain.bin", scratch / f"cache{workers}-{i}"]
            seconds = ended(argv, {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, 0)
            tokens["plain"] = (scratch / "plain.bin").stat().st_size // 2
            return seconds

        rounds = [r for _, r in alternate(cfg.rounds or (1 if cfg.quick else 3), {"plain": theirs, "ours": ours})]
        if tokens["ours"] != tokens["plain"]:
            raise RunFailed(f"bench.py: prepare.py made {tokens['ours']:,} tokens, datasets.map {tokens['plain']:,}")
        cell = out[f"workers_{workers}"] = {"tokens": tokens["ours"]}
        for name in ("ours", "plain"):
            cell[f"{name}_s"] = spread([r[name] for r in rounds])
            cell[f"{name}_tokens_per_s"] = round(tokens[name] / cell[f"{name}_s"]["median"])
            cell[f"{name}_mb_per_s"] = round(size / 1e6 / cell[f"{name}_s"]["median"], 2)
        cell["ratio"] = spread([r["plain"] / r["ours"] for r in rounds])
        say(
            f"{workers} workers: {cell['ours_tokens_per_s']:,} tokens/s, {cell['ours_mb_per_s']} MB/s of text, "
            f"{cell['ratio']['median']:.2f} times datasets.map's {cell['plain_tokens_per_s']:,}"
        )
    return out


def stdlib_rows(path: Path, times: int) -> tuple[Path, int]:
    """Python's own sources as rows of JSON, `times` times over, and how many bytes of text they are."""
    size = 0
    with path.open("w", encoding="utf-8") as f:
        for i in range(times):
            for source in sorted(Path(os.__file__).parent.glob("**/*.py")):
                if "site-packages" in source.parts:
                    continue
                text = f"# {i}\n" + source.read_text(encoding="utf-8", errors="ignore")
                size += len(text.encode())
                f.write(json.dumps({"text": text}) + "\n")
    return path, size
