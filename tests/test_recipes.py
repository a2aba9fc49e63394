"""launch/*.toml: each loads, its arithmetic is what --plan computes, and a scaled-down copy trains alike on two ranks.

The first comment of a recipe has lines such as `# updates     9,000`, whose figures are computed here by what the line
`# plan` says.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, command, environment, rows, run

from fourscale import budget, costs, planning
from fourscale.cli import parse
from fourscale.config import TrainConfig, layered
from fourscale.flags import PrepareConfig
from fourscale.model import GPT
from fourscale.plantext import Facts
from prepare import check as check_prepare

RECIPES = sorted((ROOT / "launch").glob("*.toml"))
PUBLISHED = {"stack-100m": 100_092_672}
TOKENS = {"laptop": 4_096_000, "gpt2-124m": 2_949_120_000, "stack-100m": 2 * 10**9}
TOKENS |= {"1.3b": 20_971_520_000, "7b": 157_286_400_000}
PER_UPDATE = {"laptop": 2_048, "gpt2-124m": 327_680, "stack-100m": 262_144, "1.3b": 524_288, "7b": 786_432}
LEFT_TO_OTHERS = {"data", "val_data", "backend", "device", "ckpt_dir", "config", "grad_accum", "resume"}
CARD_GB = (16, 24, 40, 48, 80)

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)


def header(path: Path) -> dict[str, str]:
    """The labelled lines of a recipe's first comment; lines under one of them are joined to it."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if label := re.match(r"# (\S+(?: \S+)?) {2,}(?=\S)", line):
            found[label[1]] = line[label.end() :]
        elif found and line.startswith("#   "):
            found[list(found)[-1]] += " " + line.lstrip("# ")
    return found


def planned(path: Path, *more: object) -> list[str]:
    """The flags of the recipe's `# plan` line, with the recipe's own path in them."""
    words = shlex.split(header(path)["plan"])
    assert words[:4] == ["python", "train.py", "--config", f"launch/{path.name}"], words
    return ["--config", str(path), *words[4:], *map(str, more)]


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Facts]:
    monkeypatch.chdir(tmp_path)  # where no ./data says something else about the vocabulary
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def of(path: Path, *more: object) -> Facts:
        monkeypatch.setattr(sys, "argv", ["train.py", *planned(path, *more)])
        return planning.gather(layered(TrainConfig()))

    return of


def power(x: float) -> str:
    return f"{x:.3e}".replace("e+", "e")


def peak(facts: Facts, parallel: str | None = None) -> int:
    return costs.memory(facts.cfg, facts.layout(parallel or facts.cfg.parallel), facts.machine.device_type).peak


@each_recipe
def test_the_figures_in_the_comments_are_those_of_the_plan(path, facts):
    found, it = header(path), facts(path)
    plan, cfg, world = it.plan, it.cfg, it.machine.world
    model, size = cfg.model, budget.count_parameters(cfg.model).total
    last = (plan.token_budget - 1) % plan.tokens_per_update + 1
    tail = "" if last == plan.tokens_per_update else f", the last of {last:,} tokens"
    disk = costs.disk(plan)
    gib = 2**30
    exact = {
        "parameters": f"{size:,}; tokenizer of {model.vocab_size:,} ids",
        "an update": f"{plan.tokens_per_update:,} tokens = {cfg.global_bsz:,} windows x {model.ctx:,}",
        "updates": f"{plan.updates:,}{tail}",
        "tokens": f"{plan.token_budget:,} = {plan.token_budget / size:,.1f} a parameter",
        "FLOPs": f"{power(6 * size * plan.token_budget)} by 6 N D",
        "disk": f"{disk.checkpoint / gib:,.2f} GiB a checkpoint, {disk.most_bytes / gib:,.2f} GiB at the most",
        "memory": f"{peak(it) / gib:,.1f} GiB {'a GPU' if it.machine.card else 'a process'}, estimated",
    }
    assert {label: found[label][: len(text)] for label, text in exact.items()} == exact
    assert last == plan.tokens_per_update or cfg.tokens, "a run counted in updates has no tail"

    for flags, told in re.findall(r"(--local-bsz \d+(?: --act-ckpt \w+)?): ([\d.,]+) GiB", found["memory"]):
        assert told == f"{peak(facts(path, *flags.split())) / gib:,.1f}", flags
    if it.machine.card is None:
        return
    fits = re.search(r"for cards of (\d+) GB", found["memory"])
    assert int(fits[1]) == next(gb for gb in CARD_GB if peak(it) <= 0.9e9 * gb), "the smallest with a tenth to spare"
    cards = re.findall(r"([\d.,]+) on (\d+) x (RTX \d+|[A-Z]\d+)", found["hours"])
    assert cards and f"{world}" in {n for _, n, _ in cards}
    for told, n, card in cards:
        rate, _ = facts(path, "--gpu", card, "--expect-world-size", n).rate()
        assert told == f"{costs.hours(plan.token_budget, rate):,.1f}", (n, card)
    assert found["hours"].endswith(f"at an assumed MFU of {100 * cfg.expect_mfu:.0f}%")


