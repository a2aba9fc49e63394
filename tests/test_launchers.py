"""launch/*.sh: help, what they refuse, how flags reach train.py, and real runs that are stopped and gone on with."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, rows

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
# Script, the variable that counts its processes, its recipe, and what it puts before the user's flags.
TRAINERS = {
    "laptop.sh": ("PROCS", "launch/laptop.toml", ["--backend", "gloo"]),
    "1gpu.sh": (None, "launch/gpt2-124m.toml", ["--device", "cuda"]),
    "8gpu.sh": ("GPUS", "launch/1.3b.toml", ["--device", "cuda"]),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
ODD = ["--sample-prompt", "a  b\n'\"$HOME `id` \\ *", "", "--lr=1", "-x", "ä", "--", "--resume", "never"]
TINY = ("--d-model", 32, "--n-layers", 2, "--n-heads", 2, "--ctx", 32, "--warmup", 2)
TINY += ("--eval-every", 0, "--ckpt-every", 0, "--log-every", 1)


def shell(
    script: str | Path, *args: object, cwd: Path | None = None, timeout: float = 300, **variables: object
) -> subprocess.CompletedProcess[str]:
    env = environment(**{k: str(v) for k, v in variables.items()})
    path = script if isinstance(script, Path) else ROOT / "launch" / script
    line = [str(path) if path.parent.name else f"./{path}", *map(str, args)]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def printer(tmp_path: Path) -> Path:
    """An interpreter that adds its directory and its arguments to a file beside it, each ended by NUL."""
    path = tmp_path / "say it"
    path.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@" "<end>" >> "$0.txt"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def printed(printer: Path) -> list[list[str]]:
    """Directory and arguments of each call so far, which are forgotten."""
    said = printer.with_name(printer.name + ".txt")
    calls = said.read_text(encoding="utf-8").split("<end>\0")[:-1]
    said.unlink()
    return [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_the_variables_and_needs_no_python(script, word, tmp_path):
    for tool in ("bash", "cat", "dirname", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    # With other words too, where a script takes any.
    words = [word] if script.name == "demo.sh" else ["--steps", "10", word]
    done = subprocess.run(
        [str(tmp_path / "bash"), str(script), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith(f"launch/{script.name} ")
    read = set(re.findall(r"\$\{(?!OMP_|NCCL_)([A-Z][A-Z_]*):?[-+]", script.read_text(encoding="utf-8")))
    listed = re.findall(r"^  ((?:[A-Z_]+=\S*)(?: [A-Z_]+=\S*)*)(?:  |$)", done.stdout, re.M)
    missing = read - set(re.findall(r"([A-Z_]+)=", " ".join(listed)))
    assert "PYTHON" in read and not missing, missing


@pytest.mark.parametrize("script", TRAINERS)
def test_flags_come_last_and_as_they_are(script, printer):
    count, recipe, own = TRAINERS[script]
    for n in ("2", "1") if count else ("1",):
        done = shell(script, *ODD, PYTHON=printer, **({count: n} if count else {}))
        assert done.returncode == 0, done.stderr
        launcher = [*TORCHRUN, f"--nproc_per_node={n}"] if n != "1" or script == "8gpu.sh" else []
        own_flags = ["--config", recipe, *own, "--expect-world-size", n, "--resume", "auto"]
        own_flags += ["--ckpt-dir", f"ckpt/{Path(recipe).stem}"]
        assert printed(printer) == [[str(ROOT), *launcher, "train.py", *own_flags, *ODD]]
    assert shell(script, PYTHON=printer, RECIPE="launch/race.toml").returncode == 0
    default = printed(printer)[0]
    assert default[default.index("--config") + 1] == "launch/race.toml"
    assert default[default.index("--ckpt-dir") + 1] == "ckpt/race", "another recipe is another run"
    assert default[default.index("--expect-world-size") + 1] == ("8" if script == "8gpu.sh" else "1")


def test_they_work_from_anywhere_and_take_the_environment_that_is_there(printer, tmp_path):
    root = tmp_path / "a clone, in there"
    (root / "launch").mkdir(parents=True)
    for path in (ROOT / "launch").glob("*.*"):
        if path.suffix in (".sh", ".toml"):
            shutil.copy(path, root / "launch")
    (tmp_path / "bin").mkdir()
    shutil.copy(printer, tmp_path / "bin" / "python3")
    path = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    (tmp_path / "elsewhere" / root.name / "launch").mkdir(parents=True)  # where CDPATH would lead
    env: Mapping[str, object] = {"PATH": path, "CDPATH": tmp_path / "elsewhere", "PYTHON": ""}
    calls = [(root / "launch", Path("/")), (Path(root.name) / "launch", tmp_path), (Path("."), root / "launch")]

    def started(interpreter: Path) -> None:
        for script in TRAINERS:
            for directory, cwd in calls:
                done = shell(directory / script, cwd=cwd, **env)
                assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
                assert printed(interpreter)[0][0] == str(root)

    started(tmp_path / "bin" / "python3")
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(printer, root / ".venv" / "bin" / "python")
    started(root / ".venv" / "bin" / "python")


@pytest.mark.parametrize("script", TRAINERS)
def test_what_is_not_there_is_one_line(script, printer):
    count = TRAINERS[script][0]
    cases = [
        ({"PYTHON": "/no where/python"}, "error: PYTHON=/no where/python: no such program; "),
        ({"PYTHON": printer, "RECIPE": "launch/no where.toml"}, "error: RECIPE=launch/no where.toml: no such file in "),
    ]
    if count:
        cases += [
            ({"PYTHON": printer, count: n}, f"error: {count}={n}: a number of ") for n in ("two", "0", "-1", "2.")
        ]
    for variables, words in cases:
        done = shell(script, "--steps", 5, **variables)
        assert done.returncode == 2 and not done.stdout, done.stdout
        assert done.stderr.startswith(words) and done.stderr.count("\n") == 1, done.stderr


def test_the_demo_refuses_flags():
    done = shell("demo.sh", "--steps", 5)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith("error: --steps: ")
    done = shell("demo.sh", PYTHON="/no where/python")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith("error: PYTHON=/no where/")


def test_the_race_trains_its_recipe(printer, tmp_path):
    done = shell("race.sh", "--seed", "7", PYTHON=printer, OUT=tmp_path / "race")
    assert done.returncode == 0, done.stderr
    calls = [call for call in printed(printer) if "train.py" in call]
    assert len(calls) == 6  # a tenth, and to the end, at three rates
    recipe = tomllib.loads((ROOT / "launch" / "race.toml").read_text(encoding="utf-8"))
    for call in calls:
        assert call[call.index("train.py") - 1] == "--nproc_per_node=2" and call[call.index("--seed") + 1] == "7"
        assert call[call.index("--config") + 1] == "launch/race.toml"
        for key in ("steps", "warmup", "log_every", "eval_every"):  # scaled with the updates: at 500, what it says
            assert call[call.index("--" + key.replace("_", "-")) + 1] == str(recipe[key])
    done = shell("race.sh", "--steps=100", PYTHON=printer, OUT=tmp_path / "short", PROCS=1)
    call = next(call for call in printed(printer) if "train.py" in call)
    values = [call[call.index(name) + 1] for name in ("--warmup", "--log-every", "--eval-every", "--stop-after")]
    assert (done.returncode, values) == (0, ["4", "10", "2", "10"])


# ---- real runs -------------------------------------------------------------------------------------------------------


def test_the_same_line_goes_on_after_a_signal_and_to_the_end(data, tmp_path):
    run_dir, log, steps = tmp_path / "the run", tmp_path / "log", 250
    flags = ("--data", data, "--ckpt-dir", run_dir, *TINY, "--d-model", 96, "--ctx", 64, "--steps", steps)
    line = [str(ROOT / "launch" / "laptop.sh"), *map(str, flags)]
    with socket.socket() as busy, log.open("w") as out:
        with contextlib.suppress(OSError):  # held by another program: as good
            busy.bind(("", 29_500))
            busy.listen()
        env = environment(PYTHON=sys.executable, PROCS="2", MASTER_ADDR="nowhere", MASTER_PORT="29500")
        process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=env, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 300
            while not (run_dir / "metrics.jsonl").is_file() or len(rows(run_dir)) < 3:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        finally:
            process.kill()
    stopped = json.loads((run_dir / "STOPPED.json").read_text(encoding="utf-8"))
    assert 3 <= stopped["update"] < steps and stopped["by"] == "SIGTERM", log.read_text()

    done = shell("laptop.sh", *flags, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"finished {steps} updates" in done.stdout and (run_dir / "DONE.json").is_file()
    assert [r["update"] for r in rows(run_dir)] == [*range(1, steps + 1)]
    told = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    split = [(a["world_size"], a["local_bsz"], a["grad_accum"]) for a in told["attempts"]]
    assert split == [(2, 4, 1), (1, 8, 1)], "each rank computes its share of the 8 windows"
    assert told["config"]["lr"] == 1e-3 and told["model"]["n_layers"] == 2, "flags win over the recipe"
    again = shell("laptop.sh", *flags, PYTHON=sys.executable)
    assert again.returncode == 0 and "this run is finished; nothing to do" in again.stdout


def test_a_machine_whose_name_does_not_resolve_trains_too(data, tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--uts"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("unshare can't make a machine's name here")
    renamed = [*namespace, "bash", "-c", 'hostname nowhere.invalid && exec "$@"', "bash"]
    flags = (*TINY, "--global-bsz", 8, "--steps", 5, "--no-compile", "--device", "cpu", "--dtype", "fp32")
    line = [ROOT / "launch" / "8gpu.sh", "--data", data, "--ckpt-dir", tmp_path / "run", *flags]
    env = environment(PYTHON=sys.executable, GPUS="2")
    del env["GLOO_SOCKET_IFNAME"]
    done = subprocess.run([*renamed, *map(str, line)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 x cpu, fsdp, fp32" in done.stdout and (tmp_path / "run" / "DONE.json").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_its_launcher_trains_nothing(data, tmp_path):
    done = shell("1gpu.sh", "--data", data, "--ckpt-dir", tmp_path / "run", PYTHON=sys.executable)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert done.stderr.startswith("error: --device cuda: no CUDA device is visible"), done.stderr
