"""train.py --plan: what it prints, what it refuses, and that its memory and wire are what is really used."""

import json
import re
import resource
import shlex
import subprocess
import sys

import memory
import pytest
import torch
from conftest import ROOT, SMALL, environment, one_error, run

from fourscale import costs, planning
from fourscale.cli import InputError
from fourscale.config import TrainConfig, layered
from fourscale.parallel import Topology

DAY = "2025-11-30"


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """The lines that --plan prints for flags, in a directory without data."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def lines(*args: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, args), "--plan"])
        planning.show(layered(TrainConfig()))
        return capsys.readouterr().out.splitlines()

    return lines


def value(lines: list[str], label: str, pattern: str) -> str:
    """The first group of `pattern` in the row that `label` begins."""
    row = next(line for line in lines if line.strip().startswith(label))
    match = re.search(pattern, row)
    assert match, row
    return match[1]


# ---- figures that people know by heart, as the command prints them ---------------------------------------------------


def test_hours_and_money_at_a_rate(plan):
    lines = plan("--gpu", "A100", "--tokens", "2e9", "--expect-tokens-per-s", 24_000, "--price", f"1.10@{DAY}")
    assert value(lines, "training", r"([\d.]+) h") == "23.148"
    assert value(lines, "training", r"= ([\d.]+)$") == "25.46"
    assert value(lines, "price", r"1\.10 a device-hour on (\S+), [\d,]+ days ago") == DAY
    assert "by --expect-tokens-per-s; --measure 20 measures it" in "\n".join(lines)


@pytest.mark.parametrize("tflops, share, hours", [(312, 0.4, 5.0), (165, 0.35, 10.7)])
def test_hours_at_a_share_of_the_peak(plan, tflops, share, hours):
    lines = plan("--tokens", "3e9", "--peak-tflops", tflops, "--expect-mfu", share)
    assert float(value(lines, "training", r"([\d.]+) h")) == pytest.approx(hours, abs=0.1)
    assert value(lines, "parameters", r"([\d,]+)") == "124,475,904"


def test_utilisation_of_a_known_rate(plan):
    large = ("--d-model", 2048, "--n-layers", 24, "--n-heads", 16, "--gpu", "A100", "--expect-world-size", 8)
    lines = plan(*large, "--expect-tokens-per-s", 140_000)
    size = int(value(lines, "parameters", r"([\d,]+)").replace(",", ""))
    assert size == pytest.approx(1.3e9, rel=0.02)
    assert float(value(lines, "rate", r"MFU ([\d.]+)%")) == pytest.approx(44, abs=0.5)
    lines = plan("--gpu", "A100", "--expect-tokens-per-s", 170_000)
    assert float(value(lines, "rate", r"MFU ([\d.]+)%")) == pytest.approx(40.5, abs=0.3)


def test_a_rate_above_the_peak_is_said_to_be_one(plan):
    lines = plan("--gpu", "T4", "--dtype", "fp16", "--expect-tokens-per-s", "1e6")
    assert "MORE THAN THERE IS" in next(line for line in lines if line.strip().startswith("rate"))


def test_updates_and_compute_of_larger_models(plan):
    lines = plan("--gpu", "H100", "--global-bsz", 256, "--tokens", "2e9")
    assert value(lines, "an update", r"([\d,]+) tokens") == "262,144"
    assert value(lines, "updates", r"(7,630, the last of 103,424 tokens)")
    rows = [line.split() for line in lines if "x parameters" in line]
    assert [(row[0], row[5], row[7]) for row in rows] == [
        ("1", "7,630", "1"),
        ("3", "22,889", "9"),
        ("10", "76,294", "100"),
    ]


def test_recomputation_is_shown_and_mfu_is_untouched_by_it(plan):
    args = ("--gpu", "A100", "--tokens", "2e9", "--expect-tokens-per-s", 170_000)
    plain, block = plan(*args), plan(*args, "--act-ckpt", "block")
    six, eight = (float(value(block, label, r"(\d\.\d+e\d+)")) for label in ("6 N D", "8 N D"))
    assert eight / six == pytest.approx(8 / 6, rel=1e-3)
    assert "this run computes these" in value(block, "8 N D", "(.*)")
    assert "this run computes these" not in value(plain, "8 N D", "(.*)")
    assert value(plain, "rate", r"MFU ([\d.]+)%") == value(block, "rate", r"MFU ([\d.]+)%")


# ---- what it knows, assumes and refuses ------------------------------------------------------------------------------


def test_without_data_it_says_what_it_assumes(plan):
    text = "\n".join(plan("--gpu", "H100"))
    assert "gpt2's 50,257 ids, since ./data isn't here" in text
    assert "ranks: 1, since neither" in text
    assert "sized to cuda" in text
    text = "\n".join(plan("--backend", "gloo", "--vocab-size", 1000))
    assert "a vocabulary of 1,000 by --vocab-size" in text
    assert "unknown; what gives them" in text


def test_with_data_it_knows_vocabulary_and_epochs(plan, data):
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    lines = plan("--data", data, *SMALL)
    assert value(lines, "embedding", r"for (\S+) ids") == "257"
    assert value(lines, "data", r"([\d,]+) training") == f"{tokens:,}"
    assert value(lines, "data", r"read ([\d.]+) times") == f"{7400 / tokens:.2f}"
    assert "isn't here" not in "\n".join(lines)


def test_of_a_mixture_it_says_how_often_each_is_read(plan, data, tmp_path):
    for i in range(3):
        (tmp_path / f"b{i}.txt").write_text("".join(f"line {j} of text {i}\n" for j in range(400)))
    run("prepare.py", "--dataset", tmp_path / "b*.txt", "--tokenizer", "byte", "--val-docs", 1, "--out", tmp_path / "b")
    found = [json.loads((d / "manifest.json").read_text())["splits"]["train"]["tokens"] for d in (data, tmp_path / "b")]
    lines = plan("--data", f"{data}:0.9", "--data", f"{tmp_path / 'b'}:0.1", *SMALL)
    rows = [line for line in lines if "training tokens" in line]
    assert [re.search(r"read ([\d.]+) times", row)[1] for row in rows] == [
        f"{share * 7400 / tokens:.2f}" for share, tokens in zip((0.9, 0.1), found, strict=True)
    ]


def test_another_card_is_not_measured_here(data):
    cpu = Topology(0, 1, torch.device("cpu"), "fp32", "ddp", 1, None, None, None)
    with pytest.raises(InputError, match="--gpu H100: --measure measures what is here, cpu"):
        planning.gather(TrainConfig(data=(str(data),), gpu="H100", plan=True, measure=3), cpu)


def test_a_recipe_file_is_planned_as_it_is(plan, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('parallel = "fsdp"\nctx = 4096\nlocal_bsz = 4\ngrad_accum = 3\nexpect_world_size = 16\n')
    lines = plan("--config", recipe, "--gpu", "H100")
    assert value(lines, "an update", r"([\d,]+) tokens = 16 ranks x 4 windows x 3 micro-batches") == "786,432"
    assert lines[0].endswith("16 x H100, fsdp, bf16")
    assert lines[-1].endswith(f"train.py --config {recipe} --resume auto")


@pytest.mark.parametrize(
    "argv, launch",
    [
        (
            "--data ./data --parallel ddp --backend gloo --ctx 256 --local-bsz 8 --grad-accum 1 --steps 2000",
            "python train.py",
        ),
        (
            "--data ./data --parallel fsdp --ctx 1024 --local-bsz 16 --grad-accum 4 --lr 3e-4 --expect-world-size 8",
            "torchrun --nproc_per_node=8 train.py",
        ),
        (
            "--parallel hsdp --ctx 4096 --local-bsz 4 --price 2.5@2025-11-30 --expect-world-size 16",
            "torchrun --nnodes=2 --node_rank=$RANK --nproc_per_node=8 --rdzv_endpoint=$HEAD:29500 train.py",
        ),
    ],
)
def test_the_last_line_starts_the_run(plan, argv, launch):
    device = () if "gloo" in argv else ("--gpu=H100", "--expect_mfu", 0.3)
    assert plan(*argv.split(), *device)[-1] == f"{launch} {argv} --resume auto"


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--steps 5 --tokens 5", "--steps and --tokens both"),
        ("--warmup 50 --steps 20", "--warmup 50: must be below the 20 updates"),
        ("--min-lr 1 --lr 0.1", "--min-lr 1: must lie between"),
        ("--shard-size 2 --expect-world-size 4", "--shard-size 2: goes with --parallel hsdp"),
        ("--parallel hsdp --shard-size 3 --expect-world-size 8", "--shard-size 3: 8 ranks are not a multiple"),
        ("--optimizer muon --dtype fp16", "--dtype fp16: .*adamw"),
        ("--muon-dtype bf16", "--muon-dtype bf16: .*--optimizer muon"),
        ("--d-model 100 --n-heads 3", "--n-heads 3 does not divide"),
        ("--gpu H100 --device cpu", "--gpu H100 and --device cpu: .*leave one out"),
        ("--gpu H100 --device mps", "--gpu H100 and --device mps: .*leave one out"),
        ("--gpu A1000", "--gpu A1000: not in the table of cards; nearest are .*A100"),
        ("--price 2.5", "--price 2.5: prices age"),
        ("--expect-world-size 0", "--expect-world-size 0: must be at least 1"),
        ("--resume must --ckpt-dir new", "--resume must: no complete checkpoint in new"),
        ("--measure 3 --preflight", "--plan and --preflight"),
    ],
)
def test_what_a_run_would_refuse_the_plan_refuses(plan, argv, words):
    with pytest.raises(InputError, match=words) as e:
        plan(*argv.split())
    assert "\n" not in str(e.value)


def test_what_crosses_between_nodes_is_told_of_all_three(plan, monkeypatch):
    lines = plan("--gpu", "H100", "--parallel", "hsdp", "--expect-world-size", 16)
    at = next(i for i, line in enumerate(lines) if line.startswith("Sent by a node of 8 ranks to others (MiB)"))
    rows = [line.split() for line in lines[at : at + 6]]
    assert rows[0][-3:] == ["ddp", "fsdp", "hsdp*"]
    ddp, fsdp, hsdp = (float(cell) for cell in rows[4][-3:])
    assert ddp == pytest.approx(fsdp) and hsdp == pytest.approx(ddp * 8 / 15, rel=1e-3)
    assert rows[5][:4] == ["seconds", "an", "update", "at"] and float(rows[5][-1]) == pytest.approx(
        8 * hsdp * 2**20 / 1e10, rel=0.01
    )
    small = ("--backend", "gloo", "--d-model", 128, "--expect-world-size", 4)
    text = "\n".join(plan(*small, "--parallel", "hsdp", "--shard-size", 2))
    assert "Sent by a node of 2 ranks" in text and "nodes of 2 ranks, by --shard-size" in text
    assert "gloo scatters gradients by an all-reduce" in text
    assert "Sent by a node" not in "\n".join(plan(*small))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "Sent by a node of 1 rank to others" in "\n".join(plan(*small))


def test_a_branch_is_planned_from_where_it_begins(plan, trained):
    parent = trained()
    rows = costs.METRICS_ROW_BYTES * 20
    assert (parent / "metrics.jsonl").stat().st_size == pytest.approx(rows, rel=0.25)
    lines = plan("--branch-from", parent, "--tokens", 10_000, "--ckpt-dir", "./b", "--expect-tokens-per-s", 10)
    assert value(lines, "done already", r"([\d,]+ updates, [\d,]+ tokens)") == "20 updates, 7,400 tokens"
    assert float(value(lines, "training", r"([\d.]+) h")) == pytest.approx(2_600 / 10 / 3600, abs=1e-3)
    assert value(lines, "parameters", r"([\d,]+)") == value(
        plan(*SMALL, "--vocab-size", 257), "parameters", r"([\d,]+)"
    )


def test_another_recipe_laid_over_a_run_is_another_experiment(plan, trained):
    run_dir, recipe = trained(), ROOT / "launch" / "laptop.toml"
    with pytest.raises(InputError, match=r"another experiment \(.*d_model: was 32, now 320.*another --ckpt-dir") as e:
        plan("--config", recipe, "--ckpt-dir", run_dir, "--resume", "auto")
    assert "\n" not in str(e.value)
    assert plan("--ckpt-dir", run_dir, "--resume", "auto", "--d-model", 32)


# ---- as a process ----------------------------------------------------------------------------------------------------

BLOCKED = """import runpy, sys
class Blocked:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise ImportError("torch was imported")
sys.meta_path.insert(0, Blocked)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def test_it_takes_no_torch_and_no_time(tmp_path, data):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    args = (
        "train.py",
        "--plan",
        "--data",
        str(data),
        "--gpu",
        "H100",
        "--expect-world-size",
        "64",
        "--parallel",
        "fsdp",
    )
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *args], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Memory a rank (GiB" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # the clock of a busy machine lies


def test_ranks_print_it_once(tmp_path):
    done = run("train.py", "--plan", "--gpu", "H100", nproc=2, cwd=tmp_path)
    assert done.stdout.count("plan | gpt2") == 1
    assert "2 x H100, ddp" in done.stdout
    assert done.stdout.rstrip().endswith("torchrun --nproc_per_node=2 train.py --resume auto")
    assert list(tmp_path.iterdir()) == []


def test_a_users_mistake_is_one_line(tmp_path):
    done = run("train.py", "--plan", "--gpu", "H1000", code=2, cwd=tmp_path)
    assert "--gpu H1000" in one_error(done)


def test_measured_it_replaces_what_it_assumed(tmp_path, data):
    done = run("train.py", "--plan", "--measure", 4, "--data", data, *SMALL, "--price", f"3@{DAY}", cwd=tmp_path)
    lines = done.stdout.splitlines()
    rate = float(value(lines, "rate", r"([\d,]+) tok/s").replace(",", ""))
    assert rate > 0
    assert "(measured here over 3 updates)" in value(lines, "rate", "(.*)")
    hours = float(value(lines, "training", r"([\d.]+) h"))
    assert hours == pytest.approx(7_400 / rate / 3600, abs=1e-3)
    known = next(line for line in lines if line.startswith("  measured    "))
    for what in ("the rate (3 updates here", "a checkpoint's size", "a held-out loss", "a save", "peak memory"):
        assert what in known
    assert re.search(r"a checkpoint .*; measured here [\d.]+ MiB", done.stdout)
    assert "assumed" not in done.stdout
    assert lines[-1] == shlex.join(
        ["python", "train.py", "--data", str(data), *map(str, SMALL), "--price", f"3@{DAY}", "--resume", "auto"]
    )
    assert list(tmp_path.iterdir()) == []  # nothing is left


# ---- memory and wire, as they really are -----------------------------------------------------------------------------


def compare(cell: dict, off: float) -> None:
    found, want = cell["found"], cell["want"]
    for name in ("weights", "gradients", "optimizer"):
        assert found[name] == want[name], (cell["flags"], name)  # to the byte
    if "peak" in found:
        assert want["peak"] == pytest.approx(found["peak"], rel=off), cell["flags"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--dtype bf16",
        "--act-ckpt selective --dtype bf16",
        "--act-ckpt block",
        "--arch modern --n-kv-heads 2 --qk-norm --dtype bf16",
        "--arch modern --act-ckpt block --optimizer muon",
        "--dropout 0.1 --act-ckpt selective",
        "--vocab-size 300 --d-model 192 --n-layers 5 --no-tie",
        "--doc-mask --eot-id 3",
        "--vocab-size 20011 --local-bsz 32",  # logits in chunks
        "--vocab-size 20011 --local-bsz 32 --dtype bf16 --no-tie --arch modern",
    ],
)
def test_memory_of_one_rank(flags):
    compare(memory.cell(flags.split()), 0.03)