@each_recipe
def test_the_model_has_as_many_parameters_as_the_comment_says(path, facts):
    with torch.device("meta"):
        model = GPT(facts(path).cfg.model)
    told = int(header(path)["parameters"].split(";")[0].replace(",", ""))
    assert sum(p.numel() for p in model.parameters()) == told == PUBLISHED.get(path.stem, told)


@each_recipe
def test_a_recipe_is_the_same_experiment_on_any_number_of_ranks(path, facts):
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert not LEFT_TO_OTHERS & set(table) and {"global_bsz", "local_bsz", "lr", "warmup", "dtype"} <= set(table)
    it = facts(path)
    assert it.plan.token_budget == TOKENS.get(path.stem, it.plan.token_budget)
    assert it.plan.tokens_per_update == PER_UPDATE.get(path.stem, it.plan.tokens_per_update)
    for world in (1, 2, 4, 8, it.machine.world, 16):
        there = facts(path, "--expect-world-size", world).plan
        assert there.training_table() == it.plan.training_table()
        if world <= 8 or world == it.machine.world:
            cfg = there.cfg
            assert world * cfg.local_bsz * cfg.grad_accum == cfg.global_bsz, "no empty windows"


@each_recipe
def test_what_the_comments_tell_one_to_type_exists(path, facts):
    found = header(path)
    words = shlex.split(found["data"].split(" --out ./data")[0])
    assert words[:2] == ["python", "prepare.py"]
    prepare = parse(PrepareConfig, words[2:])
    check_prepare(prepare)
    kind, _, ids = prepare.tokenizer.partition(":")
    it = facts(path)
    assert it.cfg.model.vocab_size == {"gpt2": planning.GPT2_IDS, "bpe": int(ids or 0)}[kind]
    nodes = it.machine.world // it.machine.node
    options = f"--nodes={nodes}" if it.cfg.compile else "--gpus-per-node=0 --cpus-per-task=8"  # those for CPUs don't
    line = f"sbatch {options} -J {path.stem} launch/train.sbatch --config launch/{path.name}"
    assert found["Slurm"] == (line if it.cfg.compile else f"PROCS=1 {line}")
    named = set(re.findall(r"launch/[\w.-]+", path.read_text(encoding="utf-8")))
    assert len(named) > 2 and not [name for name in named if not (ROOT / name).is_file()]


@each_recipe
def test_it_is_planned_by_the_command_that_it_names(path, tmp_path):
    done = run("train.py", *planned(path), cwd=tmp_path, timeout=60)
    assert f"  parameters           {header(path)['parameters'].split(';')[0]} = " in done.stdout
    assert "TOO " not in done.stdout.replace("TOO LITTLE for this run", "")  # of the disk that happens to be here


