"""Several hosts on one machine, for tests: each is a network, UTS, mount and PID namespace with a name and an address.

    with Network(work, ["n1", "n2"]) as net:
        log = work / "n1.log"
        one = net.start("n1", ["torchrun", ...], log, env={"GLOO_SOCKET_IFNAME": "eth0"})
        net.cut("n2")                # its cable is out; mend() puts it in again
        net.crash("n2")              # every process there dies at once; boot() brings it back, with nothing running

They are joined by a bridge of this machine, which they reach as `net.outside`. Needs root, `ip`, `unshare`, `nsenter`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

PREFIX = "fsh"  # of all names made here; the pid of their maker follows


def why_not() -> str | None:
    """What this machine lacks to have hosts, for pytest.skip; None where it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid():
        return "needs root for network namespaces"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if not shutil.which(tool)]:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as work, Network(Path(work), ["probe"]) as net:
            if net.run("probe", ["true"], Path(work) / "log", timeout=30):
                return "may start no program in a namespace here"
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as e:
        return f"may make no namespaces here: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
    return None


class Network:
    """Named hosts with addresses in a /24 that nothing else here uses. Use it in a `with`; entering boots all hosts."""

    def __init__(self, work: Path, names: Sequence[str]) -> None:
        self.work = work
        self.names = list(names)
        self.id = f"{PREFIX}{os.getpid()}"
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        _clear_leftovers()
        self.work.mkdir(parents=True, exist_ok=True)
        self.subnet = _free_subnet()
        self.outside = f"{self.subnet}.254"
        lines = ["127.0.0.1 localhost", f"{self.outside} {os.uname().nodename}"]
        lines += [f"{self.address(name)} {name}" for name in self.names]
        (self.work / "hosts").write_text("\n".join(lines) + "\n")
        (self.work / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        try:
            _ip("link", "add", f"{self.id}b", "type", "bridge")
            _ip("addr", "add", f"{self.outside}/24", "dev", f"{self.id}b")
            _ip("link", "set", f"{self.id}b", "up")
            for name in self.names:
                space, cable = self._space(name), self.cable(name)
                _ip("netns", "add", space)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", cable, "master", f"{self.id}b", "up")
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                self.boot(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._inits):
            self.crash(name)
        for process in self._started:
            process.wait()
        _remove(self.id)

    def address(self, name: str) -> str:
        return f"{self.subnet}.{self.names.index(name) + 1}"

    def cable(self, name: str) -> str:
        """This machine's end of a host's cable; what it receives (rx_bytes) is what the host sent."""
        return f"{self.id}v{self.names.index(name) + 1}"

    def sent(self, name: str) -> int:
        """Bytes that a host has sent over its cable so far, headers of Ethernet, IP and TCP included."""
        return int(Path(f"/sys/class/net/{self.cable(name)}/statistics/rx_bytes").read_text())

    def boot(self, name: str) -> None:
        """Bring a host up, with nothing running on it."""
        files = " && ".join(f"mount --bind '{self.work}/{f}' /etc/{f}" for f in ("hosts", "nsswitch.conf"))
        inner = f"mount --make-rprivate / && hostname {name} && {files} && touch '{self.work}/{name}.up'"
        (self.work / f"{name}.up").unlink(missing_ok=True)
        space, spaces = self._space(name), ("--uts", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
        command = f"{inner} && exec sleep infinity"
        self._inits[name] = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", *spaces, "bash", "-c", command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 30
        while not (self.work / f"{name}.up").exists():
            assert self._inits[name].poll() is None and time.monotonic() < deadline, f"{name} does not come up"
            time.sleep(0.02)

    def start(
        self,
        name: str,
        argv: Sequence[object],
        log: Path | None = None,
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; stdout and stderr go to the end of `log`. Signal it by `signal` below."""
        out = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115
        options = ("-m", "-u", "-n", "-p", f"--wd={cwd or Path.cwd()}")
        process = subprocess.Popen(
            ["nsenter", "-t", str(self._init(name)), *options, *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if log else subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        if log:
            out.close()
        self._started.append(process)
        return process

    def run(self, name: str, argv: Sequence[object], log: Path, timeout: float = 120, **more: object) -> int:
        """`start`, and wait for its exit code."""
        return self.start(name, argv, log, **more).wait(timeout)

    def pid(self, process: subprocess.Popen[bytes]) -> int:
        """The pid, here, of what `start` started: nsenter's only child."""
        deadline = time.monotonic() + 10
        while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            assert process.poll() is None and time.monotonic() < deadline, "it has ended"
            time.sleep(0.02)
        return int(children[0])

    def signal(self, process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
        os.kill(self.pid(process), number)

    def crash(self, name: str) -> None:
        """All processes of a host die at once, without a word to anyone else: its cable goes down first."""
        init = self._inits.pop(name)
        with contextlib.suppress(RuntimeError):
            self.cut(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid_of_init(init), signal.SIGKILL)
        init.kill()
        init.wait()
        with contextlib.suppress(RuntimeError):
            self.mend(name)

    def cut(self, name: str) -> None:
        _ip("link", "set", self.cable(name), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self.cable(name), "up")

    def _space(self, name: str) -> str:
        return f"{self.id}n{self.names.index(name) + 1}"

    def _init(self, name: str) -> int:
        return self._pid_of_init(self._inits[name])

    @staticmethod
    def _pid_of_init(init: subprocess.Popen[bytes]) -> int:
        """Here `ip netns exec` has become `unshare`, whose child is the host's process 1."""
        children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
        return int(children[0]) if children else init.pid


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _free_subnet() -> str:
    taken = _ip("-4", "route", "show") + _ip("-4", "addr", "show")
    start = os.getpid()
    for i in range(start, start + 4000):
        subnet = f"10.{200 + i // 250 % 50}.{i % 250}"
        if f"{subnet}." not in taken:
            return subnet
    raise RuntimeError("no free 10.x.y.0/24 here")


def _clear_leftovers() -> None:
    """Of tests that were killed: what bears the pid of no living process."""
    found = [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
    found += [line.split(": ")[1].split("@")[0] for line in _ip("-o", "link").splitlines()]
    for maker in {_maker(name) for name in found} - {None}:
        if not Path(f"/proc/{maker}").exists():
            _remove(f"{PREFIX}{maker}")


def _maker(name: str) -> int | None:
    digits = ""
    for c in name.removeprefix(PREFIX) if name.startswith(PREFIX) else "":
        if not c.isdigit():
            break
        digits += c
    return int(digits) if digits else None


def _remove(prefix: str) -> None:
    def ours(names: Iterable[str]) -> list[str]:
        return [n for n in names if n.startswith(prefix) and not n[len(prefix) : len(prefix) + 1].isdigit()]

    for space in ours(line.split()[0] for line in _ip("netns", "list").splitlines() if line):
        for pid in _ip("netns", "pids", space).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", space)  # its end of the cable, and with it ours, goes too
    for link in ours(line.split(": ")[1].split("@")[0] for line in _ip("-o", "link").splitlines()):
        with contextlib.suppress(RuntimeError):
            _ip("link", "del", link)
