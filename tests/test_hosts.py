"""Several hosts without a scheduler: launch/multinode.sh, links that fail, nodes that differ, leave and come back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts
import pytest
import torch.distributed as dist
from conftest import ROOT, environment, one_error, rows, run
from hosts import Network

from fourscale import budget, costs, nodes
from fourscale.cli import InputError, RunFailed, parse
from fourscale.config import TrainConfig
from fourscale.costs import Layout

why_not = hosts.why_not()
needs_hosts = pytest.mark.skipif(why_not is not None, reason=why_not or "")
# A model that a core trains at some 100 updates a second: 12 windows of 32 tokens an update.
TINY = (
    *("--d-model", 32, "--n-layers", 2, "--n-heads", 4, "--ctx", 32, "--global-bsz", 12, "--local-bsz", 6),
    *("--lr", 1e-3, "--warmup", 4, "--eval-every", 0, "--sample-tokens", 0, "--log-every", 50, "--backend", "gloo"),
)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "net", ["n1", "n2"]) as network:
        yield network


def start(
    net: Network, name: str, *flags: object, root: Path = ROOT, **names: object
) -> tuple[subprocess.Popen[bytes], Path]:
    """multinode.sh on a host: the process, and where its output goes."""
    log = net.work.parent / f"{name}.log"
    env = {k: v for k, v in environment().items() if k != "GLOO_SOCKET_IFNAME"} | {"PYTHON": sys.executable}
    words = [f"{k}={v}" for k, v in ({"HEAD": "n1", "NNODES": 2, "PROCS": 1} | names).items()]
    return net.start(name, [root / "launch" / "multinode.sh", *words, *flags], log, env=env, cwd=root), log


def both(net: Network, *flags: object, **names: object) -> list[subprocess.Popen[bytes]]:
    return [start(net, name, *flags, NODE_RANK=i, **names)[0] for i, name in enumerate(net.names)]


def until(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def step(run_dir: Path) -> int:
    """The newest checkpoint's."""
    with contextlib.suppress(OSError):
        return int((run_dir / "latest").read_text()[5:])
    return 0


def errors(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "DONE.json").read_text())["digest"]


# ---- the launcher's own words, on one host ---------------------------------------------------------------------------


def launch(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "launch" / "multinode.sh", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(PYTHON=sys.executable, **env),
        timeout=60,
    )


@pytest.mark.parametrize(
    "words, said",
    [
        ("NNODES=2 NODE_RANK=0", "HEAD: name the machine"),
        ("HEAD=localhost NNODES=2 NODE_RANK=0", "HEAD=localhost: each machine would take itself for it"),
        ("HEAD=127.0.0.1 NNODES=1:2", "HEAD=127.0.0.1: each machine would take itself for it"),
        ("HEAD=a NNODES=1 NODE_RANK=0", "NNODES=1: a number from 2 up is needed"),
        ("HEAD=a NNODES=two NODE_RANK=0", "NNODES=two: a number from 2 up is needed"),
        ("HEAD=a NNODES=2:1", "NNODES=2:1: a number from 2 up is needed, or a range such as 1:2"),
        ("HEAD=a NNODES=1:2x", "NNODES=1:2x: a number from 2 up is needed, or a range such as 1:2"),
        ("HEAD=a NNODES=2 NODE_RANK=0 PORT=70000", "PORT=70000: ports are numbered 1 to 65535"),
        ("HEAD=a NNODES=2", "NODE_RANK=: give this machine's number, 0 on a"),
        ("HEAD=a NNODES=2 NODE_RANK=2", "NODE_RANK=2: NNODES=2 machines are numbered 0 to 1"),
        ("HEAD=a NNODES=2 NODE_RANK=0 PROCS=0", "PROCS=0: a whole number from 1 up is needed"),
        ("HEAD=a NNODES=2 NODES_RANK=0", "NODES_RANK: not a name that is used here"),
        ("HEAD=no.such.host.invalid NNODES=2 NODE_RANK=0", "HEAD=no.such.host.invalid: .* can't resolve it"),
        ("HEAD=203.0.113.7 NNODES=2 NODE_RANK=0", "HEAD=203.0.113.7: is not .*, where NODE_RANK=0 was started"),
    ],
)
def test_what_the_launcher_refuses(words: str, said: str) -> None:
    done = launch(*words.split(), "--data", "./data")
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(f"error: {said}.*\n", done.stderr), done.stderr