def test_memory_and_wire_of_two_ranks():
    cells = [
        "--parallel fsdp",
        "--parallel fsdp --dtype bf16 --act-ckpt block",
        "--parallel fsdp --arch modern --optimizer muon --d-ff 95",  # an odd number of rows on two ranks
        "--parallel fsdp --grad-accum 3 --grad-sync last",
        "--parallel hsdp --shard-size 1 --grad-accum 2",
        "--parallel ddp --grad-accum 2",
        "--parallel ddp --grad-accum 2 --grad-sync every",
    ]
    done = run("tests/memory.py", *cells, nproc=2)
    found = {" ".join(cell["flags"]): cell for cell in map(json.loads, re.findall(r"^\{.*\}$", done.stdout, re.M))}
    assert list(found) == cells
    for flags, cell in found.items():
        compare(cell, 0.06)
        if "muon" not in flags and "ddp" not in flags:  # whose collectives the program can't count
            assert cell["found"]["sent"] == cell["want"]["sent"], flags
    # What micro-batches add up lies beside DDP's buckets, unless each is exchanged.
    for flags, beside in (
        ("--parallel ddp --grad-accum 2", True),
        ("--parallel ddp --grad-accum 2 --grad-sync every", False),
    ):
        assert found[flags]["found"]["moved"] == beside == bool(found[flags]["want"]["accumulated"])
