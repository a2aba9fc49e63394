"""Kill training runs at random moments, resume them, and compare with a run that nobody disturbed.

    python tests/kills.py --runs 100 --seed 0 --nproc 2 --parallel ddp --work /tmp/kills

Every run is a real torchrun of the small model; it is killed by SIGKILL one to three times (a rank, the launcher, or
all of them; at any moment of its life, or while a checkpoint is being written) and resumed with --resume auto to its
end. What must hold then, each time: no process of the run is left, no checkpoint is lost, the run goes on from its
newest one; and in the end weights and optimizer are bit-equal to the undisturbed run's, the metrics hold each update
once with the same losses, and the directory holds nothing but documented files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import command, environment, rows, run

UPDATES = 24
FLAGS = (
    *("--d-model", 32, "--n-layers", 2, "--n-heads", 4, "--ctx", 32, "--global-bsz", 12, "--steps", UPDATES),
    *("--lr", 3e-3, "--warmup", 4, "--log-every", 1, "--eval-every", 5, "--eval-tokens", 1_000, "--backend", "gloo"),
    *("--sample-tokens", 8),
)
VICTIMS = ("rank", "launcher", "all")
MOMENTS = ("any", "training", "saving", "saving")  # half of the kills inside a save
DOCUMENTED = re.compile(
    r"run\.json|(?:metrics|samples)(?:\.discarded)?\.jsonl|events\.jsonl|loss\.png|tokenizer\.json|latest|best|DONE\.json"
    r"|step_\d+|\.lock"
)
DEAD_S = (
    2  # within which no process may be left of a run whose launcher was killed: it must not end by itself meanwhile
)
ENDED_S = 60  # the same where a rank was: the others look who it was, and the launcher gives them 30 s


class Broken(Exception):
    """A promise that did not hold."""


@dataclass
class Kill:
    victim: str
    moment: str
    after: float  # share of the run's life, of its training, or of its checkpoints, at which it strikes
    delay_s: float  # after a save was seen to begin


@dataclass
class Life:
    """How long a run takes that nobody disturbs."""

    whole_s: float
    training_s: float  # from its first checkpoint on


def processes(run_dir: Path) -> dict[int, str]:
    """Pids of the processes of a run, with their rank ('' for the launcher): those with its directory as argument."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if str(run_dir).encode() not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            rank = re.search(rb"(?:^|\0)RANK=(\d+)", (entry / "environ").read_bytes())
            found[int(entry.name)] = rank[1].decode() if rank else ""
    return found


def steps(run_dir: Path) -> list[int]:
    return sorted(int(p.parent.name[5:]) for p in run_dir.glob("step_*/step.json") if p.parent.name[5:].isdigit())


def hashes(step: Path) -> dict[str, str]:
    """sha256 of a checkpoint's tensor files, after comparing all its files with its own table."""
    table = json.loads((step / "step.json").read_text())["files"]
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in step.iterdir() if p.name != "step.json"}
    if found != {name: entry["sha256"] for name, entry in table.items()}:
        raise Broken(f"{step.name} differs from its own table")
    return {name: digest for name, digest in found.items() if name != ".metadata"}  # which holds a name and an hour


def launch(data: Path, run_dir: Path, nproc: int, parallel: str, *flags: object) -> subprocess.Popen[str]:
    args = ("--data", data, "--ckpt-dir", run_dir, "--parallel", parallel, *FLAGS, *flags)
    log = run_dir.with_suffix(".log").open("a", encoding="utf-8")
    return subprocess.Popen(
        command("train.py", *args, nproc=nproc),
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        text=True,
    )


