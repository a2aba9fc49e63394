"""A real Slurm cluster on one machine, for tests: its controller here, its nodes hosts of tests/hosts.py.

    with Cluster(work) as slurm:
        job = slurm.sbatch(["--nodes=2", "launch/train.sbatch", "--config", "launch/laptop.toml"], cwd=ROOT)
        slurm.wait(job, "RUNNING")
        slurm.crash("n2")                        # every process of the node dies; boot("n2") brings it back
        slurm.wait(job, "COMPLETED")

A node may claim more CPUs and GPUs than there are: Slurm believes the configuration. Processes are not confined to what
they were given. Needs root and Debian's slurm-wlm.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import hosts

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo", "munged")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
OURS = ("SLURM_", "SBATCH_", "SRUN_", "TORCHELASTIC_")  # variables that would reach a job from the tests' own shell

CONF = """\
ClusterName=test
SlurmctldHost={controller}({outside})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge.sock,cred_expire={cred_expire}
SlurmctldPort={port}
SlurmdPort=6818
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool.%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd.%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd.%n.log
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerParameters=sched_min_interval=0,sched_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
MinJobAge=3600
FirstJobId={first_job}
SlurmdTimeout={slurmd_timeout}
ReturnToService=2
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={subnet}.[1-{nodes}] CPUs={cpus} RealMemory={memory_mb} Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{more}
"""


def why_not() -> str | None:
    """What this machine lacks to have a cluster, for pytest.skip; None where it can."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm)"
    return hosts.why_not()


