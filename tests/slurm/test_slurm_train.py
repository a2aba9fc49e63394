"""launch/train.sbatch as users submit it, on a real Slurm of two nodes: preempted, out of time, struck by dead nodes.

What was interrupted must end with the weights of the run that nobody disturbed, bit for bit, without a hand.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cluster
import pytest
from cluster import Cluster
from conftest import ROOT, rows
from kills import processes

UPDATES = 120
FLAGS = (
    *("--d-model", 64, "--n-layers", 4, "--n-heads", 4, "--ctx", 64, "--global-bsz", 16, "--local-bsz", 8),
    *("--steps", UPDATES, "--lr", 1e-3, "--warmup", 4, "--log-every", 20, "--eval-every", 0, "--ckpt-every", 10),
    *("--keep", 3, "--backend", "gloo"),
)
# Jobs in `high` take the nodes of jobs in `low`, which have half a minute from SIGTERM on.
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=30",
    "PartitionName=high Nodes=ALL PriorityTier=2",
)


@dataclass
class Site:
    """A cluster, and a clone of the project on the file system that its nodes share."""

    slurm: Cluster
    root: Path
    data: Path

    def train(self, name: str, *flags: object, options: tuple[object, ...] = (), **env: str) -> str:
        """Submit train.sbatch on both nodes, a process on each; the job's id."""
        env = {"PYTHON": sys.executable, "PROCS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
        env = {k: v for k, v in env.items() if v}
        line = ["--nodes=2", "-J", name, *options, "launch/train.sbatch", "--data", self.data, *FLAGS, *flags]
        return self.slurm.sbatch(line, cwd=self.root, env=env)

    def run_dir(self, name: str) -> Path:
        return self.root / "ckpt" / name

    def log(self, name: str, job: str) -> str:
        path = self.root / f"{name}-{job}.log"
        return path.read_text() if path.exists() else ""

    def updates(self, name: str) -> int:
        path = self.run_dir(name) / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def wait_for_update(self, name: str, job: str, update: int) -> None:
        self.slurm.until(lambda: self.updates(name) >= update, f"{name} does not reach update {update}", job)

    def digest(self, name: str) -> str:
        done = json.loads((self.run_dir(name) / "DONE.json").read_text())
        assert done["update"] == done["updates"]
        return done["digest"]

    def finished(self, name: str, job: str, restarts: int) -> str:
        """Wait for the end; the digest of the final state. Each update stands once in the metrics, in order."""
        self.slurm.wait(job, "COMPLETED", timeout=600)
        told = self.slurm.told(job)
        assert self.slurm.field(job, "Restarts") == str(restarts), told
        run = json.loads((self.run_dir(name) / "run.json").read_text())
        updates, attempts = run["training"]["updates"], run["attempts"]
        assert [row["update"] for row in rows(self.run_dir(name))] == list(range(1, updates + 1))
        starts = [f"{job}.{i}" for i in range(restarts + 1)]  # a run begins anew until it has a checkpoint
        assert [a["job"] for a in attempts] == starts[-len(attempts) :], told
        assert all(a["world_size"] == 2 for a in attempts)
        assert not list((self.root / "ckpt").glob(".*.requeues")), "a count was left"
        return self.digest(name)

    def errors(self, name: str, job: str) -> list[str]:
        return [line for line in self.log(name, job).splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def site(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := cluster.why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("site") / "fourscale"
    root.mkdir()
    shutil.copy(ROOT / "train.py", root)
    for name in ("fourscale", "launch"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    with Cluster(tmp_path_factory.mktemp("slurm"), cpus=96, gpus=8, more=PREEMPTION) as slurm:
        yield Site(slurm, root, data)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> str:
    """The digest of the run that nobody disturbed."""
    return site.finished("undisturbed", site.train("undisturbed"), restarts=0)


def test_every_template_is_accepted(site: Site) -> None:
    """As it stands, on nodes of 8 GPUs and 96 CPUs."""
    templates = sorted((site.root / "launch").glob("*.sbatch"))
    assert site.root / "launch" / "train.sbatch" in templates
    for template in templates:
        done = site.slurm.call("sbatch", "--test-only", template, cwd=site.root, check=False)
        assert done.returncode == 0 and "to start at" in done.stderr, f"{template.name}: {done.stderr}"
    settings = re.findall(r"^#(export SBATCH_\w+)", (site.root / "launch" / "cluster.env").read_text(), re.M)
    assert len(settings) >= 4
    done = site.slurm.call(
        *("bash", "-c", "source launch/cluster.env && SBATCH_PARTITION=nowhere sbatch --test-only launch/train.sbatch"),
        cwd=site.root,
        check=False,
    )
    assert done.returncode and "invalid partition specified: nowhere" in done.stderr


def test_one_start_says_where_it_runs(site: Site, undisturbed: str) -> None:
    (log,) = site.root.glob("undisturbed-*.log")
    job = log.stem.rsplit("-", 1)[1]
    port = 20_000 + int(job) % 10_000
    starts = [line for line in log.read_text().splitlines() if "start 1 on" in line]
    assert starts == [
        f"undisturbed, job {job}: start 1 on 2 nodes (n[1-2]), head n1:{port}, 1 processes a node, "
        "run directory ckpt/undisturbed"
    ]
    run = json.loads((site.run_dir("undisturbed") / "run.json").read_text())
    assert run["attempts"][0]["host"] == "n1"
    assert "the run is finished" in log.read_text()


def test_signal_saves_queues_again_and_resumes(site: Site, undisturbed: str) -> None:
    job = site.train("preempted")
    site.wait_for_update("preempted", job, 15)
    site.slurm.call("scancel", "--signal=USR1", "--batch", job)
    assert site.finished("preempted", job, restarts=1) == undisturbed
    log = site.log("preempted", job)
    stopped = re.search(r"saved and stopped \(SIGUSR1\); queued again, to go on from step_(\d+)", log)
    assert stopped and int(stopped[1]) < UPDATES, log
    assert f"resumed from step_{stopped[1]}:" in log  # nothing was lost, and the log was added to
    assert f"start 2 on 2 nodes (n[1-2]), head n1:{20_000 + int(job) % 10_000}" in log


def crash(site: Site, name: str, node: str) -> str:
    job = site.train(name)
    site.wait_for_update(name, job, 15)
    site.slurm.crash(node)
    site.slurm.until(lambda: site.slurm.state(job) != "RUNNING", "Slurm does not notice the crash", job, timeout=120)
    site.slurm.boot(node)
    return job


@pytest.mark.slow
def test_other_node_crashes(site: Site, undisturbed: str) -> None:
    job = crash(site, "crash_n2", "n2")
    assert site.finished("crash_n2", job, restarts=1) == undisturbed
    assert "start 2 on 2 nodes" in site.log("crash_n2", job)


@pytest.mark.parametrize(
    ("name", "flags", "env", "said"),
    [
        ("typo", ("--stepz", 3), {}, "--stepz"),
        ("no_python", (), {"PYTHON": "/nowhere/python"}, "error: PYTHON: '/nowhere/python' fails on n"),
    ],
    ids=["typo", "no_python"],
)
def test_a_mistake_fails_once(site: Site, name: str, flags: tuple[object, ...], env: dict[str, str], said: str) -> None:
    assert_mistake(site, name, site.train(name, *flags, **env), said)


def assert_mistake(site: Site, name: str, job: str, said: str) -> None:
    """It ends as FAILED, at once, and its log has one line that says why."""
    site.slurm.wait(job, "FAILED")
    assert site.slurm.field(job, "Restarts") == "0"
    errors = set(site.errors(name, job))
    assert len(errors) == 1 and said in errors.pop(), site.log(name, job)
    assert "queued again, to go on" not in site.log(name, job)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "flags", "env", "said"),
    [
        ("no_data", ("--data", "/nowhere"), {}, "/nowhere"),
        ("a_directory", ("--ckpt-dir", "x"), {}, "--ckpt-dir: is RUN_DIR here"),
        ("no_torch", (), {"PYTHON": "/usr/bin/python3"}, "no torch in it"),
        ("no_procs", (), {"PROCS": "many"}, "PROCS=many"),
        (".hidden", (), {}, "-J .hidden"),
    ],
    ids=["no_data", "a_directory", "no_torch", "no_procs", "hidden"],
)
def test_more_mistakes(site: Site, name: str, flags: tuple[object, ...], env: dict[str, str], said: str) -> None:
    assert_mistake(site, name, site.train(name, *flags, **env), said)


@pytest.mark.slurm
def test_a_job_with_gpus_does_not_train_on_cpus(site: Site) -> None:
    env = {"PYTHON": sys.executable, "PROCS": "1", "OMP_NUM_THREADS": "1"}
    small = ("--data", site.data, *FLAGS[: FLAGS.index("--steps")], "--steps", 3, "--eval-every", 0)
    job = site.slurm.sbatch(["-J", "gpus", "launch/train.sbatch", *small], cwd=site.root, env=env)
    assert_mistake(site, "gpus", job, "--device cuda: no CUDA device is visible")
    line = ["-J", "cpus", "--gpus-per-node=0", "--cpus-per-task=8", "launch/train.sbatch", *small]
    site.slurm.wait(site.slurm.sbatch(line, cwd=site.root, env=env), "COMPLETED")
    assert (site.run_dir("cpus") / "DONE.json").is_file()


@pytest.mark.slurm
def test_batch_node_crashes(site: Site, undisturbed: str) -> None:
    job = crash(site, "crash_n1", "n1")
    assert site.finished("crash_n1", job, restarts=1) == undisturbed


@pytest.mark.slurm
def test_fsdp_at_its_time_limit(site: Site) -> None:
    """Slurm counts in minutes: its signal comes 20 to 50 s after the start. A rank is held until then."""
    undisturbed = site.finished("fsdp", site.train("fsdp", "--parallel", "fsdp"), restarts=0)
    run_dir = site.run_dir("limited")
    options = ("--time=1", "--signal=B:USR1@10")
    job = site.train("limited", "--parallel", "fsdp", options=options, RUN_DIR=str(run_dir))

    def asked() -> bool:
        return "the time is nearly up" in site.log("limited", job)

    site.slurm.until(lambda: site.updates("limited") >= 15 or asked(), "no update", job)
    held = [pid for pid, rank in processes(run_dir).items() if rank == "1"]
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        site.slurm.until(asked, "no signal", job)
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)
    site.slurm.wait(job, "COMPLETED", timeout=600)
    restarts = int(site.slurm.field(job, "Restarts"))
    assert restarts > 0, site.slurm.told(job)
    assert site.finished("limited", job, restarts) == undisturbed
    assert "saved and stopped (SIGUSR1)" in site.log("limited", job)


@pytest.mark.slurm
def test_preempted_with_grace(site: Site, undisturbed: str) -> None:
    job = site.train("graced", "--ckpt-every", 0, options=("--partition=low",))
    site.wait_for_update("graced", job, 15)
    other = site.slurm.sbatch(["--partition=high", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap", "sleep 1"])
    site.slurm.wait(other, "COMPLETED")
    assert site.finished("graced", job, restarts=1) == undisturbed
    assert re.search(r"resumed from step_\d+:", site.log("graced", job))


@pytest.mark.slurm
def test_put_back_by_hand(site: Site, undisturbed: str) -> None:
    """scontrol requeue, which is preemption without grace: SIGTERM to all, and KillWait to save in."""
    job = site.train("put_back", "--ckpt-every", 0)
    site.wait_for_update("put_back", job, 15)
    before = site.updates("put_back")
    site.slurm.call("scontrol", "requeue", job)
    assert site.finished("put_back", job, restarts=1) == undisturbed
    resumed = re.search(r"resumed from step_(\d+):", site.log("put_back", job))
    assert resumed and int(resumed[1]) >= before  # it had no checkpoint but that of SIGTERM


@pytest.mark.slurm
def test_scancel_is_for_good(site: Site) -> None:
    job = site.train("cancelled")
    site.wait_for_update("cancelled", job, 10)
    site.slurm.call("scancel", job)
    site.slurm.wait(job, "CANCELLED")
    time.sleep(15)  # longer than a job that is queued again has to wait
    assert site.slurm.state(job) == "CANCELLED" and site.slurm.field(job, "Restarts") == "0"
    assert (site.run_dir("cancelled") / "STOPPED.json").exists()  # with what it had made


@pytest.mark.slurm
def test_stop_after_is_an_end(site: Site, undisturbed: str) -> None:
    job = site.train("stages", "--stop-after", 50)
    site.slurm.wait(job, "COMPLETED")
    assert site.slurm.field(job, "Restarts") == "0"
    assert (site.run_dir("stages") / "latest").read_text() == "step_50\n"
    job = site.train("stages")  # the same name goes on
    site.slurm.wait(job, "COMPLETED")
    assert site.digest("stages") == undisturbed
    job = site.train("stages")  # and is left alone when it's finished
    site.slurm.wait(job, "COMPLETED")
    assert "this run is finished; nothing to do" in site.log("stages", job)


@pytest.mark.slurm
def test_two_jobs_of_one_name(site: Site, undisturbed: str) -> None:
    small = ("--gpus-per-node=1", "--cpus-per-task=4")
    first = site.train("twice", options=small)
    site.wait_for_update("twice", first, 10)
    second = site.train("twice", options=small)
    assert_mistake(site, "twice", second, "another run is writing there")
    assert site.finished("twice", first, restarts=0) == undisturbed


@pytest.mark.slurm
def test_asked_before_the_trainer_is_there(site: Site, undisturbed: str) -> None:
    settings = site.root / "launch" / "cluster.env"
    before = settings.read_text()
    settings.write_text(f"{before}\ntouch reading\nsleep 5\n")
    try:
        job = site.train("early")
        site.slurm.until((site.root / "reading").exists, "no start", job)
        site.slurm.call("scancel", "--signal=USR1", "--batch", job)
        site.slurm.until(lambda: "queued again" in site.log("early", job), "it does not stop", job)
    finally:
        settings.write_text(before)
    assert site.finished("early", job, restarts=1) == undisturbed


@pytest.mark.slurm
def test_a_trainer_that_hangs_is_queued_again_before_its_time_limit(site: Site, undisturbed: str) -> None:
    run_dir = site.run_dir("hung")
    job = site.train("hung", options=("--time=3", "--signal=B:USR1@90"), RUN_DIR=str(run_dir))
    site.wait_for_update("hung", job, 5)
    for pid in [pid for pid, rank in processes(run_dir).items() if rank == "1"]:
        os.kill(pid, signal.SIGSTOP)
    said = "neither saved nor stopped until the time limit came; queued again"
    site.slurm.until(lambda: said in site.log("hung", job), "it hangs", job)
    site.slurm.wait(job, "PENDING")
    site.slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert site.finished("hung", job, restarts=1) == undisturbed


@pytest.mark.slurm
def test_updates_dropped_for_ever_end_it_at_once(site: Site) -> None:
    """It would be the same again: the trainer starts from the same checkpoint, with the same data."""
    job = site.train("hopeless", "--lr", 1e30, "--clip", 0, "--warmup", 0, "--ckpt-every", 0, "--skip-limit", 3)
    site.slurm.wait(job, "FAILED")
    assert site.slurm.field(job, "Restarts") == "0"
    assert "updates in a row were dropped" in site.log("hopeless", job)


@pytest.mark.slurm
def test_a_failure_that_comes_again_ends(site: Site) -> None:
    """A rank is killed in each start, as for want of memory, before there is a checkpoint."""
    run_dir = site.run_dir("killed")
    job = site.train("killed", "--ckpt-every", 0, RUN_DIR=str(run_dir))
    for start in range(3):
        site.slurm.until(lambda n=start: f"start {n + 1} on" in site.log("killed", job), "no start", job)
        site.slurm.until(lambda n=start: site.log("killed", job).count("step 1 |") > n, "no update", job)
        for pid in [pid for pid, rank in processes(run_dir).items() if rank == "1"]:
            os.kill(pid, signal.SIGKILL)
    site.slurm.wait(job, "FAILED")
    assert site.slurm.field(job, "Restarts") == "2"
    assert "no newer checkpoint (none) for three starts in a row" in site.log("killed", job)
    assert not list((site.root / "ckpt").glob(".*.requeues"))


@pytest.mark.slurm
def test_array_and_settings(site: Site) -> None:
    """Tasks of an array have directories of their own; what stands in cluster.env reaches each start."""
    settings = site.root / "launch" / "cluster.env"
    before = settings.read_text()
    settings.write_text(f'{before}\nPYTHON={sys.executable}\nCONTAINER="env MARK=1"\nDATA={site.data}\n')
    try:
        line = ("--nodes=2", "--array=3-4", "-J", "two words", "--gres=gpu:2", "--cpus-per-task=4")
        flags = (*FLAGS, "--stop-after", 40, "--ckpt-every", 0)
        env = {"OMP_NUM_THREADS": "1", "PYTHON": "/nowhere/python"}
        job = site.slurm.sbatch([*line, "launch/train.sbatch", *flags], cwd=site.root, env=env)
        for task in (3, 4):
            site.slurm.wait(f"{job}_{task}", "COMPLETED")
            run = json.loads((site.run_dir(f"two words-{task}") / "run.json").read_text())
            assert run["attempts"][0]["world_size"] == 4  # a process for each GPU
            assert run["config"]["data"] == [str(site.data)]
    finally:
        settings.write_text(before)