def test_a_key_that_is_no_flag_is_named_with_its_file(tmp_path):
    whole = RECIPES[0].read_text(encoding="utf-8")
    for text, word in ((whole + "local_bs = 8\n", "--local-bs,"), (re.sub("ctx = .*", 'ctx = "long"', whole), "--ctx")):
        recipe = tmp_path / "mine.toml"
        recipe.write_text(text, encoding="utf-8")
        done = run("train.py", "--config", recipe, code=2)
        assert done.stderr.startswith(f"error: --config {recipe}: ") and word in done.stderr
        assert done.stderr.count("\n") == 1


# ---- scaled down -----------------------------------------------------------------------------------------------------

SCALED = {"d_model": 48, "n_layers": 2, "n_heads": 6, "ctx": 32, "global_bsz": 12, "tokens": 3_000, "warmup": 2}
SCALED |= {"eval_every": 4, "eval_tokens": 1_000, "sample_tokens": 0, "ckpt_every": 0, "log_every": 20}
SCALED |= {"compile": False, "dtype": "fp32", "verify_data": "off", "async_ckpt": "off"}
TAKEN_OUT = ("steps", "d_ff", "keep_every")


def scaled(path: Path, **more: Any) -> list[str]:
    """The flags of a recipe with its sizes made small, all else as it is."""
    table = tomllib.loads(path.read_text(encoding="utf-8")) | SCALED | more
    if "n_kv_heads" in table:
        table["n_kv_heads"] = 2
    flags: list[str] = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif key not in TAKEN_OUT:
            flags += [f"--{name}", str(value)]
    return flags


@pytest.fixture(scope="module")
def trained_small(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all recipes, scaled down, in NAME.1 and NAME.2: on one rank in one micro-batch, on two ranks in three."""
    out = tmp_path_factory.mktemp("recipes")
    for world, local_bsz in ((1, 12), (2, 2)):
        cells = []
        for path in RECIPES:
            parallel = tomllib.loads(path.read_text(encoding="utf-8")).get("parallel", "ddp") if world > 1 else "ddp"
            shards = {"ddp": 1, "fsdp": world, "hsdp": 1}[parallel]  # hsdp: each rank a node of its own
            name = f"{path.stem}.{world}"
            argv = [*scaled(path, local_bsz=local_bsz, parallel=parallel), "--data", str(data)]
            cell = {"name": name, "directory": name, "argv": argv, "parallel": parallel, "shard_size": shards}
            cells.append(cell | {"dtype": "fp32", "backend": "eager"})
        listed = out / f"cells.{world}.json"
        listed.write_text(json.dumps(cells), encoding="utf-8")
        launch = command("tests/matrix.py", listed, out, nproc=world)
        done = subprocess.run(launch, capture_output=True, text=True, env=environment(), timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    yield out
    shutil.rmtree(out)


@each_recipe
def test_scaled_down_it_trains_alike_on_two_ranks(trained_small, path):
    alone, two = (rows(trained_small / f"{path.stem}.{world}") for world in (1, 2))
    assert [r["tokens"] for r in two] == [r["tokens"] for r in alone] == [*range(384, 3_000, 384), 3_000]
    for a, b in zip(alone, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5, rel=0), a["update"]
        assert b["lr"] == a["lr"]
        assert b.get("val_loss", 0) == pytest.approx(a.get("val_loss", 0), abs=5e-5, rel=0)
    held_out = [r["val_loss"] for r in alone if "val_loss" in r]
    assert len(held_out) == 2 and held_out[1] < held_out[0] and two[-1]["skipped"] == 0
    for world in (1, 2):
        told = json.loads((trained_small / f"{path.stem}.{world}" / "run.json").read_text(encoding="utf-8"))
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
        kept = {
            k: v for k, v in recipe.items() if k not in (*SCALED, *TAKEN_OUT, "local_bsz", "parallel", "n_kv_heads")
        }
        assert kept == {k: (told["config"] | told["model"])[k] for k in kept}
        assert told["config"]["parallel"] == (recipe.get("parallel", "ddp") if world == 2 else "ddp")
