"""launch/prepare.sbatch, eval.sbatch and sweep.sbatch as they are, on a real Slurm of two nodes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import ENDS, Cluster, why_not
from conftest import ROOT, rows, run

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# A model whose context takes whole answers of hellaswag in bytes. All of the held-out text is scored at the end.
MODEL = (
    *("--d-model", 32, "--n-layers", 2, "--n-heads", 4, "--ctx", 192, "--global-bsz", 4, "--backend", "gloo"),
    *("--warmup", 2, "--log-every", 10, "--eval-tokens", 100_000, "--sample-tokens", 0),
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=2, cpus=96, gpus=8) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit a template from the root of the repository; the job's id. Logs go to tmp_path."""

    def submit(template, *words, options=(), cwd=ROOT, **env):
        log = "%x_%a.log" if any(str(o).startswith("--array") for o in options) else "%x.log"
        env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PROCS": "2"} | env
        env = {name: str(value) for name, value in env.items()}
        return slurm.sbatch(
            ["--output", tmp_path / log, *options, ROOT / "launch" / template, *words], cwd=cwd, env=env
        )

    return submit


@pytest.fixture
def ended(slurm):
    """Wait for a job's end; its state. On a busy machine a start of torchrun takes a minute."""
    return lambda job, states=ENDS: slurm.wait(job, states, timeout=900)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def errors(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("error: ")]


# ---- preparing -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two files of documents: a small one, and one that takes some seconds, without a text that stands there twice."""
    folder = tmp_path_factory.mktemp("sources")
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    small = modules[:20]
    (folder / "small.jsonl").write_text("".join(json.dumps({"text": p.read_text()}) + "\n" for p in small))
    letters = "abcdefghijklmnopqrstuvwxyz"
    with (folder / "large.jsonl").open("w") as f:
        for k in range(4):
            table = str.maketrans(letters, letters[k:] + letters[:k])
            for path in modules:
                f.write(json.dumps({"text": path.read_text(errors="replace").translate(table)}) + "\n")
    return folder


def content(directory: Path) -> dict[str, Any]:
    """Files by name; of the manifest what the data decide, without the code that made them."""
    files: dict[str, Any] = {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix in (".bin", ".json")}
    return files | {"manifest.json": read(directory / "manifest.json") | {"code": None}}


def taken(directory: Path) -> int:
    """Bytes of the source that a prepare.py on its way has committed."""
    try:
        journal = json.loads((directory / ".prepare_unfinished" / "journal.json").read_text())
    except (OSError, ValueError):
        return 0
    return sum(lane["taken"]["bytes"] for lane in journal.get("assembly", {}).get("lanes", []))


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["time", "requeue"])
def test_an_array_prepares_its_sources_one_of_them_interrupted(how, slurm, ended, submit, sources, tmp_path):
    flags = ("--val-fraction", 0.05, "--shard-tokens", 200_000)
    names = [sources / "small.jsonl", sources / "large.jsonl"]
    array = submit("prepare.sbatch", *names, *flags, "--workers", 2, options=["--array=0-1"], OUT=tmp_path / "data")
    places = [tmp_path / "data" / re.sub(r"[^A-Za-z0-9-]+", "_", str(name)).strip("_") for name in names]
    # The last task of an array has the array's own id: what is meant for it must not reach the others.
    slurm.until(lambda: taken(places[1]), "no commit", f"{array}_1", 900)
    if how == "time":  # what Slurm sends before the time limit
        slurm.call("scancel", "--batch", "--signal=USR1", f"{array}_1")
    else:
        slurm.call("scontrol", "requeue", f"{array}_1")
    assert ended(f"{array}_0") == ended(f"{array}_1") == "COMPLETED"
    assert [slurm.field(f"{array}_{i}", "Restarts") for i in (0, 1)] == ["0", "1"]
    log = (tmp_path / "prepare_1.log").read_text()
    assert "start 1: " in log and "start 2: " in log and "going on where an interrupted run was" in log
    assert "nothing failed" in log and log.endswith(f"{places[1]} is ready: --data {places[1]}\n")
    run("prepare.py", "--dataset", names[1], "--out", tmp_path / "alone", *flags)
    assert content(places[1]) == content(tmp_path / "alone")
    assert not (places[1] / ".prepare_unfinished").exists()


