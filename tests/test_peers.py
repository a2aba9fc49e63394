"""The watch over ranks: who is lost is named, once, in time; who is slow, paused or done is accused of nothing."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fourscale import peers

PROCESSES = multiprocessing.get_context("forkserver")  # torch is imported once for all ranks of all jobs
PROCESSES.set_forkserver_preload(["torch", "torch.distributed"])


def be_rank(rank: int, world: int, port: int, hosts_store: bool, timeout: float, what: str, log: str) -> None:
    """One rank of a job of three: joins the group, says that it is ready, then does `what`."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", GLOO_SOCKET_IFNAME="lo")
    minute = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0 and hosts_store, minute, wait_for_workers=False)
    patience = datetime.timedelta(seconds=4) if what == "elsewhere" else minute
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    watch = peers.Watch(store, rank, world, timeout)
    os.write(1, b"ready\n")
    if what in ("blocked", "elsewhere") and rank != 1:  # in a collective that rank 1 does not join
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            message = watch.account()
            if watch.speaks():
                os.write(2, f"error: rank {rank}: {message}\n".encode())
            os._exit(1)
    elif what == "busy":
        time.sleep(1)
        if rank == 1:  # holds the interpreter, while the others wait
            sys.setswitchinterval(100)
            until = time.monotonic() + 5
            while time.monotonic() < until:
                pass
            sys.setswitchinterval(0.005)
        dist.barrier()
    elif what == "one ends":
        if rank != 1:
            time.sleep(7)
            os.write(1, f"lost {watch.lost(1.0)}\n".encode())
            os._exit(0)
    elif what == "pauses":
        time.sleep(3)
        dist.barrier()
    else:
        time.sleep(300)
    watch.stop()
    os.write(1, b"stopped\n")
    if what != "one ends":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


class Job:
    def __init__(self, work: Path, what: str, timeout: float = 3, hosts_store: bool = False, world: int = 3):
        self.store = None
        if hosts_store:  # by rank 0
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
        else:  # as by torchrun
            self.store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
            port = self.store.port
        self.logs = [work / f"{rank}.log" for rank in range(world)]
        self.ranks = [
            PROCESSES.Process(target=be_rank, args=(rank, world, port, hosts_store, timeout, what, str(log)))
            for rank, log in enumerate(self.logs)
        ]
        for p in self.ranks:
            p.start()
        until = time.monotonic() + 60
        while not all(log.exists() and "ready" in log.read_text() for log in self.logs):
            assert time.monotonic() < until and all(p.is_alive() for p in self.ranks), self.text()
            time.sleep(0.05)

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def errors(self) -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith("error: ")]

    def send(self, name: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank].pid, name)

    def who(self, rank: int) -> str:
        return f"rank {rank} (pid {self.ranks[rank].pid} on {socket.gethostname()})"

    def codes(self, *ranks: int, within: float) -> list[int | None]:
        """Exit codes of ranks that must end by themselves within some seconds."""
        until = time.monotonic() + within
        for rank in ranks:
            self.ranks[rank].join(max(0.1, until - time.monotonic()))
            assert not self.ranks[rank].is_alive(), f"rank {rank} did not end in {within} s\n{self.text()}"
        return [self.ranks[rank].exitcode for rank in ranks]

    def kill(self) -> None:
        for p in self.ranks:
            p.kill()
            p.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*args: object, **kwargs: object) -> Job:
        jobs.append(Job(tmp_path, *args, **kwargs))
        return jobs[-1]

    yield begin
    for j in jobs:
        j.kill()


def test_a_stopped_rank_is_named_once_and_ends_the_ranks_that_wait_for_it(job: Callable[..., Job]) -> None:
    j = job("blocked")
    j.send(signal.SIGSTOP, 1)
    assert j.codes(0, 2, within=12) == [1, 1]
    (line,) = j.errors()
    assert line.startswith("error: rank ")  # 0, or another one that rank 0 has told
    assert f"{j.who(1)} has been silent for 3 s: stopped; " in line
    assert line.endswith("go on with --resume auto")


def test_a_silent_rank_0_is_found_by_the_others_and_ends_when_it_wakes(job: Callable[..., Job]) -> None:
    j = job("sleep")
    j.send(signal.SIGSTOP, 0)
    assert j.codes(1, 2, within=12) == [1, 1]
    (line,) = j.errors()
    assert f"{j.who(0)} has been silent for 3 s: stopped" in line
    j.send(signal.SIGCONT, 0)
    assert j.codes(0, within=12) == [1]
    assert j.errors() == [line]


def test_a_killed_rank_is_named_by_the_ranks_whose_collective_failed(job: Callable[..., Job]) -> None:
    j = job("blocked", timeout=60)
    time.sleep(0.5)  # into the collective
    j.send(signal.SIGKILL, 1)
    assert j.codes(0, 2, within=10) == [1, 1]
    (line,) = j.errors()
    assert f"{j.who(1)}: gone; " in line


@pytest.mark.slow
def test_a_rank_that_is_alive_but_elsewhere_is_not_called_gone(job: Callable[..., Job]) -> None:
    j = job("elsewhere", timeout=60)
    assert j.codes(0, 2, within=20) == [1, 1]
    (line,) = j.errors()
    assert f"no rank is gone, but {j.who(1)} did not come to the same point" in line


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])  # one stopped takes connections, and answers none
def test_the_store_gone_with_rank_0_is_told_as_such(job: Callable[..., Job], how: signal.Signals) -> None:
    j = job("sleep", timeout=6, hosts_store=True)
    time.sleep(1.5)  # a beat, with which the others learn whose the store is
    j.send(how, 0)
    assert j.codes(1, 2, within=25) == [1, 1]
    (line,) = j.errors()
    assert line.startswith("error: rank 1: the job's store has not answered for ") and j.who(0) in line


@pytest.mark.slow
def test_long_work_that_holds_the_interpreter_is_no_loss(job: Callable[..., Job]) -> None:
    j = job("busy", timeout=8)
    assert j.codes(0, 1, 2, within=20) == [0, 0, 0] and not j.errors()


@pytest.mark.slow
def test_a_paused_job_accuses_no_one_when_it_wakes(job: Callable[..., Job]) -> None:
    """All stopped for twice the timeout (a suspended laptop or batch job), the reader of the counters woken first."""
    j = job("pauses", timeout=6)
    j.send(signal.SIGSTOP, 1, 2)
    time.sleep(3)  # rank 0 has seen their last beats, and half of the timeout is used up
    j.send(signal.SIGSTOP, 0)
    time.sleep(12)
    j.send(signal.SIGCONT, 0)
    time.sleep(3)  # without a new start for all, the rest is used up too
    j.send(signal.SIGCONT, 1, 2)
    assert j.codes(0, 1, 2, within=20) == [0, 0, 0] and not j.errors()


def test_a_rank_that_ended_in_good_order_is_not_lost(job: Callable[..., Job]) -> None:
    j = job("one ends")  # rank 1 is gone for twice the timeout while the others go on
    assert j.codes(0, 1, 2, within=20) == [0, 0, 0] and not j.errors()
    assert j.text().count("lost []") == 2