def strike(job: subprocess.Popen[str], run_dir: Path, kill: Kill, life: Life, rng: random.Random) -> bool:
    """Wait for the moment and kill; False where the run ended before."""
    began, first, trains = time.monotonic(), len(steps(run_dir)), None
    wanted = first + int(kill.after * (UPDATES - first))  # checkpoints to have seen before
    while job.poll() is None:
        age = time.monotonic() - began
        seen = len(steps(run_dir))
        if kill.moment == "any" and age >= kill.after * life.whole_s:
            break
        if kill.moment == "training" and seen > first:
            trains = trains or age
            if age >= trains + kill.after * life.training_s:
                break
        if kill.moment == "saving" and seen >= min(wanted, UPDATES - 1) and any(run_dir.glob("step_*.tmp-*")):
            time.sleep(kill.delay_s)
            break
        time.sleep(0.001)
    if job.poll() is not None:
        return False
    alive = processes(run_dir)
    ranks = [pid for pid, rank in alive.items() if rank]
    if kill.victim == "launcher" or not ranks:
        doomed = [job.pid]
    else:
        doomed = [rng.choice(ranks)] if kill.victim == "rank" else [job.pid, *ranks]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def wait_gone(job: subprocess.Popen[str], run_dir: Path, within: float) -> float:
    """Seconds until no process of the run is left. Raises Broken, naming those left."""
    began = time.monotonic()
    while left := processes(run_dir):
        job.poll()
        if time.monotonic() - began > within:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise Broken(f"processes {left} (rank by pid) were alive {within} s after the kill")
        time.sleep(0.02)
    job.wait()
    return time.monotonic() - began


def judge_end(run_dir: Path, reference: Path) -> None:
    """Compare a finished run with the undisturbed one. Raises Broken."""
    done = json.loads((run_dir / "DONE.json").read_text())
    if done["update"] != UPDATES:
        raise Broken(f"DONE.json is of update {done['update']}")
    if hashes(run_dir / f"step_{UPDATES}") != hashes(reference / f"step_{UPDATES}"):
        raise Broken("the final weights or optimizer differ from the undisturbed run's")
    mine, theirs = ([(r["update"], r["loss"], r["lr"], r["tokens"]) for r in rows(d)] for d in (run_dir, reference))
    if mine != theirs:
        raise Broken(f"metrics.jsonl differs: updates {[m[0] for m in mine]}")
    for step in steps(run_dir):
        hashes(run_dir / f"step_{step}")
    if (run_dir / "samples.jsonl").read_bytes() != (reference / "samples.jsonl").read_bytes():
        raise Broken("the texts written at evaluations differ from the undisturbed run's")
    if strange := sorted(p.name for p in run_dir.iterdir() if not DOCUMENTED.fullmatch(p.name)):
        raise Broken(f"left in the directory: {', '.join(strange)}")
    if (run_dir / "latest").read_text().strip() != f"step_{UPDATES}":
        raise Broken(f"latest is {(run_dir / 'latest').read_text().strip()}")
    scores = {s: json.loads((run_dir / f"step_{s}" / "step.json").read_text())["val_loss"] for s in steps(run_dir)}
    best = min((s for s in scores if scores[s] is not None), key=lambda s: (scores[s], s))
    if (run_dir / "best").read_text().strip() != f"step_{best}":
        raise Broken(f"best is {(run_dir / 'best').read_text().strip()}, the lowest held-out loss is of step_{best}")