@pytest.mark.slurm
def test_a_time_limit_that_brings_nothing_ends_the_task(slurm, ended, submit, sources, tmp_path):
    words = (sources / "large.jsonl", "--tokenizer", "bpe:8000", "--workers", 2)
    array = submit("prepare.sbatch", *words, options=["--array=0"], OUT=tmp_path / "data")
    log = tmp_path / "prepare_0.log"
    for start in (1, 2):  # in the first, the split was chosen; each is ended in the training of the tokenizer
        slurm.until(
            lambda start=start: log.exists() and log.read_text().count("\ntokenizer bpe:8000") == start, "no training"
        )
        slurm.call("scancel", "--batch", "--signal=USR1", f"{array}_0")
    assert ended(f"{array}_0") == "FAILED"
    assert slurm.field(f"{array}_0", "Restarts") == "1"
    (line,) = errors(log)
    assert line.endswith("a whole time limit brought it no further; give a longer one, as in --time=2-00:00:00")


@pytest.mark.slurm
def test_datatrove_submits_its_own_jobs_and_makes_the_same_files(slurm, tmp_path):
    pytest.importorskip("datatrove")
    (tmp_path / "in").mkdir()
    for k in range(3):
        texts = (json.dumps({"text": f"Document {i} of file {k} says {i * i}."}) + "\n" for i in range(40))
        (tmp_path / "in" / f"{k}.jsonl").write_text("".join(texts))

    def recipe(out, *more):
        flags = ("--input", tmp_path / "in", "--val-fraction", 0.2, "--tasks", 3, "--out", tmp_path / out, *more)
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return slurm.call(sys.executable, ROOT / "launch" / "datatrove_tokenize.py", *flags, cwd=ROOT, env=env).stdout

    def shards(out):
        return {p.relative_to(tmp_path / out): p.read_bytes() for p in (tmp_path / out).glob("*/*.ds")}

    assert "submitted; " in recipe("slurm", "--executor", "slurm", "--workers", 2, "--partition", "main")
    slurm.until((tmp_path / "slurm" / "command.json").exists, "not published", timeout=900)
    recipe("local")
    assert len(shards("slurm")) == 6 and shards("slurm") == shards("local")
    assert "nothing to do: " in recipe("slurm", "--executor", "slurm", "--partition", "main")


# ---- after a training ------------------------------------------------------------------------------------------------

SCORING = {
    "OFFLINE_DATA": f"hellaswag={ROOT / 'tests' / 'hellaswag' / 'val_200.jsonl'}",
    "BENCH_FLAGS": "--limit 8",
}


def test_an_evaluation_waits_for_a_training_that_is_queued_again(slurm, ended, submit, data, tmp_path):
    ckpt, out = tmp_path / "tiny", tmp_path / "tiny_eval"
    flags = ("--data", data, *MODEL, "--steps", 200, "--eval-every", 200, "--ckpt-every", 20, "--lr", 3e-3)
    train = submit("train.sbatch", *flags, options=["-J", "train"], RUN_DIR=ckpt, PROCS=1)
    after = submit("eval.sbatch", ckpt, options=[f"--dependency=afterok:{train}"], TASKS="", PROCS=1)
    slurm.until((ckpt / "latest").exists, "no checkpoint", train, 900)
    slurm.call("scontrol", "requeue", train)
    slurm.until(lambda: slurm.field(train, "Restarts") == "1", "not queued again", train)
    assert (slurm.state(after), slurm.field(after, "Reason")) == ("PENDING", "Dependency")
    assert not (ckpt / "DONE.json").exists()
    ended(train, "COMPLETED")
    ended(after, "COMPLETED")

    done, ppl = read(ckpt / "DONE.json"), read(out / "ppl.json")
    assert ppl["update"] == 200 and ppl["nats_per_token"] == pytest.approx(done["val_loss"], abs=2e-6)  # all held out
    assert read(tmp_path / "tiny_hf" / "fourscale.json")["checkpoint"]["digest"] == done["digest"]
    summary = (out / "summary.txt").read_text()
    assert f"perplexity  {ppl['perplexity']:.4f}" in summary and f"{tmp_path}/tiny_hf: step_200 as a Hug" in summary
    assert errors(tmp_path / "eval.log") == [] and (tmp_path / "eval.log").read_text().endswith(summary)


