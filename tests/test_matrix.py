"""The topology is not an experiment variable: whatever ranks, split, sharding and shortcuts, it is the same run.

A cell is a short run: 20 updates of 12 windows, the last one cut inside a window. Cells are chosen pairwise: any two
settings that are legal together occur together in at least one. Each is compared with the same experiment on one rank,
in one micro-batch, without any shortcut. matrix.py runs all cells of a world size in one torchrun.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL, command, environment, rows, run

from fourscale import rundir

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 4),
    "parallel": ("ddp", "fsdp", "hsdp"),
    "split": ("whole", "ragged", "many"),
    "arch": ("gpt2", "modern"),
    "dtype": ("fp32", "bf16", "fp16"),
    "act_ckpt": ("none", "block", "selective"),
    "compile": (False, True),
    "optimizer": ("adamw", "muon"),
    "sampling": ("epoch", "random"),
    "grad_sync": ("auto", "every", "last"),
    "doc_mask": (False, True),
}
EXPERIMENT = ("arch", "dtype", "optimizer", "sampling", "doc_mask")  # the other factors must not matter
ARCH = {"gpt2": (), "modern": ("--arch", "modern", "--n-kv-heads", 2, "--qk-norm", "--no-tie")}
# Windows a rank and micro-batch: all at once; with rows of weight 0, as 12 does not divide; in three or four parts.
LOCAL_BSZ = {"whole": {1: 12, 2: 6, 4: 3}, "ragged": {1: 5, 2: 5, 4: 2}, "many": {1: 3, 2: 2, 4: 1}}
# Largest difference in 20 updates of losses, in nats; of final weights, relative.
LOSS = {"fp32": 5e-5, "bf16": 2e-3, "fp16": 3e-4}
WEIGHTS = {"fp32": 2e-5, "bf16": 1e-2, "fp16": 3e-3}
# Of gradient norms, relative: the median, and the largest. A norm may react steeply to rounding in a single update:
# another split of the batch on one rank moves one of 16 bits as much as other ranks do.
NORM = {"fp32": (5e-5, 5e-5), "bf16": (2e-3, 6e-2), "fp16": (5e-4, 1e-2)}

Cell = dict[str, Any]


def legal(cell: Cell) -> bool:
    alone_in_groups = cell["ranks"] == 1 and cell["parallel"] == "hsdp"
    return not alone_in_groups and not (cell["dtype"] == "fp16" and cell["optimizer"] == "muon")


def all_cells() -> list[Cell]:
    return [c for v in itertools.product(*FACTORS.values()) if legal(c := dict(zip(FACTORS, v, strict=True)))]


def together(cell: Cell) -> set[tuple]:
    """The settings that a cell tries together: every pair, and every triple of those that deal the work out."""
    dealt = [(f, cell[f]) for f in ("ranks", "parallel", "split")]
    return {*itertools.combinations(cell.items(), 2), tuple(dealt)}


def chosen() -> list[Cell]:
    """Legal cells that try together whatever legally can be, picked greedily: few that compile, have many ranks or need
    another reference, since those take longest."""
    dice = random.Random(0)
    candidates = [(cell, together(cell)) for cell in all_cells()]
    missing = set().union(*(t for _, t in candidates))
    out: list[Cell] = []
    known: set[tuple] = set()

    def worth(candidate: tuple[Cell, set[tuple]]) -> float:
        cell, tried = candidate
        return len(tried & missing) - 3 * cell["compile"] - (cell["ranks"] == 4) - (experiment(cell) not in known)

    while missing:
        useful = [c for c in dice.sample(candidates, 150) if c[1] & missing]
        if useful:
            cell, tried = max(useful, key=worth)
            out.append(cell)
            known.add(experiment(cell))
            missing -= tried
    return out


def experiment(cell: Cell) -> tuple:
    return tuple(cell[f] for f in EXPERIMENT)


def name_of(cell: Cell) -> str:
    """'2-hsdp-many-modern-bf16-block-adamw-random-every-doc_mask': what is off goes without saying."""
    return "-".join(name if value is True else str(value) for name, value in cell.items() if value is not False)


def reference(cell: Cell) -> Cell:
    """The same experiment in the plainest way."""
    plain = {"ranks": 1, "parallel": "ddp", "split": "whole", "act_ckpt": "none", "compile": False, "grad_sync": "auto"}
    return cell | plain


CELLS = chosen()
QUICK = [c for c in CELLS if c["ranks"] == 2 and not c["compile"]][:6]
SLOW = [c for c in CELLS if c not in QUICK]

# Runs that are compared with each other, not with a reference: name -> cell, more flags, more of matrix.py's table.
APART: dict[str, tuple[Cell, tuple[Any, ...], dict[str, Any]]] = {}


def apart(ranks: int, parallel: str, name: str, *flags: Any, table: dict[str, Any] | None = None, **cell: Any) -> str:
    base = reference(CELLS[0]) | {"arch": "modern", "dtype": "fp32", "optimizer": "adamw", "doc_mask": True}
    name = f"{ranks}-{parallel}-{name}"
    APART[name] = (base | {"ranks": ranks, "parallel": parallel, "split": "many"} | cell, flags, table or {})
    return name


def stopped_and_resumed(ranks: int, parallel: str) -> tuple[str, ...]:
    """Names of four runs: two that are the same, and one in two parts."""
    first = apart(ranks, parallel, "first")
    again = apart(ranks, parallel, "again")
    begun = apart(ranks, parallel, "begun", "--stop-after", 7)
    ended = apart(ranks, parallel, "ended", "--resume", "must", table={"directory": begun})
    return first, again, begun, ended


REPEATS = {2: [stopped_and_resumed(2, "fsdp")], 4: [stopped_and_resumed(4, p) for p in ("ddp", "fsdp", "hsdp")]}
EVALUATED = [
    tuple(apart(2, p, f"eval-{n}", "--eval-every", n, "--dropout", 0.1, split="ragged") for n in (3, 0))
    for p in ("ddp", "fsdp")
]
COMPILED = [
    (
        apart(1, "ddp", "plain", split="ragged", dtype="bf16"),
        apart(2, p, "compiled", table={"backend": "inductor"}, **how),
    )
    for p, how in {"fsdp": {"compile": True, "act_ckpt": "selective", "dtype": "bf16"}}.items()
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    """Run directories of cells by name, in the order asked for; what has not been run is, a torchrun a world size."""
    work = tmp_path_factory.mktemp("matrix")
    texts = [line for name in ("argparse", "ast", "csv", "heapq", "statistics", "textwrap") for line in source(name)]
    lines = work / "lines.jsonl"  # a document a line: most windows hold several
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    flags = ("--tokenizer", "byte", "--val-fraction", 0.1, "--license", "PSF-2.0", "--out", work / "data")
    run("prepare.py", "--dataset", lines, *flags)
    by_name = {name_of(c): (c, (), {}) for cell in CELLS for c in (cell, reference(cell))} | APART

    def go(*names: str) -> list[Path]:
        todo = [name for name in dict.fromkeys(names) if not (work / f"{name}.json").exists()]
        for ranks in FACTORS["ranks"]:
            if batch := [name for name in todo if by_name[name][0]["ranks"] == ranks]:
                cells = work / "cells.json"
                cells.write_text(json.dumps([spelled(n, *by_name[n], work / "data") for n in batch]), encoding="utf-8")
                launch = command("tests/matrix.py", cells, work, nproc=ranks)
                done = subprocess.run(launch, capture_output=True, text=True, env=environment(), timeout=900)
                assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return [work / name for name in names]

    return go


def source(module: str) -> list[str]:
    text = (Path(os.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def spelled(name: str, cell: Cell, more: tuple[Any, ...], table: dict[str, Any], data: Path) -> dict[str, Any]:
    """A cell as matrix.py takes it."""
    flags = [*SMALL, "--data", data, "--eval-tokens", 640, "--verify-data", "off", "--async-ckpt", "off"]
    flags += [*ARCH[cell["arch"]], "--local-bsz", LOCAL_BSZ[cell["split"]][cell["ranks"]]]
    for factor in ("parallel", "act_ckpt", "optimizer", "sampling", "grad_sync"):
        flags += ["--" + factor.replace("_", "-"), cell[factor]]
    flags += [f"--{f.replace('_', '-')}" for f in ("compile", "doc_mask") if cell[f]]
    shards = {"ddp": 1, "fsdp": cell["ranks"], "hsdp": 2}[cell["parallel"]]
    out = {"name": name, "directory": name, "argv": [*map(str, flags), *map(str, more)], "backend": "aot_eager"}
    return out | {"parallel": cell["parallel"], "shard_size": shards, "dtype": cell["dtype"]} | table


def told(run_dir: Path) -> list[dict[str, Any]]:
    """What each rank wrote down."""
    return json.loads(run_dir.with_name(f"{run_dir.name}.json").read_text(encoding="utf-8"))


def read(run_dir: Path) -> list[list[list[int]]]:
    """Of each update what all ranks read together, sorted: part, first token and supervised tokens of each window."""
    return [sorted(itertools.chain(*update)) for update in zip(*(rank["read"] for rank in told(run_dir)), strict=True)]


def weights(run_dir: Path) -> torch.Tensor:
    model = rundir.load_model(rundir.open_checkpoint(run_dir / "step_20"), torch.device("cpu"))
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "DONE.json").read_text(encoding="utf-8"))["digest"]


def assert_same_run(run_dir: Path, plain: Path, dtype: str) -> None:
    assert read(run_dir) == read(plain)
    assert {r["weights"] for r in told(run_dir)} == {r["weights"] for r in told(plain)}  # the first ones, to the bit
    ours, theirs = rows(run_dir), rows(plain)
    assert [r["tokens"] for r in ours] == [r["tokens"] for r in theirs] == [*range(384, 7_400, 384), 7_400]
    assert ours[-1]["skipped"] == 0
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=LOSS[dtype], rel=0), a["update"]
        assert ("val_loss" in a) == ("val_loss" in b) == (a["update"] in (10, 20))
        if "val_loss" in a:
            assert a["val_loss"] == pytest.approx(b["val_loss"], abs=LOSS[dtype], rel=0)
    norms = [abs(a["preclip_norm"] / b["preclip_norm"] - 1) for a, b in zip(ours, theirs, strict=True)]
    assert statistics.median(norms) < NORM[dtype][0] and max(norms) < NORM[dtype][1], norms
    a, b = weights(run_dir), weights(plain)
    assert (a - b).norm() / b.norm() < WEIGHTS[dtype]


def test_whatever_is_legal_together_is_tried_together():
    assert set().union(*map(together, CELLS)) == set().union(*map(together, all_cells()))
    assert len(set(map(name_of, CELLS))) == len(CELLS)


def test_a_reference_reads_each_sample_of_an_update_once(ran):
    for plain in ran(*{name_of(reference(c)) for c in QUICK}):
        updates = read(plain)
        assert [sum(n for _, _, n in update) for update in updates] == [384] * 19 + [104]
        assert all(len({start for _, start, _ in update}) == len(update) for update in updates)


@pytest.fixture(scope="module")
def quick(ran) -> Callable[..., list[Path]]:
    ran(*(name_of(c) for cell in QUICK for c in (reference(cell), cell)), *REPEATS[2][0], *EVALUATED[0])
    return ran


@pytest.fixture(scope="module")
def slow(ran) -> Callable[..., list[Path]]:
    more = itertools.chain(*REPEATS[4], *EVALUATED[1:], *COMPILED)
    ran(*(name_of(c) for cell in SLOW for c in (reference(cell), cell)), *more)
    return ran


@pytest.mark.parametrize("cell", QUICK, ids=name_of)
def test_the_topology_does_not_matter(quick, cell):
    assert_same_run(*quick(name_of(cell), name_of(reference(cell))), cell["dtype"])


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=name_of)
def test_nor_do_more_ranks_and_a_compiler(slow, cell):
    run_dir, plain = slow(name_of(cell), name_of(reference(cell)))
    assert all(rank["compiled"] == cell["compile"] for rank in told(run_dir))
    assert_same_run(run_dir, plain, cell["dtype"])


@pytest.mark.slow
def test_real_machine_code_agrees_too_and_is_made_once(slow):
    for names in COMPILED:
        plain, compiled = slow(*names)
        assert all(rank["compiled"] for rank in told(compiled))
        assert_same_run(compiled, plain, "bf16")


def check_repeats(ran: Callable[..., list[Path]], names: tuple[str, ...]) -> None:
    first, again, begun, ended = ran(*names)
    assert digest(first) == digest(again) == digest(begun)  # the directory that was begun is the one that was ended
    assert [r["loss"] for r in rows(begun)] == [r["loss"] for r in rows(first)]
    assert read(begun) + read(ended) == read(first)


def test_a_topology_repeats_itself_to_the_bit_also_across_a_resume(quick):
    for names in REPEATS[2]:
        check_repeats(quick, names)


@pytest.mark.slow
@pytest.mark.parametrize("names", REPEATS[4], ids=lambda names: names[0])
def test_so_does_one_of_four_ranks(slow, names):
    check_repeats(slow, names)


def check_evaluation(ran: Callable[..., list[Path]], names: tuple[str, ...]) -> None:
    often, never = ran(*names)
    assert digest(often) == digest(never)
    assert [r["loss"] for r in rows(often)] == [r["loss"] for r in rows(never)]
    assert sum("val_loss" in r for r in rows(often)) == 7 and not any("val_loss" in r for r in rows(never))


def test_evaluation_changes_nothing(quick):
    check_evaluation(quick, EVALUATED[0])


@pytest.mark.slow
def test_nor_does_it_where_weights_are_sharded(slow):
    for names in EVALUATED[1:]:
        check_evaluation(slow, names)
