"""train.py as real processes: one curve on every topology, exact resume, exact tail, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, command, environment, one_error, rows, run

from fourscale import checkpoint
from fourscale.rundir import load_model, open_checkpoint, step_dirs

# name -> (flags, processes). 12 windows an update, dealt out in every way; the last two with padding rows of weight 0.
TOPOLOGIES = {
    "plain": (("--local-bsz", 12), None),
    "ddp1x4": (("--local-bsz", 3), 1),
    "ddp2": (("--local-bsz", 6), 2),
    "ddp2x2": (("--local-bsz", 3), 2),
    "fsdp1": (("--local-bsz", 12, "--parallel", "fsdp"), 1),
    "fsdp2": (("--local-bsz", 3, "--parallel", "fsdp"), 2),
    "padded5": (("--local-bsz", 5), None),
    "padded2x5": (("--local-bsz", 5, "--parallel", "fsdp"), 2),
}


def launch(trained, name: str, *extra: object) -> Path:
    flags, nproc = TOPOLOGIES[name]
    return trained(*flags, *extra, nproc=nproc)


def weights(run_dir: Path) -> dict:
    return load_model(open_checkpoint(run_dir)).state_dict()


def files(run_dir: Path, update: int) -> dict:
    """sha256 of each tensor file of a checkpoint: equality of bits."""
    table = json.loads((run_dir / f"step_{update}" / "step.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in table.items() if name != ".metadata"}


def children_of(process: subprocess.Popen) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def resumable(data, tmp_path_factory):
    """A run on 2 FSDP ranks, stopped by --stop-after 7 of 20; copied by those who go on."""
    out = tmp_path_factory.mktemp("stopped") / "ckpt"
    flags, nproc = TOPOLOGIES["fsdp2"]
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *flags, "--stop-after", 7, nproc=nproc)
    return out


def go_on(source: Path, target: Path, data: Path, name: str, *extra: object, **kwargs: object):
    shutil.copytree(source, target)
    flags, nproc = TOPOLOGIES[name]
    return run("train.py", "--data", data, "--ckpt-dir", target, *SMALL, *flags, *extra, nproc=nproc, **kwargs)


@pytest.mark.parametrize("name", [n for n in TOPOLOGIES if n != "plain"])
def test_every_topology_computes_the_same_updates(trained, name):
    reference, other = rows(launch(trained, "plain")), rows(launch(trained, name))
    assert [r["tokens"] for r in other] == [r["tokens"] for r in reference]
    for a, b in zip(reference, other, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)
        assert b["preclip_norm"] == pytest.approx(a["preclip_norm"], abs=2e-4)
        assert ("val_loss" in a) == ("val_loss" in b)
        assert b.get("val_loss", 0) == pytest.approx(a.get("val_loss", 0), abs=5e-5)
    assert reference[-1]["loss"] < reference[0]["loss"] - 0.5  # and something was learned


# What is compared on two topologies -> the tolerance of each loss over the 20 updates.
VARIANTS = {
    "modern": (("--arch", "modern", "--n-kv-heads", 2, "--qk-norm", "--no-tie"), 5e-5),
    "bf16": (("--dtype", "bf16"), 2e-3),
    "muon": (("--optimizer", "muon", "--arch", "modern"), 5e-5),
    "random": (("--sampling", "random", "--schedule", "wsd"), 5e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_between_topologies(trained, variant):
    flags, tolerance = VARIANTS[variant]
    tables = [rows(launch(trained, name, *flags)) for name in ("padded5", "ddp2", "fsdp2")]
    for first, *others in zip(*tables, strict=True):
        for other in others:
            assert other["loss"] == pytest.approx(first["loss"], abs=tolerance)
    assert tables[0][-1]["loss"] < tables[0][0]["loss"] - 0.5


@pytest.mark.slow
def test_muon_resumes_on_another_topology(trained, data, tmp_path):
    variant, _ = VARIANTS["muon"]
    out = tmp_path / "ckpt"
    common = ("--data", data, "--ckpt-dir", out, *SMALL, *variant)
    run("train.py", *common, *TOPOLOGIES["fsdp2"][0], "--stop-after", 10, nproc=2)
    run("train.py", *common, *TOPOLOGIES["padded5"][0], "--resume", "auto")
    for a, b in zip(rows(launch(trained, "fsdp2", *variant)), rows(out), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)


def test_the_tail_is_masked_to_the_exact_budget(trained):
    for name in ("plain", "fsdp2", "padded2x5"):
        out = launch(trained, name)
        table = rows(out)
        assert [r["update"] for r in table] == list(range(1, 21))
        assert [r["tokens"] for r in table[:-1]] == [384 * i for i in range(1, 20)]
        assert table[-1]["tokens"] == 7_400  # 104 of 384 in the last update: three windows and 8 tokens
        assert json.loads((out / "DONE.json").read_text())["tokens"] == 7_400


def test_a_finished_run_leaves_its_receipts(trained):
    out = launch(trained, "fsdp2")
    receipt = json.loads((out / "DONE.json").read_text())
    assert receipt["updates"] == receipt["update"] == 20
    assert receipt["val_loss"] == rows(out)[-1]["val_loss"]
    assert (out / "latest").read_text() == "step_20\n"
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    contract = json.loads((out / "run.json").read_text())
    assert contract["training"]["token_budget"] == 7_400
    assert contract["attempts"][0]["world_size"] == 2
    assert (out / "tokenizer.json").is_file()
    assert not list(out.glob("*.tmp-*"))


def test_twice_interrupted_equals_uninterrupted_bit_for_bit(trained, data, resumable, tmp_path):
    undisturbed = launch(trained, "fsdp2")
    assert json.loads((resumable / "STOPPED.json").read_text())["update"] == 7
    out = tmp_path / "ckpt"
    go_on(resumable, out, data, "fsdp2", "--resume", "auto", "--stop-after", 13)
    flags, nproc = TOPOLOGIES["fsdp2"]
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *flags, "--resume", "must", nproc=nproc)
    assert files(out, 20) == files(undisturbed, 20)
    keys = ("update", "tokens", "loss", "lr", "preclip_norm", "val_loss")
    pick = [[{k: r.get(k) for k in keys} for r in rows(d)] for d in (out, undisturbed)]
    assert pick[0] == pick[1]
    assert not (out / "STOPPED.json").exists()
    assert len(json.loads((out / "run.json").read_text())["attempts"]) == 3


@pytest.mark.parametrize("name", ["plain", "ddp2", "padded5"])
def test_saved_by_two_fsdp_ranks_resumed_on_another_topology(trained, data, resumable, tmp_path, name):
    done = go_on(resumable, tmp_path / "ckpt", data, name, "--resume", "auto")
    assert "global" not in done.stderr
    assert "12 windows an update = " in done.stdout and "x 32 = 384 tokens" in done.stdout
    for a, b in zip(rows(launch(trained, "fsdp2")), rows(tmp_path / "ckpt"), strict=True):
        assert (a["update"], a["tokens"], a["lr"]) == (b["update"], b["tokens"], b["lr"])
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)


def test_a_resume_needs_no_flag_but_the_directory(trained, data, resumable, tmp_path):
    shutil.copytree(resumable, tmp_path / "ckpt")
    run("train.py", "--ckpt-dir", tmp_path / "ckpt", "--resume", "must", "--backend", "gloo")
    for a, b in zip(rows(launch(trained, "fsdp2")), rows(tmp_path / "ckpt"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)


def test_killed_torchrun_leaves_no_trainer_and_nothing_to_clean_up(trained, data, tmp_path):
    out, (flags, nproc) = tmp_path / "ckpt", TOPOLOGIES["fsdp2"]
    line = command("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *flags, "--ckpt-every", 1, nproc=nproc)
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not step_dirs(out):
        time.sleep(0.02)
    children = children_of(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while (alive := [p for p in children if Path(f"/proc/{p}/stat").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children
    assert not [p for p in alive if Path(f"/proc/{p}/stat").read_text().split(") ")[1][0] != "Z"]
    assert len(step_dirs(out)) < 20
    (out / "step_999.tmp-dead").mkdir()  # as a save cut short leaves it
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, *flags, "--resume", "auto", nproc=nproc)
    assert files(out, 20) == files(launch(trained, "fsdp2"), 20)
    assert not list(out.glob("*.tmp-*"))
    assert [r["update"] for r in rows(out)] == list(range(1, 21))


@pytest.mark.parametrize(
    "number,whom", [(signal.SIGTERM, "torchrun"), (signal.SIGINT, "all"), (signal.SIGUSR1, "rank")]
)
def test_a_polite_stop_saves_and_says_so(data, tmp_path, number, whom):
    out = tmp_path / "ckpt"
    line = command("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--tokens", 10**9, "--eval-every", 0, nproc=2)
    process = subprocess.Popen(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    for text in process.stdout:
        if text.startswith("step 5 "):
            break
    if whom == "all":  # as Ctrl-C in a terminal does: torchrun passes it on, so that each rank gets it twice
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if whom == "torchrun" else children_of(process)[1], number)
    rest = process.stdout.read()
    process.wait(timeout=60)
    stopped = json.loads((out / "STOPPED.json").read_text())
    assert stopped["by"].startswith("SIG") or "signal" in stopped["by"]
    assert step_dirs(out)[-1].name == f"step_{stopped['update']}"
    assert f"after {stopped['update']} updates" in rest
    assert not (out / "DONE.json").exists()
    assert rows(out)[-1]["update"] == stopped["update"]


def test_a_used_directory_is_refused_and_a_finished_run_never_reopened(trained, data):
    out = launch(trained, "fsdp2")
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file() and p.name not in (".lock",))
    again = ("--data", data, "--ckpt-dir", out, *SMALL)
    message = one_error(run("train.py", *again, code=2))
    assert "step_20" in message
    assert "--resume auto" in message
    assert "finished" in run("train.py", *again, "--resume", "auto").stdout
    one_error(run("train.py", *again, nproc=2, code=1))  # torchrun turns 2 into 1
    after = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file() and p.name not in (".lock",))
    assert [p for p in before if p[0].name != ".attempt"] == [p for p in after if p[0].name != ".attempt"]


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--lr", 1e-2), "lr: was 0.003, now 0.01"),
        (("--d-model", 64), "d_model: was 32, now 64"),
        (("--data-seed", 5), "data_seed: was 1234, now 5"),
        (("--global-bsz", 24), "global_bsz: was 12, now 24"),
        (("--tokens", 9_000), "token_budget: was 7400, now 9000"),
        (("--steps", 30), "--steps and --tokens both set the length"),
    ],
)
def test_a_resume_that_changes_the_experiment_is_refused(data, resumable, tmp_path, flags, words):
    shutil.copytree(resumable, tmp_path / "ckpt")
    again = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--resume", "auto", *flags)
    assert words in one_error(run("train.py", *again, code=2))


def test_a_resume_on_other_data_is_refused(data, resumable, tmp_path):
    (tmp_path / "other.txt").write_text("\n\n".join(f"paragraph {i} " + "word " * 400 for i in range(40)))
    other = ("--dataset", tmp_path / "other.txt", "--tokenizer", "byte", "--val-fraction", 0.2)
    run("prepare.py", *other, "--out", tmp_path / "data")
    shutil.copytree(resumable, tmp_path / "ckpt")
    again = ("--data", tmp_path / "data", "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--resume", "auto")
    message = one_error(run("train.py", *again, code=2))
    assert "--data is another data set: train tokens differ (sha256 " in message
    assert "held-out tokens differ" in message and "tokenizer" not in message
    assert len(message) < 520


def flip_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize(
    "harm,words",
    [
        (flip_bit, "sha256"),
        (lambda p: os.truncate(p, p.stat().st_size - 1), "bytes"),
        (lambda p: p.unlink(), "missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_not_loaded(data, resumable, tmp_path, harm, words):
    shutil.copytree(resumable, tmp_path / "ckpt")
    shard = tmp_path / "ckpt" / "step_7" / "__1_0.distcp"
    harm(shard)
    again = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--resume", "auto")
    for nproc, code in ((None, 2), (2, 1)):
        message = one_error(run("train.py", *again, nproc=nproc, code=code))
        assert shard.name in message
        assert words in message


def test_metadata_that_would_run_code_is_refused(resumable, tmp_path):
    shutil.copytree(resumable, tmp_path / "ckpt")
    trap = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    import pickle

    (tmp_path / "ckpt" / "step_7" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(checkpoint.InputError, match="do not trust"):
        checkpoint.SafeReader(tmp_path / "ckpt" / "step_7").read_metadata()
    assert not trap.exists()


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--stepz", 4), "--stepz"),
        (("--lr", "x"), "expected a number, got 'x'"),
        (("--data", "nowhere"), "nowhere"),
        (("--n-heads", 5), "--n-heads 5 does not divide --d-model 32"),
        (("--steps", 5), "--steps and --tokens"),
        (("--warmup", 30), "--warmup 30"),
        (("--warmup", 19), "decay"),
        (("--min-lr", 1), "--min-lr 1"),
        (("--device", "cuda"), "--device cuda"),
        (("--backend", "nccl"), "--backend nccl"),
        (("--resume", "must"), "--resume must"),
        (("--ctx", 10_000_000, "--warmup", 0, "--schedule", "constant"), "--ctx"),
        (("--vocab-size", 10), "--vocab-size 10"),
        (("--grad-accum", 7, "--local-bsz", 2), "--grad-accum 7"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(data, tmp_path, flags, words):
    done = run("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, *flags, code=2, cwd=tmp_path)
    assert words in one_error(done)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("ckpt/*.json"))


def test_under_torchrun_a_mistake_is_told_once(data, tmp_path):
    done = run("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--stepz", 3, nproc=2, code=1)
    assert "did you mean --steps?" in one_error(done)


def test_help_is_quick_and_needs_no_torch():
    for door in ("train.py", "prepare.py", "eval_ppl.py", "sample.py", "export_hf.py"):
        code = (
            f"import sys, runpy; sys.argv = ['{door}', '--help']\n"
            f"try: runpy.run_path({str(ROOT / door)!r}, run_name='__main__')\n"
            "except SystemExit as e: print('code', e.code, 'torch' in sys.modules)"
        )
        done = subprocess.run([*command(door)[:1], "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "code 0 False" in done.stdout, done.stderr
        assert "--ckpt" in done.stdout or door == "prepare.py"


def test_a_recipe_file_stands_below_the_flags(data, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "d_model = 32\nn_layers = 1\nn-heads = 4\nctx = 32\nsteps = 4\nwarmup = 1\nlr = 0.5\ntie = false\n"
    )
    common = (
        "--data",
        data,
        "--ckpt-dir",
        tmp_path / "ckpt",
        "--config",
        recipe,
        "--backend",
        "gloo",
        "--eval-every",
        0,
    )
    run("train.py", *common, "--lr", 1e-3)
    contract = json.loads((tmp_path / "ckpt" / "run.json").read_text())
    assert (contract["model"]["n_layers"], contract["model"]["tie"]) == (1, False)
    assert (contract["training"]["lr"], contract["training"]["updates"]) == (1e-3, 4)
    recipe.write_text("d_modle = 32\n")
    message = one_error(run("train.py", *common, code=2))
    assert str(recipe) in message
    assert "d-modle" in message


def test_an_exploding_run_stops_and_saves_nothing_that_is_not_finite(data, tmp_path):
    common = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--lr", 1e30, "--min-lr", 0, "--warmup", 0)
    done = run("train.py", *common, "--tokens", 384 * 60, "--log-every", 1, "--ckpt-every", 1, nproc=2, code=1)
    assert "10 updates in a row were dropped (--skip-limit)" in one_error(done)
    for step in step_dirs(tmp_path / "ckpt"):
        assert all(t.isfinite().all() for t in load_model(open_checkpoint(step)).state_dict().values())
    assert rows(tmp_path / "ckpt")[-1]["skipped"] >= 9


def test_weights_that_overflow_are_not_saved(data, tmp_path):
    common = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--lr", 1e39, "--warmup", 0, "--ckpt-every", 1)
    done = run("train.py", *common, "--eval-every", 0, "--parallel", "fsdp", nproc=2, code=1)
    assert "not finite" in one_error(done)
    assert not list((tmp_path / "ckpt").glob("step_*"))


def test_only_the_asked_checkpoints_are_kept(data, tmp_path):
    common = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--eval-every", 0)
    run("train.py", *common, "--ckpt-every", 3, "--keep", 2, "--keep-every", 6)
    assert [p.name for p in step_dirs(tmp_path / "ckpt")] == ["step_6", "step_12", "step_18", "step_20"]


def test_the_console_line_can_be_scraped(data, tmp_path):
    import re

    done = run("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL)
    found = re.findall(r"step\s+(\d+)\s+\|\s+loss\s+([\d.]+)", done.stdout)
    assert [int(step) for step, _ in found] == [1, 5, 10, 15, 20]
    table = {r["update"]: r["loss"] for r in rows(tmp_path / "ckpt")}
    assert all(float(loss) == pytest.approx(table[int(step)], abs=5e-5) for step, loss in found)
    assert re.search(
        r"step 5 \| loss \d\.\d{4} \| gnorm \d+\.\d\d \| lr \d\.\d\de[+-]\d\d \| [\d.]+ ms/step \| [\d,]+ tok/s "
        r"\| mfu n/a \| eta \d+:\d\d",
        done.stdout,
    )
    assert table[1] == pytest.approx(5.55, abs=0.1)  # ln(257), the untouched model's


def test_two_writers_of_one_directory(data, tmp_path):
    out = tmp_path / "ckpt"
    line = command("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--tokens", 10**9)
    first = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for text in first.stdout:
        if text.startswith("step 1 "):
            break
    message = one_error(run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--resume", "auto", code=2))
    assert "another run is writing there" in message
    first.send_signal(signal.SIGINT)
    first.stdout.read()
    assert first.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_compiled_blocks_compute_the_same(trained, name):
    extra = ("--arch", "modern", "--n-kv-heads", 2)
    eager, compiled = rows(launch(trained, name, *extra)), rows(launch(trained, name, *extra, "--compile"))
    for a, b in zip(eager, compiled, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=5e-5)


@pytest.mark.slow
def test_a_stale_receipt_and_foreign_directories(data, tmp_path):
    out = tmp_path / "ckpt"
    (out / "thesis.tmp-old").mkdir(parents=True)
    (out / "DONE.json").write_text("{}")
    run("train.py", "--data", data, "--ckpt-dir", out, *SMALL, "--stop-after", 2)
    assert (out / "thesis.tmp-old").is_dir()
    assert not (out / "DONE.json").exists()
    assert "finished 20 updates" in run("train.py", "--ckpt-dir", out, "--resume", "auto", "--dtype", "auto").stdout


def test_a_reader_who_leaves_does_not_end_the_run(data, tmp_path):
    line = command("train.py", "--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--log-every", 1)
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "ckpt" / "DONE.json").is_file()


def test_an_error_of_another_node_is_told_there(data, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shutil.copytree(data, tmp_path / "data")
    nodes = []
    for rank, data_dir in enumerate((tmp_path / "data", tmp_path / "elsewhere")):
        line = [*command("train.py", "--data", data_dir, "--ckpt-dir", tmp_path / "ckpt", *SMALL)]
        where = ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
        line = [line[0], "-m", "torch.distributed.run", *where, *line[1:]]
        nodes.append(
            subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    errs = [n.communicate(timeout=120)[1] for n in nodes]
    assert all(n.returncode for n in nodes)
    assert f"error: {tmp_path / 'elsewhere'}: no such data directory" in errs[1]


def test_rows_beyond_the_checkpoint_are_set_aside(data, resumable, tmp_path):
    shutil.copytree(resumable, tmp_path / "ckpt")
    late = json.dumps({"update": 8, "tokens": 1, "loss": 9.0})
    with (tmp_path / "ckpt" / "metrics.jsonl").open("a") as f:
        f.write(late + '\n{"update": 9, "tok')  # a kill in the middle of a line
    run("train.py", "--ckpt-dir", tmp_path / "ckpt", "--resume", "auto")
    assert [r["update"] for r in rows(tmp_path / "ckpt")] == list(range(1, 21))
    assert rows(tmp_path / "ckpt")[7]["loss"] < 9
    assert (tmp_path / "ckpt" / "metrics.discarded.jsonl").read_text() == late + "\n"