@pytest.mark.slurm
def test_an_evaluation_scores_on_all_processes_and_does_nothing_twice(slurm, ended, submit, trained, tmp_path):
    shutil.copytree(trained(*MODEL, "--ckpt-every", 5), tmp_path / "tiny")
    ckpt, out, export = (tmp_path / name for name in ("tiny", "tiny_eval", "tiny_hf"))
    assert ended(submit("eval.sbatch", ckpt, **SCORING)) == "COMPLETED"
    ppl, bench = read(out / "ppl.json"), read(out / "bench.json")
    assert ppl["world_size"] == 2 and ppl["nats_per_token"] == pytest.approx(
        read(ckpt / "DONE.json")["val_loss"], abs=2e-6
    )
    assert bench["n-samples"]["hellaswag"]["effective"] == 8
    accuracy = bench["results"]["hellaswag"]["acc,none"]
    summary = (out / "summary.txt").read_text()
    assert f"acc       {accuracy:.4f}" in summary and f"{ckpt}/step_10: hellaswag; fp32 on 2 x cpu" in summary

    # Again: nothing is done twice. Other flags: that part alone. An export that the job did not make is left alone.
    files = [out / "ppl.json", out / "bench.json", export / "model.safetensors"]

    def made() -> list[int]:
        return [file.stat().st_mtime_ns for file in files]

    before = made()
    assert ended(submit("eval.sbatch", ckpt, **SCORING)) == "COMPLETED"
    assert made() == before and (out / "summary.txt").read_text().splitlines()[1:] == summary.splitlines()[1:]
    (out / ".export").unlink()
    assert ended(submit("eval.sbatch", ckpt, TASKS="", PPL_FLAGS="--stride 96", PROCS=1)) == "FAILED"
    assert read(files[0])["stride"] == 96 and made()[1:] == before[1:]
    fault = f"export: {export} is there already, and not of this job; remove it, or say HF_DIR=DIR"
    assert f"failed: {fault}" in (out / "summary.txt").read_text()

    # A run that was stopped is refused; a checkpoint of it is scored. A part that fails does not keep others from it.
    (ckpt / "DONE.json").rename(ckpt / "STOPPED.json")
    assert ended(submit("eval.sbatch", ckpt, options=["-J", "stopped"])) == "FAILED"
    (line,) = errors(tmp_path / "stopped.log")
    assert line.startswith(f"error: {ckpt}: its training was stopped before its end (STOPPED.json); train on, or name")
    (ckpt / "best").write_text("step_5\n")
    job = submit("eval.sbatch", ckpt / "best", options=["-J", "step"], TASKS="nosuchtask", PROCS=1)
    assert ended(job) == "FAILED"
    assert read(tmp_path / "tiny_best_eval" / "ppl.json")["update"] == 5
    assert (tmp_path / "tiny_best_hf" / "model.safetensors").exists()
    assert "failed: bench: --tasks nosuchtask" in (tmp_path / "step.log").read_text()