class Cluster:
    """Nodes n1, n2, ... in one partition, main. Use it in a `with`; entering waits until all nodes are idle.

    cpus, gpus, memory_mb: what a node claims to have. cred_expire: seconds; a requeued job waits one longer (120 on a
    cluster that sets nothing). slurmd_timeout: seconds of silence after which a node is down (300 there).
    more: further lines of slurm.conf.
    """

    def __init__(
        self,
        work: Path,
        nodes: int = 2,
        cpus: int = 8,
        gpus: int = 2,
        memory_mb: int = 64_000,
        cred_expire: int = 10,
        slurmd_timeout: int = 20,
        more: Iterable[str] = (),
    ) -> None:
        self.work = work.resolve()
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self.net = hosts.Network(self.work / "net", self.names)
        self._gpus = gpus
        self._table = {
            **{"work": self.work, "nodes": nodes, "cpus": cpus, "gpus": gpus, "memory_mb": memory_mb},
            **{"cred_expire": cred_expire, "slurmd_timeout": slurmd_timeout, "more": "\n".join(more)},
            "controller": socket.gethostname().split(".")[0],
            "first_job": 1000 + os.getpid() % 60_000,
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        (self.work / "state").mkdir(parents=True)
        self.net.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind((self.net.outside, 0))
            port = probe.getsockname()[1]
        conf = CONF.format(**self._table, outside=self.net.outside, subnet=self.net.subnet, port=port)
        (self.work / "slurm.conf").write_text(conf)
        (self.work / "dev").mkdir()
        for i in range(self._gpus):  # devices that Slurm can hand out: each is /dev/null
            os.mknod(self.work / "dev" / f"gpu{i}", 0o20666, os.makedev(1, 3))
        gres = f"Name=gpu File={self.work}/dev/gpu[0-{self._gpus - 1}]\n" if self._gpus else ""
        (self.work / "gres.conf").write_text(gres)
        (self.work / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.work / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"--key-file": key, "--socket": "munge.sock", "--pid-file": "munged.pid"}
        files |= {"--log-file": "munged.log", "--seed-file": "munged.seed"}
        words = [f"{option}={self.work / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *words)
        self._until((self.work / "munge.sock").exists, "munged does not come up", 60)
        self._daemon("slurmctld", "-D", "-f", self.work / "slurm.conf")
        for name in self.names:
            (self.work / f"spool.{name}").mkdir()
            self._start_node(name)
        self._until(lambda: self.idle() == set(self.names), "the nodes are not idle", 60)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.net.__exit__(kind, error, trace)  # all that ran on the nodes ends with them
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def environment(self, **extra: str) -> dict[str, str]:
        """Variables for Slurm's programs, and for a job, without those of a Slurm that the tests themselves run in."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            clean.pop(name, None)
        return clean | {"SLURM_CONF": str(self.work / "slurm.conf")} | extra

    def call(
        self, *argv: object, cwd: Path | None = None, env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs here, as on a login node."""
        done = subprocess.run(
            [*map(str, argv)],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=self.environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        assert not check or done.returncode == 0, f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr}"
        return done

    def sbatch(self, argv: Sequence[object], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Submit; the job's id."""
        return self.call("sbatch", "--parsable", *argv, cwd=cwd, env=env).stdout.strip().split(";")[0]

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts, ExitCode, NodeList, BatchHost, Reason."""
        told = self.call("scontrol", "-o", "show", "job", job).stdout
        found = re.search(rf"(?:^|\s){name}=(\S*)", told)
        assert found, f"no {name} in: {told}"
        return found[1]

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def wait(self, job: str, states: str | Sequence[str] = ENDS, timeout: float = 600) -> str:
        """Wait until the job is in one of `states`; another end of it fails at once, with all logs."""
        wanted = (states,) if isinstance(states, str) else tuple(states)
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            if state in ENDS or time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state}, not {' or '.join(wanted)}\n{self.told(job)}")
            time.sleep(0.2)
        return state

    def until(self, condition: Callable[[], object], what: str, job: str | None = None, timeout: float = 600) -> None:
        """Poll until `condition()` is true; with `job`, fail at once where that has ended before."""

        def met() -> bool:
            if condition():
                return True
            assert job is None or self.state(job) not in ENDS or condition(), f"{what}\n{self.told(job)}"
            return False

        self._until(met, what, timeout, job)

    def idle(self) -> set[str]:
        """Nodes that are up and have nothing to do."""
        return set(self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout.split())

    def crash(self, node: str) -> None:
        """Pull the plug of a node."""
        self.net.crash(node)

    def boot(self, node: str, wait: bool = True) -> None:
        """Bring a crashed node back; with `wait`, until Slurm takes it for up."""
        self.net.boot(node)
        self._start_node(node)
        if wait:
            self._until(lambda: self._is_up(node), f"{node} does not come back", 120)

    def told(self, job: str | None = None) -> str:
        """What helps when something failed: the job, its log, the nodes, the ends of the daemons' logs."""
        parts = []
        if job is not None:
            about = self.call("scontrol", "show", "job", job, check=False).stdout
            parts.append(about)
            if log := re.search(r"StdOut=(\S+)", about):
                parts.append(_tail(Path(log[1]), 12_000))
        parts.append(self.call("sinfo", "-N", "-l", check=False).stdout)
        logs = sorted(p for p in self.work.glob("*.*") if p.suffix in (".log", ".out"))
        parts += [_tail(p, 2_500) for p in logs]
        return "\n".join(parts)

    def _is_up(self, node: str) -> bool:
        state = self.call("sinfo", "-h", "-N", "-n", node, "-o", "%T", check=False).stdout.strip()
        return bool(state) and not re.search(r"down|\*|unk|drain", state)

    def _daemon(self, *argv: object) -> None:
        with open(self.work / f"{argv[0]}.out", "ab") as out:
            process = subprocess.Popen(
                [*map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
                start_new_session=True,
            )
        self._daemons.append(process)

    def _start_node(self, name: str) -> None:
        log = self.work / f"slurmd.{name}.out"
        self.net.start(name, ["slurmd", "-D", "-N", name], log, env=self.environment(), cwd=self.work)

    def _until(self, condition: Callable[[], object], what: str, timeout: float, job: str | None = None) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.told(job)}"
            time.sleep(0.1)


def _tail(path: Path, size: int) -> str:
    with contextlib.suppress(OSError):
        return f"== {path}\n{path.read_text(errors='replace')[-size:]}"
    return f"== {path}: none"