def one_run(
    data: Path, run_dir: Path, reference: Path, nproc: int, parallel: str, life: Life, number: int, seed: int
) -> dict[str, Any]:
    """Train with one to three kills, resume to the end, judge. The table says what was done and what broke, if so."""
    rng = random.Random(f"{seed} {number}")
    flags = ("--resume", "auto", "--async-ckpt", ("off", "on")[number % 2], "--ckpt-every", 1 + number // 2 % 2)
    told: dict[str, Any] = {"run": number, "flags": list(map(str, flags[2:])), "kills": [], "broken": None}
    planned = [
        Kill(rng.choice(VICTIMS), rng.choice(MOMENTS), rng.random(), rng.uniform(0, 0.03))
        for _ in range(rng.randint(1, 3))
    ]
    try:
        for kill in planned:
            job = launch(data, run_dir, nproc, parallel, *flags)
            if not strike(job, run_dir, kill, life, rng):
                wait_gone(job, run_dir, DEAD_S)
                if job.returncode != 0:
                    raise Broken(f"ended with code {job.returncode} before it was killed")
                told["kills"].append({"victim": kill.victim, "moment": "too late"})
                break
            had = steps(run_dir)
            gone_s = wait_gone(job, run_dir, ENDED_S if kill.victim == "rank" else DEAD_S)
            left = steps(run_dir)
            if not set(had) <= set(left):
                raise Broken(f"checkpoints {sorted(set(had) - set(left))} are gone after the kill")
            if left:
                hashes(run_dir / f"step_{left[-1]}")
            entry = {"victim": kill.victim, "moment": kill.moment, "gone_s": round(gone_s, 2)}
            entry |= {"at": left[-1] if left else 0, "unfinished": len(list(run_dir.glob("step_*.tmp-*")))}
            told["kills"].append(entry)
        newest = max(steps(run_dir), default=0)
        finished = (run_dir / "DONE.json").exists()
        log = run_dir.with_suffix(".log")
        before = len(log.read_text()) if log.exists() else 0
        job = launch(data, run_dir, nproc, parallel, *flags)
        if job.wait(300) != 0:
            raise Broken(f"the last resume ended with code {job.returncode}")
        if newest and not finished and f"resumed from step_{newest}:" not in log.read_text()[before:]:
            raise Broken(f"it did not go on from step_{newest}, its newest checkpoint")
        wait_gone(job, run_dir, DEAD_S)
        judge_end(run_dir, reference)
    except (Broken, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as e:
        told["broken"] = f"{type(e).__name__}: {e}"
    return told


def campaign(
    runs: int, seed: int, nproc: int, parallel: str, work: Path, data: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """`runs` runs; the directories of those that broke stay for a look. Returns counts, and the table of each run."""
    work.mkdir(parents=True, exist_ok=True)
    reference = work / "undisturbed"
    began = time.monotonic()
    job = launch(data, reference, nproc, parallel, "--ckpt-every", 1, "--async-ckpt", "off")
    while job.poll() is None and not steps(reference):
        time.sleep(0.01)
    first = time.monotonic()
    if job.wait(300) != 0:
        raise Broken(f"the undisturbed run ended with code {job.returncode}, see {reference.with_suffix('.log')}")
    life = Life(time.monotonic() - began, time.monotonic() - first)
    say(f"undisturbed: {life.whole_s:.1f} s, the last {life.training_s:.1f} s of it with checkpoints")
    table = []
    for number in range(runs):
        run_dir = work / f"run_{number:03d}"
        began = time.monotonic()
        told = one_run(data, run_dir, reference, nproc, parallel, life, number, seed)
        table.append(told)
        kills = ", ".join(f"{k['victim']} {k['moment']} at {k.get('at', '-')}" for k in told["kills"])
        say(f"{number:3d} | {time.monotonic() - began:5.1f} s | {kills} | {told['broken'] or 'bit-equal'}")
        if told["broken"] is None:
            shutil.rmtree(run_dir)
            run_dir.with_suffix(".log").unlink()
    struck = [k for told in table for k in told["kills"] if k["moment"] != "too late"]
    return {
        "runs": runs,
        "seed": seed,
        "nproc": nproc,
        "parallel": parallel,
        "bit_equal": sum(told["broken"] is None for told in table),
        "broken": [told["run"] for told in table if told["broken"]],
        "kills": len(struck),
        "by_victim": dict(Counter(k["victim"] for k in struck)),
        "by_moment": dict(Counter(k["moment"] for k in struck)),
        "left_unfinished_saves": sum(k["unfinished"] > 0 for k in struck),
        "slowest_end_s": max((k["gone_s"] for k in struck), default=0.0),
        "table": table,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--runs", type=int, default=100)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--nproc", type=int, default=2)
    flags.add_argument("--parallel", choices=("ddp", "fsdp", "hsdp"), default="ddp")
    flags.add_argument("--work", type=Path, required=True, help="an empty directory for the runs")
    flags.add_argument("--json", type=Path, help="also write the result to this file")
    args = flags.parse_args()
    args.work = args.work.resolve()
    data = args.work / "data"
    if not data.exists():
        text = args.work / "text"
        text.mkdir(parents=True)
        for name in ("argparse.py", "ast.py", "calendar.py", "statistics.py"):
            shutil.copy(Path(os.__file__).parent / name, text / f"{name}.txt")
        run("prepare.py", "--dataset", text / "*.txt", "--tokenizer", "byte", "--val-fraction", 0.1, "--out", data)
    result = campaign(args.runs, args.seed, args.nproc, args.parallel, args.work / "runs", data)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "table"}))
    sys.exit(1 if result["broken"] else 0)


if __name__ == "__main__":
    main()