@pytest.mark.slurm
def test_a_sweep_ends_with_a_verdict_over_all_its_runs(slurm, ended, submit, data, tmp_path):
    """On two nodes; one of the three diverges until train.py ends it, one is told to stop and is queued again."""
    flags = ("--data", data, *MODEL, "--steps", 150, "--eval-every", 50, "--ckpt-every", 20, "--target-loss", 2.9)
    rates, sweep = ("1e-3", "3e-3", "1e2"), tmp_path / "sweep"
    array = submit("sweep.sbatch", *rates, *flags, options=["--array=0-2"], RUN_DIR=sweep)
    slurm.until((sweep / "lr_3e-3" / "latest").exists, "no checkpoint", f"{array}_1", 900)
    slurm.call("scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert [ended(f"{array}_{i}") for i in range(3)] == ["COMPLETED"] * 3, slurm.told(f"{array}_2")
    assert slurm.field(f"{array}_1", "Restarts") == "1" and slurm.field(f"{array}_0", "Restarts") == "0"
    assert {slurm.field(f"{array}_{i}", "NodeList") for i in range(3)} == {"n1", "n2"}
    for rate in rates[:2]:
        assert (sweep / f"lr_{rate}" / "DONE.json").exists()
        assert [row["update"] for row in rows(sweep / f"lr_{rate}")] == list(range(1, 151))
    assert "resumed from step_" in (tmp_path / "sweep_1.log").read_text()
    assert slurm.field(f"{array}_2", "Restarts") == "0" and not (sweep / "lr_1e2" / "DONE.json").exists()
    assert "lr_1e2 diverges and goes no further" in (tmp_path / "sweep_2.log").read_text()
    verdicts = {entry["run"]: entry for entry in json.loads((sweep / "sweep.json").read_text())}
    assert list(verdicts) == [f"lr_{rate}" for rate in rates] and verdicts["lr_1e2"]["verdict"] == "diverging"
    table = (sweep / "sweep.txt").read_text()
    assert all(f"\nlr_{rate} " in table for rate in rates)
    assert (sweep / "sweep.png").stat().st_size > 10_000 and "lr_1e2" in (sweep / "sweep.html").read_text()

    # The same line again trains nothing.
    before = {rate: (sweep / f"lr_{rate}" / "metrics.jsonl").read_bytes() for rate in rates}
    again = submit("sweep.sbatch", *rates, *flags, options=["--array=0-2", "-J", "again"], RUN_DIR=sweep)
    assert [ended(f"{again}_{i}") for i in range(3)] == ["COMPLETED"] * 3
    assert before == {rate: (sweep / f"lr_{rate}" / "metrics.jsonl").read_bytes() for rate in rates}


@pytest.mark.slurm
def test_an_error_of_the_flags_fails_a_sweep(slurm, ended, submit, data, tmp_path):
    words = ("1e-3", "--data", data, "--steps", 20, "--no-such-flag", 1)
    array = submit("sweep.sbatch", *words, options=["--array=0"], RUN_DIR=tmp_path / "sweep")
    assert ended(f"{array}_0") == "FAILED"
    assert slurm.field(f"{array}_0", "Restarts") == "0"
    assert any("no-such-flag" in line for line in errors(tmp_path / "sweep_0.log"))
    assert not (tmp_path / "sweep" / "sweep.txt").exists()


# ---- without Slurm: a template by itself -----------------------------------------------------------------------------


def alone(root: Path, template: str, *words: object, **env: object) -> subprocess.CompletedProcess[str]:
    """A template as on the node that a job has, in a copy of the repository's launch/."""
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "alone", "SLURM_SUBMIT_DIR": str(root), "PROCS": "1"}
    line = ["bash", f"launch/{template}", *map(str, words)]
    env = os.environ | job | {name: str(value) for name, value in env.items()}
    return subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copied(tmp_path):
    root = tmp_path / "with a blank"
    shutil.copytree(ROOT / "launch", root / "launch", ignore=shutil.ignore_patterns("*.png"))
    for door in ("train.py", "prepare.py", "eval_ppl.py"):
        (root / door).touch()
    return root


@pytest.mark.parametrize("template", ["train", "prepare", "eval", "sweep"])
def test_settings_may_name_variables_that_are_not_set(template, copied):
    """As /etc/profile and the scripts of modules and conda do."""
    with (copied / "launch" / "cluster.env").open("a") as f:
        f.write('[ -z "$NOBODY_SETS_THIS" ] && echo "settings were read"\n')
    done = alone(copied, f"{template}.sbatch", PROCS="many")
    assert "settings were read" in done.stdout
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


STAND_IN = """#!/usr/bin/env bash
case $1 in
  export_hf.py) mkdir -p "$5" && touch "$5/model" ;;
  eval_ppl.py) echo {} > "$6" ;;
  -c) [ $# -eq 2 ] || echo data ;;
esac
"""


