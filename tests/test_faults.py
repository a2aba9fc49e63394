"""Faults of every kind put into real runs: one clear line, the right exit code on every rank, nothing good lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, command, environment, one_error, rows, run
from kills import hashes, processes, steps

from fourscale import rundir

FLAGS = (*SMALL, "--ckpt-every", 3, "--async-ckpt", "off")  # 20 updates
FOREVER = (*SMALL, "--tokens", 10**9, "--eval-every", 0)


def together(work: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run cases one after another on two ranks (see faulty.py); for each, how it ended on rank 0 and on rank 1."""
    file = work / "cases.json"
    file.write_text(json.dumps([case | {"flags": [str(f) for f in case["flags"]]} for case in cases]))
    run("tests/faulty.py", file, nproc=2)
    return list(zip(*(json.loads(file.with_name(f"cases.json.{rank}").read_text()) for rank in (0, 1)), strict=True))


def refused(ended: list[dict[str, Any]], code: int = 2) -> str:
    """The one line, printed by rank 0 alone, of a run that both ranks ended with `code`."""
    assert [e["code"] for e in ended] == [code, code], ended
    lines = [line for e in ended for line in e["err"].splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0] in ended[0]["err"], ended
    assert "Traceback" not in ended[0]["err"] + ended[1]["err"]
    return lines[0]


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks stopped after 12 of 20 updates, with step_3, 6, 9 and 12; copied by those who harm it."""
    out = tmp_path_factory.mktemp("stopped") / "ckpt"
    run("train.py", "--data", data, "--ckpt-dir", out, *FLAGS, "--stop-after", 12, nproc=2)
    assert steps(out) == [3, 6, 9, 12]
    return out


# ---- checkpoints that are not what they were -------------------------------------------------------------------------


def truncated(step: Path) -> str:
    os.truncate(step / "__1_0.distcp", (step / "__1_0.distcp").stat().st_size - 1)
    return "__1_0.distcp"


def missing(step: Path) -> str:
    (step / "__0_0.distcp").unlink()
    return "__0_0.distcp"


def bit_flipped(step: Path) -> str:
    file = step / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


def swapped(step: Path) -> str:
    a, b = step / "__0_0.distcp", step / "__1_0.distcp"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return "_0.distcp"


class Trap:
    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sprung,)


def malicious(step: Path) -> str:
    """Metadata that touch a file when they are unpickled, under a table of files that was made to fit."""
    metadata = pickle.dumps(Trap(step.parent.parent / "sprung"))
    (step / ".metadata").write_bytes(metadata)
    table = json.loads((step / "step.json").read_text())
    table["files"][".metadata"] = {"size": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    table["sha256"] = rundir.seal(table)
    (step / "step.json").write_text(json.dumps(table))
    return ".metadata"


def unreadable_table(step: Path) -> str:
    (step / "step.json").write_text((step / "step.json").read_text()[:100])
    return "step.json"


HARMS = (truncated, missing, bit_flipped, swapped, malicious, unreadable_table)


@pytest.mark.slow
def test_a_harmed_checkpoint_is_named_and_an_older_one_used_where_asked(
    trained: Callable[..., Path], data: Path, stopped: Path, tmp_path: Path
) -> None:
    undisturbed = trained("--ckpt-every", 3, "--async-ckpt", "off", nproc=2)
    cases, named = [], []
    for harm in HARMS:
        out = tmp_path / harm.__name__ / "ckpt"
        shutil.copytree(stopped, out)
        named.append(harm(out / "step_12"))
        flags = ("--data", data, "--ckpt-dir", out, *FLAGS, "--resume", "auto")
        cases += [{"flags": flags}, {"flags": (*flags, "--resume-step", 9)}]
    ends = together(tmp_path, cases)
    for harm, name, bad, good in zip(HARMS, named, ends[::2], ends[1::2], strict=True):
        out = tmp_path / harm.__name__ / "ckpt"
        line = refused(bad)
        assert "step_12" in line and name in line, line
        if harm is not malicious:
            assert "--resume-step 9 goes on from step_9" in line, line
        assert [e["code"] for e in good] == [0, 0], good
        assert hashes(out / "step_20") == hashes(undisturbed / "step_20"), harm.__name__
        assert [r["update"] for r in rows(out)] == list(range(1, 21))
        assert not (out.parent / "sprung").exists()


@pytest.mark.slow
def test_leftovers_and_strangers_in_a_run_directory(
    trained: Callable[..., Path], data: Path, stopped: Path, tmp_path: Path
) -> None:
    """Unfinished saves and half-copied checkpoints are no checkpoints; one of another model is refused, by name."""
    undisturbed = trained("--ckpt-every", 3, "--async-ckpt", "off", nproc=2)
    other = tmp_path / "other"
    run("train.py", "--data", data, "--ckpt-dir", other, *SMALL, "--d-model", 48, "--stop-after", 15)
    leftovers, stranger = tmp_path / "leftovers", tmp_path / "stranger"
    for out in (leftovers, stranger):
        shutil.copytree(stopped, out)
    shutil.copytree(leftovers / "step_12", leftovers / "step_15.tmp-0123abcd")
    shutil.copytree(leftovers / "step_12", leftovers / "step_18")
    (leftovers / "step_18" / "step.json").unlink()
    shutil.copytree(other / "step_15", stranger / "step_15")
    ends = together(
        tmp_path,
        [{"flags": ("--data", data, "--ckpt-dir", out, *FLAGS, "--resume", "auto")} for out in (leftovers, stranger)],
    )
    assert [e["code"] for e in ends[0]] == [0, 0], ends[0]
    assert "resumed from step_12:" in ends[0][0]["out"]
    assert hashes(leftovers / "step_20") == hashes(undisturbed / "step_20")
    assert not list(leftovers.glob("*.tmp-*"))
    assert steps(leftovers) == [3, 6, 9, 12, 15, 18, 20]
    hashes(leftovers / "step_18")
    line = refused(ends[1])
    assert "step_15" in line and "another model's checkpoint" in line, line


# ---- guards ----------------------------------------------------------------------------------------------------------


def events(out: Path, name: str) -> list[dict[str, Any]]:
    table = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [row for row in table if row["event"] == name]


@pytest.mark.slow
def test_a_bad_update_is_dropped_on_all_ranks_whatever_made_it_bad(data: Path, tmp_path: Path) -> None:
    """NaN on either rank, a gradient that overflows, a spike: the same update dropped is the same run."""
    faults: dict[str, dict[str, Any]] = {
        "nan on rank 0": {"kind": "nan", "rank": 0, "updates": [6]},
        "nan on rank 1": {"kind": "nan", "rank": 1, "updates": [6]},
        "gradient on rank 1": {"kind": "gradient", "rank": 1, "updates": [6]},
        "spike": {"kind": "spike", "rank": None, "updates": [6]},
        "spike let through": {"kind": "spike", "rank": None, "updates": [6]},
        "three in a row": {"kind": "nan", "rank": 1, "updates": [7, 8, 9]},
        "two and two": {"kind": "nan", "rank": 1, "updates": [5, 6, 8, 9]},
    }
    extra = {"spike let through": ("--skip-spikes", 0)}
    cases = [
        {
            "flags": (
                *("--data", data, "--ckpt-dir", tmp_path / name.replace(" ", "_"), *FLAGS, "--skip-limit", 3),
                *extra.get(name, ()),
            ),
            "fault": fault,
        }
        for name, fault in faults.items()
    ]
    # The baseline is saved: the run goes on after update 6, and the same spike one update later is dropped too.
    cases.append(cases[0] | {"flags": (*FLAGS, "--data", data, "--ckpt-dir", tmp_path / "resumed", "--stop-after", 6)})
    cases[-1]["fault"] = None
    cases.append({"flags": ("--ckpt-dir", tmp_path / "resumed", "--resume", "auto", "--backend", "gloo")})
    cases[-1]["fault"] = {"kind": "spike", "rank": None, "updates": [0]}
    ends = dict(zip([*faults, "begin", "resumed"], together(tmp_path, cases), strict=True))

    dropped = {}
    for name in ("nan on rank 0", "nan on rank 1", "gradient on rank 1", "spike"):
        out = tmp_path / name.replace(" ", "_")
        assert [e["code"] for e in ends[name]] == [0, 0], ends[name]
        (event,) = events(out, "skipped")
        assert event["update"] == 7 and event["samples"] == [72, 84], event
        assert ("rank" in event["why"]) == name.startswith("nan"), event
        if name.startswith("nan"):
            assert event["why"].endswith(name[-1]), event
        done = json.loads((out / "DONE.json").read_text())
        assert done["skipped"] == 1 and done["update"] == 20
        table = rows(out)
        assert [r["applied"] for r in table] == [*range(1, 7), *range(6, 20)]
        dropped[name] = hashes(out / "step_20")
        for step in steps(out):
            hashes(out / f"step_{step}")
    assert len({json.dumps(h, sort_keys=True) for h in dropped.values()}) == 1

    loose = tmp_path / "spike_let_through"
    assert [e["code"] for e in ends["spike let through"]] == [0, 0]
    assert hashes(loose / "step_20") not in dropped.values() and not (loose / "events.jsonl").exists()

    line = refused(ends["three in a row"], code=1)
    assert "step 10: 3 updates in a row were dropped" in line, line
    assert steps(tmp_path / "three_in_a_row")[-1] == 9 and not (tmp_path / "three_in_a_row" / "DONE.json").exists()
    assert [e["code"] for e in ends["two and two"]] == [0, 0], ends["two and two"]
    assert json.loads((tmp_path / "two_and_two" / "DONE.json").read_text())["skipped"] == 4

    assert [e["code"] for e in ends["resumed"]] == [0, 0], ends["resumed"]
    (event,) = events(tmp_path / "resumed", "skipped")
    assert event["update"] == 7 and "spike" in event["why"]
    assert hashes(tmp_path / "resumed" / "step_20") == dropped["spike"]


# ---- disks -----------------------------------------------------------------------------------------------------------


def in_own_mounts(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    """A shell script in user and mount namespaces of its own: it may mount, and nothing outside notices."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("unshare -Urm is not allowed here")
    line = ["unshare", "-Urm", "bash", "-c", script, "bash", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=300)