def test_an_elastic_line_is_planned_for_its_fewest_ranks(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$2" != fourscale.nodes ] || echo 10.0.0.1 other\n')
    fake.chmod(0o755)
    assert launch("HEAD=n1", "NNODES=2:4", "PROCS=8", f"PYTHON={fake}", "--shard-size", 8).returncode == 0
    _, plan, torchrun = (tmp_path / "calls").read_text().splitlines()
    assert plan == "train.py --resume auto --shard-size 8 --plan --expect-world-size 16"
    assert torchrun.endswith(" train.py --resume auto --shard-size 8") and "is_host=0" in torchrun


def test_a_busy_port_is_named_before_torchrun_starts() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch("NNODES=2", "NODE_RANK=0", HEAD=socket.gethostname(), PORT=str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: PORT={port}: address already in use on "), done.stderr


def test_help_needs_nothing() -> None:
    for words in (["--help"], ["HEAD=n1", "NNODES=2", "NODE_RANK=0", "--steps", "3", "-h"]):
        done = launch(*words, PATH="/usr/bin:/bin")
        assert done.returncode == 0 and done.stdout.startswith("launch/multinode.sh [NAME=VALUE ...]")


def test_out_of_memory_is_one_line(data: Path, tmp_path: Path) -> None:
    shape = ("--d-model", 256, "--n-layers", 1, "--ctx", 2048, "--global-bsz", 4096, "--local-bsz", 4096)
    argv = [sys.executable, ROOT / "train.py", "--data", data, *TINY, *shape, "--ckpt-dir", tmp_path, "--steps", 9]
    limited = ["bash", "-c", 'ulimit -v 8000000; exec "$@"', "x", *map(str, argv)]
    done = subprocess.run(limited, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 1
    line = one_error(done)
    assert re.match(r"error: rank 0 on \S+: out of memory \(.*can't allocate memory: .*; lower --local-bsz", line), line


# ---- what nodes tell each other --------------------------------------------------------------------------------------


def word(host: str, fault: str | None = None, **versions: str) -> dict[str, object]:
    same = {"fourscale": "1 (code a)", "torch": "2.13.0", "Python": "3.11.2", "numpy": "2.1.0"}
    return {"host": host, "fault": fault, "versions": same | versions}


def judged(*words: dict[str, object], of: int | None = None, **more: dict[str, object]) -> dict[str, object]:
    table = {f"word/{i}": word for i, word in enumerate(words)} | more
    return nodes._judged(lambda keys: {k: table[k] for k in keys if k in table}, of or len(words), 0.2)


def test_code_and_torch_must_agree_and_the_rest_is_noted() -> None:
    assert judged(word("a"), word("b")) == {"error": None, "usage": True, "notes": []}
    verdict = judged(word("a"), word("b", torch="2.11.0"), word("c"))
    assert verdict["error"].startswith("nodes run different versions: torch 2.13.0 on a, c and 2.11.0 on b; give all")
    verdict = judged(word("a"), word("b", Python="3.12.1", numpy="2.2.0"))
    assert verdict["error"] is None
    assert verdict["notes"] == [
        "nodes run different versions: Python 3.11.2 on a and 3.12.1 on b",
        "nodes run different versions: numpy 2.1.0 on a and 2.2.0 on b",
    ]


def test_a_fault_is_named_with_its_node_unless_all_have_it() -> None:
    assert judged(word("a", "no GPU"), word("b", "no GPU"))["error"] == "no GPU"
    assert judged(word("a"), word("b", "no GPU"))["error"] == "b: no GPU"
    assert judged(word("a"), word("b", "no GPU"), fault={"host": "b", "fault": "no GPU"})["error"] == "b: no GPU"
    assert judged(word("a"), word("b"), of=3, fault={"host": "c", "fault": "no GPU"})["error"] == "c: no GPU"
    verdict = judged(word("a"), of=3)
    assert verdict["error"].startswith("no word from node 1, 2 of 3 for 0 s") and not verdict["usage"]


def a_rank(monkeypatch: pytest.MonkeyPatch, **names: int) -> None:
    for name, value in {"GROUP_WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1, **names}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(nodes, "interfaces", dict)  # of a machine that can't tell


def test_a_node_has_spoken_when_all_its_ranks_have_and_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than GPUs: the first ranks of a node are well, and may come first."""
    a_rank(monkeypatch, GROUP_RANK=1, LOCAL_WORLD_SIZE=2)
    store = dist.HashStore()
    store.set("verdict", json.dumps({"error": None, "usage": True, "notes": []}))
    nodes.meet(store, 2, None, 1)
    assert not store.check(["word/1"])
    nodes.meet(store, 3, InputError("1 GPU for 2 ranks"), 1)
    assert store.check(["word/1"]) and json.loads(store.get("fault"))["fault"] == "1 GPU for 2 ranks"
    with pytest.raises(InputError, match="node 1 has joined this job before"):  # its line was started twice
        nodes.meet(store, 2, None, 1)


def test_a_store_of_an_earlier_attempt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a_rank(monkeypatch, GROUP_RANK=0)
    store = dist.HashStore()
    store.set("verdict", "{}")
    with pytest.raises(RunFailed, match=r"that of an earlier attempt; .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        nodes.meet(store, 0, None, 1)


# ---- two hosts -------------------------------------------------------------------------------------------------------


@needs_hosts
def test_a_cut_link_ends_both_ends_in_time_and_the_same_lines_go_on(net: Network, data: Path, tmp_path: Path) -> None:
    flags = ("--data", data, *TINY, "--steps", 120, "--ckpt-every", 30, "--timeout", 6)
    out = tmp_path / "ckpt"
    processes = both(net, *flags, "--ckpt-dir", out)
    until(lambda: step(out) >= 30)
    net.cut("n2")
    cut = time.monotonic()
    assert [p.wait(90) for p in processes] == [1, 1]
    assert time.monotonic() - cut < 75  # and not the 15 minutes for which TCP resends; about 12 s on an idle machine
    lost = [errors(tmp_path / f"{name}.log") for name in net.names]
    assert [len(lines) for lines in lost] == [1, 1], lost
    assert re.search(r"rank 1 \(pid \d+ on n2\).*(gone|silent).*go on with --resume auto", lost[0][0])
    assert re.search(r"rank 0( \(pid \d+ on n1\))?, its launcher or its node is gone.*--resume auto", lost[1][0])
    assert 30 <= step(out) < 120 and not (out / "DONE.json").exists()

    net.mend("n2")
    processes = both(net, *flags, "--ckpt-dir", out)
    alone = tmp_path / "alone"
    run("train.py", *flags, "--ckpt-dir", alone, "--timeout", 60, nproc=2)
    assert [p.wait(180) for p in processes] == [0, 0]
    assert "resumed from step_" in (tmp_path / "n1.log").read_text()
    assert digest(out) == digest(alone)


@needs_hosts
def test_nodes_of_another_version_are_refused_before_any_update(net: Network, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("fourscale", "launch"):
        shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(ROOT / "train.py", other)
    init = other / "fourscale" / "__init__.py"
    init.write_text(re.sub('__version__ = ".*"', '__version__ = "9.9.9"', init.read_text()))
    flags = ("--data", data, *TINY, "--steps", 20, "--ckpt-dir", tmp_path / "ckpt")
    processes = [start(net, "n1", *flags, NODE_RANK=0)[0], start(net, "n2", *flags, NODE_RANK=1, root=other)[0]]
    assert [p.wait(120) for p in processes] == [1, 1]  # by torchrun
    for name in net.names:
        (line,) = errors(tmp_path / f"{name}.log")
        differ = r"fourscale \S+ \(code \w{8}\) on n1 and 9\.9\.9 \(code \w{8}\) on n2"
        assert re.match(f"error: nodes run different versions: {differ}; give all nodes one checkout", line), line
    assert not (tmp_path / "ckpt").exists()


@needs_hosts
def test_what_is_wrong_on_one_node_ends_all_of_them_at_once(net: Network, data: Path, tmp_path: Path) -> None:
    """Here torchrun is called by hand, so that nothing is looked at before it."""
    flags = ("--data", data, *TINY, "--steps", 20, "--ckpt-dir", tmp_path / "ckpt", "--timeout", 300)
    processes = []
    for i, (name, interface) in enumerate(zip(net.names, ("eth0", "eth9"), strict=True)):
        words = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={i}", "--nproc_per_node=1")
        argv = [*words, "--rdzv_endpoint=n1:29500", ROOT / "train.py", *flags]
        env = environment(GLOO_SOCKET_IFNAME=interface)
        processes.append(net.start(name, argv, tmp_path / f"{name}.log", env=env, cwd=tmp_path))
    assert [p.wait(120) for p in processes] == [1, 1]
    for name in net.names:
        (line,) = errors(tmp_path / f"{name}.log")
        assert line == f"error: n2: GLOO_SOCKET_IFNAME=eth9: no such interface; there: eth0 ({net.address('n2')})"


def worker(net: Network, launcher: subprocess.Popen[bytes]) -> int:
    """The pid, here, of a launcher's only rank."""
    agent = net.pid(launcher)
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("no rank there")


@needs_hosts
@pytest.mark.slow
def test_a_crashed_host_and_a_killed_worker(net: Network, data: Path, tmp_path: Path) -> None:
    flags = (
        "--data",
        data,
        *TINY,
        "--steps",
        2000,
        "--ckpt-every",
        20,
        "--timeout",
        6,
        "--ckpt-dir",
        tmp_path / "ckpt",
    )
    processes = both(net, *flags)
    until(lambda: step(tmp_path / "ckpt") >= 20)
    os.kill(worker(net, processes[1]), signal.SIGKILL)  # as the kernel does where memory runs out
    assert [p.wait(90) for p in processes] == [1, 1]
    (line,) = errors(tmp_path / "n1.log")
    assert re.search(r"rank 1 \(pid \d+ on n2\): gone or stopped; see its own message or its node's log", line)
    assert "Signal 9 (SIGKILL) received by PID" in (tmp_path / "n2.log").read_text()  # torchrun's own

    (tmp_path / "n2.log").unlink()
    before = step(tmp_path / "ckpt")
    processes = both(net, *flags)
    until(lambda: step(tmp_path / "ckpt") > before)
    net.crash("n1")  # the host of the store
    assert processes[1].wait(90) == 1
    (line,) = errors(tmp_path / "n2.log")
    assert re.search(r"rank 0( \(pid \d+ on n1\)|, its launcher or its node is gone)", line) and line.endswith(
        "go on with --resume auto"
    )


@needs_hosts
@pytest.mark.slow
def test_elastic_a_node_is_lost_returns_and_leaves_in_order(net: Network, data: Path, tmp_path: Path) -> None:
    out, steps = tmp_path / "ckpt", 320
    flags = ("--data", data, *TINY, "--steps", steps, "--ckpt-every", 30, "--timeout", 6, "--keep", 2)
    names = {"NNODES": "1:2", "LAST_CALL": 2}

    def join(name: str) -> subprocess.Popen[bytes]:
        return start(net, name, *flags, "--ckpt-dir", out, **names)[0]

    def worlds() -> list[int]:
        run_json = out / "run.json"
        return [a["world_size"] for a in json.loads(run_json.read_text())["attempts"]] if run_json.exists() else []

    def rejoin() -> subprocess.Popen[bytes]:
        """n2 comes while n1's rank stands still: however long that takes, the run isn't finished by then."""
        pid, log = worker(net, first), tmp_path / "n1.log"
        told = log.read_text().count("closing signal SIGTERM")
        os.kill(pid, signal.SIGSTOP)
        second = join("n2")
        until(lambda: log.read_text().count("closing signal SIGTERM") > told)
        os.kill(pid, signal.SIGCONT)
        return second

    first, second = join("n1"), join("n2")
    until(lambda: worlds()[-1:] == [2] and step(out) >= 30)  # whichever was up first may have begun alone
    net.crash("n2")
    until(lambda: worlds()[-1] == 1)
    net.boot("n2")
    begun = json.loads((out / "run.json").read_text())["attempts"][-1]["from_update"]
    until(lambda: step(out) > begun)
    second = rejoin()
    until(lambda: worlds()[-1] == 2)
    returned = json.loads((out / "run.json").read_text())["attempts"][-1]["from_update"]
    until(lambda: step(out) > returned)
    net.signal(second)
    assert second.wait(60) != 0
    left_at = step(out)
    until(lambda: worlds()[-1] == 1)
    assert json.loads((out / "run.json").read_text())["attempts"][-1]["from_update"] == left_at  # nothing lost
    assert first.wait(240) == 0
    assert json.loads((out / "DONE.json").read_text())["update"] == steps
    found = rows(out)
    assert [row["update"] for row in found] == list(range(1, steps + 1))

    run("train.py", *flags, "--ckpt-dir", tmp_path / "alone")
    off = [abs(a["loss"] - b["loss"]) for a, b in zip(found, rows(tmp_path / "alone"), strict=True)]
    assert max(off[:50]) < 5e-5 and max(off) < 0.02, max(off)  # rounding grows over the updates; a lost one is 0.1


@needs_hosts
@pytest.mark.slow
def test_bytes_that_cross_between_hosts_are_those_of_the_plan(net: Network, data: Path, tmp_path: Path) -> None:
    """On hosts whose own names resolve to 127.0.1.1, as on Debian; two runs of each, whose start cancels out."""
    for name in net.names:
        own = tmp_path / f"{name}.hosts"
        own.write_text((net.work / "hosts").read_text().replace(f"{net.address(name)} {name}\n", f"127.0.1.1 {name}\n"))
        assert net.run(name, ["mount", "--bind", own, "/etc/hosts"], tmp_path / "mount.log") == 0
    shape = ("--d-model", 128, "--n-layers", 4, "--n-heads", 4, "--ctx", 32, "--global-bsz", 8, "--local-bsz", 2)
    more = ("--warmup", 2, "--eval-every", 0, "--sample-tokens", 0, "--ckpt-every", 0, "--backend", "gloo")
    for mode in (("--parallel", "fsdp"), ("--parallel", "hsdp", "--shard-size", 2)):
        sent = {}
        for steps in (4, 14):
            flags = (*shape, *more, *mode, "--steps", steps)
            before = net.sent("n2")
            processes = both(net, "--data", data, *flags, "--ckpt-dir", tmp_path / f"{mode[1]}{steps}", PROCS=2)
            assert [p.wait(120) for p in processes] == [0, 0], (tmp_path / "n2.log").read_text()[-2000:]
            sent[steps] = net.sent("n2") - before
        cfg = budget.plan(parse(TrainConfig, list(map(str, flags))), 257, 4, "cpu", "fp32").cfg
        wire = costs.wire(cfg, Layout(mode[1], 4, 4 if mode[1] == "fsdp" else 2), 2)
        rings = wire.total + wire.scatter  # gloo scatters by an all-reduce
        measured = (sent[14] - sent[4]) / 10
        print(f"{mode[1]}: {measured:,.0f} bytes an update from a host of 2 ranks; the plan {rings:,}")
        assert measured == pytest.approx(rings, rel=0.03)  # headers, norms, the message of each update