def test_an_export_replaces_only_what_the_job_made(copied):
    step = copied / "ckpt" / "run" / "step_5"
    step.mkdir(parents=True)
    for name in ("step.json", "../run.json", "../DONE.json"):
        (step / name).write_text("{}\n")
    (step.parent / "latest").write_text("step_5\n")
    python = copied / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def evaluate(**env):
        return alone(copied, "eval.sbatch", "ckpt/run", PYTHON=python, TASKS="", **env)

    done = evaluate()
    assert done.returncode == 0 and (copied / "ckpt" / "run_hf" / "model").exists(), done.stdout + done.stderr
    assert "export: ckpt/run_hf is there already" in evaluate().stdout
    (copied / "models").mkdir()
    (copied / "models" / "of another").touch()
    done = evaluate(HF_DIR="models")  # not with what the first job knows of its own
    assert done.returncode == 1 and "failed: export: models is there already, and not of this job;" in done.stdout
    assert [p.name for p in (copied / "models").iterdir()] == ["of another"]


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "prepare-index": ("prepare.sbatch", ("a.txt",), "--array=1", "array index 1: there are 1 sources, the last is 0"),
    "prepare-no-array": ("prepare.sbatch", ("a.txt", "b.txt"), None, "no array: sbatch --array=0-1 launch/prepare.sb"),
    "prepare-no-source": ("prepare.sbatch", ("--tokenizer", "gpt2"), "--array=0", "no source is named: sbatch --arr"),
    "prepare-bpe": ("prepare.sbatch", ("a", "b", "--tokenizer", "bpe:512"), "--array=0", "--tokenizer bpe:512: each "),
    "prepare-char": ("prepare.sbatch", ("a", "b", "--tokenizer=char"), "--array=1", "--tokenizer char: each source "),
    "prepare-out": (
        "prepare.sbatch",
        ("a", "--out", "x"),
        "--array=0",
        "--out: each source has a directory of its own",
    ),
    "prepare-same": ("prepare.sbatch", ("a.*", "a*"), "--array=0", "sources a.* and a*: both would be "),
    "prepare-no-file": ("prepare.sbatch", ("nowhere/*.txt",), "--array=0", "--dataset nowhere/*.txt"),
    "prepare-python": (
        "prepare.sbatch",
        ("a",),
        "--array=0",
        "/nowhere: on n1: No such file or directory; set PYTHON ",
    ),
    "eval-no-run": ("eval.sbatch", ("ckpt/nowhere",), None, "ckpt/nowhere: no run is there; name what the training "),
    "eval-no-step": ("eval.sbatch", ("ckpt/nowhere/best",), None, "ckpt/nowhere/best: no checkpoint is there; python "),
    "eval-nothing": ("eval.sbatch", (), None, "no run is named: sbatch launch/eval.sbatch ckpt/NAME"),
    "eval-flags": ("eval.sbatch", ("ckpt/a", "--stride", 2), None, "--stride: more than a run is named; flags go into"),
    "sweep-index": ("sweep.sbatch", ("1e-3", "3e-3"), "--array=2", "array index 2: there are 2 rates, the last is 1"),
    "sweep-no-array": ("sweep.sbatch", ("1e-3", "3e-3"), None, "no array: sbatch --array=0-1 launch/sweep.sbatch"),
    "sweep-no-rate": ("sweep.sbatch", ("--steps", 10), "--array=0", "no rate is named: sbatch --array=0-2 launch/swee"),
    "sweep-rate": ("sweep.sbatch", ("1e-3", "fast"), "--array=0", "fast: no learning rate; name rates first, as in "),
    "sweep-twice": ("sweep.sbatch", ("1e-3", "1e-3"), "--array=0", "1e-3: named twice; a rate has one directory"),
    "sweep-lr": ("sweep.sbatch", ("1e-3", "--lr=2"), "--array=0", "--lr: name the rates before the flags"),
}


def test_a_mistake_is_one_line_and_ends_the_job(slurm, ended, submit, tmp_path):
    jobs = {}
    for name, (template, words, array, line) in MISTAKES.items():
        options = ["--output", tmp_path / f"{name}.log", "-c", 1, "--gpus-per-node=0", *([array] if array else [])]
        places = {"OUT": tmp_path / "data", "RUN_DIR": tmp_path / "ckpt"}
        if line.startswith("/nowhere"):
            places["PYTHON"] = "/nowhere"
        jobs[name] = submit(template, *words, options=options, **places)
    failed = slurm.sbatch(["--wrap", "exit 1", "--output", tmp_path / "failed.log"])
    words = (f"--dependency=afterok:{failed}", "--kill-on-invalid-dep=yes")
    after = submit("eval.sbatch", tmp_path / "ckpt", options=[*words, "-J", "after"])
    elsewhere = {}
    for template in ("prepare.sbatch", "eval.sbatch", "sweep.sbatch"):  # submitted outside of the repository
        elsewhere[template] = submit(template, "x", options=["--output", tmp_path / f"{template}.log"], cwd=tmp_path)
    for name, job in (jobs | elsewhere).items():
        assert ended(job) == "FAILED", name
        assert slurm.field(job, "Restarts") == "0"
        (line,) = errors(tmp_path / f"{name}.log")
        expected = MISTAKES[name][3] if name in jobs else f"{tmp_path}: no "
        assert line.startswith(f"error: {expected}"), (name, line)
    assert ended(after) == "CANCELLED" and not (tmp_path / "after.log").exists()