def shell(*args: object, nproc: int | None = None) -> str:
    return " ".join(f"'{word}'" for word in command("train.py", *args, nproc=nproc))


@pytest.mark.slow
def test_a_full_disk_is_borne_then_stops_the_run_and_older_checkpoints_stay(
    trained: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """Room for three checkpoints and a half: the next save fails and is borne, the third in a row ends the run."""
    undisturbed = trained("--ckpt-every", 3, "--async-ckpt", "off", nproc=2)
    disk, out = tmp_path / "disk", tmp_path / "disk" / "ckpt"
    disk.mkdir()
    line = ("--data", data, "--ckpt-dir", out, *SMALL, "--ckpt-every", 2, "--async-ckpt")
    for mode in ("on", "off"):
        script = f"""
            mount -t tmpfs -o size=2400k tmpfs {disk}
            {shell(*line, mode, nproc=2)} > {tmp_path}/first.out 2> {tmp_path}/first.err
            echo $? > {tmp_path}/first.code
            cp -r {out} {tmp_path}/full_{mode}
            mount -o remount,size=50m {disk}
            {shell(*line, mode, "--resume", "auto", nproc=2)} 2>&1 || exit 1
            cp -r {out} {tmp_path}/done_{mode}
        """
        done = in_own_mounts(script)
        first = (tmp_path / "first.out").read_text()
        err = (tmp_path / "first.err").read_text()
        assert (tmp_path / "first.code").read_text() == "1\n", first + err
        (error,) = [text for text in err.splitlines() if text.startswith("error: ")]
        assert "could not be saved" in error and "no space left" in error and "0.7 MiB are needed" in error, error
        assert "3 failed saves in a row" in error and "--resume auto" in error, error
        assert "Traceback" not in err.split("torch/distributed")[0], err
        assert first.count("NOT SAVED") == 2 and "training goes on" in first, first
        full = tmp_path / f"full_{mode}"
        good = steps(full)
        assert good == [2, 4, 6], good
        for step in good:
            hashes(full / f"step_{step}")
        assert (full / "latest").read_text() == "step_6\n" and not list(full.glob("*.tmp-*"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed from step_6:" in done.stdout
        finished = tmp_path / f"done_{mode}"
        assert hashes(finished / "step_20") == hashes(undisturbed / "step_20")
        assert [r["update"] for r in rows(finished)] == list(range(1, 21))


def test_a_directory_that_cannot_be_written_or_holds_no_checkpoint(data: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=200k tmpfs {disk}
        {shell("--data", data, "--ckpt-dir", disk / "small", *SMALL)} 2> {tmp_path}/small.err
        echo $? > {tmp_path}/small.code
        mount -o remount,ro {disk}
        {shell("--data", data, "--ckpt-dir", disk / "ckpt", *SMALL)} 2> {tmp_path}/ro.err
        echo $? > {tmp_path}/ro.code
    """
    done = in_own_mounts(script)
    for name, words in (
        ("ro", (f"--ckpt-dir {disk / 'ckpt'}: read-only file system", "choose a writable directory")),
        ("small", (f"--ckpt-dir {disk / 'small'}: a checkpoint takes ", "are free on its disk")),
    ):
        err = (tmp_path / f"{name}.err").read_text()
        assert (tmp_path / f"{name}.code").read_text() == "2\n", err + done.stdout
        (line,) = err.splitlines()
        assert line.startswith("error: ") and all(w in line for w in words), line


# ---- ranks that are lost, and restarts -------------------------------------------------------------------------------


class Live:
    """A run under torchrun, in a process group of its own."""

    def __init__(self, out: Path, *args: object, nproc: int | None = 2, launcher: tuple[str, ...] = ()):
        self.out = out
        words = command("train.py", "--ckpt-dir", out, *args, nproc=nproc)
        if launcher:  # options of torchrun
            at = words.index("--standalone")
            words[at:at] = launcher
        self.log, self.err = out.with_suffix(".out"), out.with_suffix(".err")
        # As our launchers start it: torchrun itself would die of SIGUSR1, the ranks have handlers of their own.
        self.process = subprocess.Popen(
            ["bash", "-c", 'trap "" USR1; exec "$@"', "bash", *words],
            stdout=self.log.open("a"),
            stderr=self.err.open("a"),
            stdin=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
        )

    def wait_for(self, what: Callable[[], object], seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None and time.monotonic() < until, self.text()
            time.sleep(0.005)

    def wait_for_line(self, start: str) -> None:
        self.wait_for(lambda: f"\n{start}" in self.log.read_text())

    def text(self) -> str:
        return self.log.read_text()[-1500:] + self.err.read_text()[-4000:]

    def pid(self, rank: int) -> int:
        return next(pid for pid, r in processes(self.out).items() if r == str(rank))

    def errors(self) -> list[str]:
        return [line for line in self.err.read_text().splitlines() if line.startswith("error: ")]

    def end(self, within: float) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within} s\n{self.text()}") from None

    def close(self) -> None:
        for pid in (*processes(self.out), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    begun: list[Live] = []

    def begin(*args: Any, **kwargs: Any) -> Live:
        begun.append(Live(tmp_path / f"ckpt{len(begun)}", *args, **kwargs))
        return begun[-1]

    yield begin
    for job in begun:
        job.close()


def test_a_killed_rank_is_named_by_the_survivors(data: Path, live: Callable[..., Live]) -> None:
    job = live("--data", data, *FOREVER)
    job.wait_for_line("step 5 ")
    doomed = job.pid(1)
    os.kill(doomed, signal.SIGKILL)
    assert job.end(20) == 1
    (line,) = job.errors()
    assert line.startswith(f"error: rank 0: rank 1 (pid {doomed} on ") and "gone" in line, line
    assert "go on with --resume auto" in line, line


@pytest.mark.slow
@pytest.mark.parametrize("doomed,parallel", [(1, "ddp"), (0, "fsdp")])
def test_a_stopped_rank_is_named_within_the_timeout(
    data: Path, live: Callable[..., Live], doomed: int, parallel: str
) -> None:
    job = live("--data", data, *FOREVER, "--parallel", parallel, "--timeout", 5)
    job.wait_for_line("step 5 ")
    pid = job.pid(doomed)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    job.wait_for(job.errors, 20)
    assert time.monotonic() - began < 15
    (line,) = job.errors()
    assert line.startswith(f"error: rank {1 - doomed}: rank {doomed} (pid {pid} on ") and "stopped" in line, line
    os.kill(pid, signal.SIGKILL)
    assert job.end(20) == 1
    assert not processes(job.out) and job.errors() == [line]


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_rank(
    trained: Callable[..., Path], data: Path, live: Callable[..., Live]
) -> None:
    """The same torchrun goes on by itself, to the same bits; twice."""
    undisturbed = trained("--ckpt-every", 3, "--async-ckpt", "off", nproc=2)
    flags = ("--data", data, *SMALL, "--ckpt-every", 1, "--resume", "auto")
    job = live(*flags, launcher=("--max-restarts=2",))
    for at in (3, 8):
        job.wait_for(lambda at=at: max(steps(job.out), default=0) >= at)
        os.kill(job.pid(at % 2), signal.SIGKILL)
        job.wait_for(lambda at=at: job.log.read_text().count("resumed from step_") == (1 if at == 3 else 2))
    assert job.end(60) == 0, job.text()
    assert hashes(job.out / "step_20") == hashes(undisturbed / "step_20")
    assert [r["update"] for r in rows(job.out)] == list(range(1, 21))
    assert len(json.loads((job.out / "run.json").read_text())["attempts"]) == 3


def test_the_number_of_ranks_can_be_insisted_on(data: Path, tmp_path: Path) -> None:
    flags = ("--data", data, "--ckpt-dir", tmp_path / "ckpt", *SMALL, "--expect-world-size", 2)
    assert "--expect-world-size 2: there is 1 rank" in one_error(run("train.py", *flags, code=2))
    assert not (tmp_path / "ckpt").exists()


# ---- being asked to stop ---------------------------------------------------------------------------------------------

MOMENTS: dict[str, tuple[tuple[object, ...], Callable[[Live], bool]]] = {
    "training": (("--eval-every", 0), lambda job: "\nstep 5 " in job.log.read_text()),
    # Most of the time goes into evaluations; the next one has begun soon after an update.
    "evaluation": (
        ("--eval-every", 1, "--eval-tokens", 8_000, "--local-bsz", 1),
        lambda job: "\nstep 2 " in job.log.read_text(),
    ),
    "save": (
        ("--eval-every", 0, "--ckpt-every", 1, "--async-ckpt", "on", "--keep", 2),
        lambda job: len(steps(job.out)) > 1 and any(job.out.glob("step_*.tmp-*")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,whom,moment",
    [
        ("SIGTERM", "torchrun", "training"),
        ("SIGTERM", "rank 1", "save"),
        ("SIGINT", "all", "evaluation"),
        ("SIGINT", "rank 0", "training"),
        ("SIGINT", "torchrun", "save"),
        ("SIGUSR1", "rank 1", "evaluation"),
        ("SIGUSR1", "all", "save"),
        ("SIGTERM", "rank 0", "evaluation"),
    ],
)
def test_asked_to_stop_all_ranks_save_and_end_in_time(
    data: Path, live: Callable[..., Live], name: str, whom: str, moment: str
) -> None:
    flags, arrived = MOMENTS[moment]
    job = live("--data", data, *SMALL, "--tokens", 10**9, *flags)
    job.wait_for(lambda: arrived(job))
    number = getattr(signal, name)
    if whom == "all":  # torchrun and its ranks, as Ctrl-C in a terminal or Slurm's scancel does
        for pid in {job.process.pid, *processes(job.out)}:
            os.kill(pid, number)
    else:
        os.kill(job.process.pid if whom == "torchrun" else job.pid(int(whom[-1])), number)
    # torchrun that was signalled itself fails, whatever its ranks did: with 1, or torch aborts as it ends.
    failed = number != signal.SIGUSR1 and not whom.startswith("rank")
    assert (job.end(25) != 0) == failed, job.text()
    stopped = json.loads((job.out / "STOPPED.json").read_text())
    assert "SIG" in stopped["by"] or "signal" in stopped["by"]
    assert steps(job.out)[-1] == stopped["update"] == rows(job.out)[-1]["update"]
    assert (job.out / "latest").read_text() == f"step_{stopped['update']}\n"
    hashes(job.out / f"step_{stopped['update']}")
    assert not job.errors() and not list(job.out.glob("*.tmp-*")) and not processes(job.out)


def test_a_second_ctrl_c_ends_at_once(data: Path, live: Callable[..., Live]) -> None:
    """An update of many seconds: the first Ctrl-C waits for its end, the second doesn't."""
    big = ("--d-model", 512, "--n-layers", 4, "--n-heads", 4, "--ctx", 256, "--local-bsz", 32, "--global-bsz", 256)
    job = live("--data", data, *big, "--eval-every", 0, "--steps", 100, "--backend", "gloo", nproc=None)
    job.wait_for_line("256 windows an update")
    time.sleep(2)  # into the first update
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert job.process.poll() is None, "the update was too quick for this test"
    job.process.send_signal(signal.SIGINT)
    assert job.end(15) == 130  # a micro-batch of seconds, in torch, is not interrupted
    assert "SIGINT: saving and stopping after this update" in job.err.read_text()


# ---- two writers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_writer_is_refused_also_where_the_first_is_stopped(data: Path, live: Callable[..., Live]) -> None:
    job = live("--data", data, *FOREVER, "--ckpt-every", 5, "--keep", 2)
    job.wait_for(lambda: steps(job.out))
    second = ("--data", data, "--ckpt-dir", job.out, *FOREVER, "--resume", "auto")
    line = one_error(run("train.py", *second, code=2))
    assert f"another run is writing there (pid {job.pid(0)} on " in line, line
    for rank in (0, 1):
        os.kill(job.pid(rank), signal.SIGSTOP)
    line = one_error(run("train.py", *second, code=2))
    assert "seems stopped" in line and f"kill -CONT {job.pid(0)}" in line, line
    for rank in (0, 1):  # and it goes on as if nothing had been
        os.kill(job.pid(rank), signal.SIGCONT)
    last = steps(job.out)[-1]
    job.wait_for(lambda: steps(job.out)[-1] > last + 5)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end(25) == 1 and (job.out / "STOPPED.json").exists()
