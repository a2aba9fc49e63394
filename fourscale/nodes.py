"""What the nodes of a job tell each other before they join a group: addresses, versions, what is wrong with one.

    python -m fourscale.nodes HEAD:PORT SECONDS head|other|either

is how launch/multinode.sh looks at a machine before torchrun starts there: it prints the address by which the others
reach it, and `head` or `other`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import ipaddress
import json
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale import __version__
from fourscale.cli import InputError, RunFailed, door, say

if TYPE_CHECKING:
    import torch.distributed as dist

SIOCGIFADDR = 0x8915  # Linux
MUST_AGREE = ("fourscale", "torch")  # the others may differ: no update depends on them
GRACE_S = 3.0  # for other nodes to tell of the same fault
WORD_FIRST_S = 1.0  # before rank 0 ends, since the store may end with it


# ---- addresses -----------------------------------------------------------------------------------------------------


def interfaces() -> dict[str, str | None]:
    """IPv4 address of each network interface of this machine, None for one without; empty where that can't be told."""
    if sys.platform != "linux":
        return {}
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            found[name] = None
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(s.fileno(), SIOCGIFADDR, request)[20:24])
    return found


def gloo_interface(head: str, port: int) -> str | None:
    """The interface that gloo should be told to use on this node; None where it does well by itself.

    gloo binds to the address that the machine's own name resolves to: on Debian and its kin 127.0.1.1, by which no
    other node reaches it. Then the one by which this node reaches `head` is taken. Raises InputError where
    GLOO_SOCKET_IFNAME names none, or loopback, and where nothing tells which one to take. Where `head` is loopback by
    its own words, all "nodes" of the job are on this machine.
    """
    there = interfaces()
    if not there or head == "localhost" or _literal_loopback(head):
        return None
    usable = {name: address for name, address in there.items() if address and not _loopback(address)}
    list_of = ", ".join(f"{name} ({address})" for name, address in usable.items()) or "none but loopback"
    if asked := os.environ.get("GLOO_SOCKET_IFNAME"):
        for name in asked.split(","):
            if name not in there:
                raise InputError(f"GLOO_SOCKET_IFNAME={asked}: no such interface; there: {list_of}")
            if there[name] and _loopback(there[name]):
                raise InputError(f"GLOO_SOCKET_IFNAME={asked}: no other node reaches loopback; there: {list_of}")
        return None
    own = socket.gethostname()
    addresses = _resolved(own)
    if addresses and not all(map(_loopback, addresses)):
        return None
    route = _route_to(head, port)
    chosen = [name for name, address in usable.items() if address == route] or list(usable)
    if len(chosen) == 1:
        return chosen[0]
    what = f"resolves to {addresses[0]}, by which no other node reaches it" if addresses else "does not resolve"
    raise InputError(f"this machine's name {own} {what}; set GLOO_SOCKET_IFNAME to its interface; there: {list_of}")


def _resolved(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _literal_loopback(host: str) -> bool:
    try:
        return _loopback(host)
    except ValueError:
        return False  # a name: Debian has a machine's own at 127.0.1.1, and others reach it


def _route_to(host: str, port: int) -> str | None:
    """This machine's address on the way to `host`; no packet is sent."""
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return str(s.getsockname()[0])
    return None


# ---- before torchrun -----------------------------------------------------------------------------------------------


def look(endpoint: str, seconds: float, role: str) -> tuple[str, str]:
    """(address by which other nodes reach this machine, 'head' or 'other'), after waiting until the head answers.

    endpoint: HEAD:PORT. role: head, other, or either where the address decides. Raises InputError, naming what
    launch/multinode.sh calls it, for a head that isn't this machine, a busy port, a name that leads nowhere or to
    loopback; RunFailed where the head has not answered for `seconds`.
    """
    head, _, port_text = endpoint.rpartition(":")
    port, own = int(port_text), socket.gethostname()
    if not 0 < port < 65536:
        raise InputError(f"PORT={port}: ports are numbered 1 to 65535")
    addresses = _resolved(head)
    if not addresses:
        raise InputError(f"HEAD={head}: {own} can't resolve it; give an address of that machine")
    local = _binds(addresses[0])
    if role == "head" and not local:
        raise InputError(f"HEAD={head}: is not {own}, where NODE_RANK=0 was started; 0 belongs to HEAD itself")
    if role == "other" and local:
        way = "give HEAD's address on the network" if _loopback(addresses[0]) else "only HEAD itself is NODE_RANK=0"
        raise InputError(f"HEAD={head}: is {own} itself ({addresses[0]}), started as another node; {way}")
    if local:
        _claim(port)
    else:
        _wait_for(head, port, seconds)
    asked = gloo_interface(head, port) or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    known = [interfaces().get(asked), _route_to(head, port), *_resolved(own)]
    reachable = [address for address in known if address and not _loopback(address)]
    return reachable[0] if reachable else own, "head" if local else "other"


def _binds(address: str) -> bool:
    """True for an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
        try:
            s.bind((address, 0))
        except OSError as e:
            return e.errno != errno.EADDRNOTAVAIL
    return True


def _claim(port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            s.bind(("", port))
        except OSError as e:
            why = (e.strerror or str(e)).lower()
            raise InputError(
                f"PORT={port}: {why} on {socket.gethostname()}; end what listens there (ss -tlnp), or give all "
                "nodes another PORT"
            ) from None


def _wait_for(head: str, port: int, seconds: float) -> None:
    begun, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((head, port), timeout=5).close()
            return
        except OSError as e:
            why = (e.strerror or str(e)).lower()
        waited = time.monotonic() - begun
        if waited > seconds:
            raise RunFailed(
                f"{head}:{port} has not answered for {seconds:.0f} s ({why}); start HEAD's line there, look at "
                "firewalls, or raise WAIT"
            )
        if waited > 2 and not told:
            print(f"waiting up to {seconds:.0f} s for {head}:{port} ({why})", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)


# ---- before the group ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What an update's result may depend on beside flags and data, by name."""
    import numpy
    import torch

    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(sys.argv[0])]:
        with contextlib.suppress(OSError):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {
        "fourscale": f"{__version__} (code {digest.hexdigest()[:8]})",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def meet(store: dist.Store, rank: int, fault: InputError | None, timeout_s: float) -> None:
    """Compare the nodes of a job, through its store, before any of them waits for another one in a group.

    store: fresh for this attempt. fault: what is wrong on this rank, if anything. Sets GLOO_SOCKET_IFNAME where gloo
    would pick loopback. Differences in Python and numpy are noted by rank 0. Raises InputError on every rank, with one
    text, where a node is at fault or where code or torch differ; RunFailed where a node is not heard of for
    `timeout_s`, or the store is gone.
    """
    nodes, node = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["GROUP_RANK"])
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        name = None if fault else gloo_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except InputError as e:
        name, fault = None, e
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    told = str(fault) if fault else None
    try:
        if rank == 0 and store.check(["verdict"]):
            raise RunFailed(
                f"the store at {where} is that of an earlier attempt; with --max-restarts on several nodes set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all of them, as launch/multinode.sh does"
            )
        if told:
            store.compare_set("fault", "", json.dumps({"host": socket.gethostname(), "fault": told}))
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = store.add(f"here/{node}", 1)
        if here > each:
            raise InputError(
                f"node {node} has joined this job before: start its line once, and no other machine as NODE_RANK={node}"
            )
        if here == each:  # the last rank of a node speaks for it, after all that is wrong there has been told
            word = {"host": socket.gethostname(), "fault": told, "versions": versions()}
            store.set(f"word/{node}", json.dumps(word))
        if rank == 0:
            store.set("verdict", json.dumps(_judged(lambda keys: _heard(store, keys), nodes, timeout_s)))
        else:
            store.wait(["verdict"], datetime.timedelta(seconds=timeout_s + 2 * GRACE_S))
        verdict: dict[str, Any] = json.loads(store.get("verdict"))
    except RuntimeError as e:  # torch's, of a store whose host is gone
        raise RunFailed(
            f"node {node} ({socket.gethostname()}): the store at {where} does not answer "
            f"({str(e).strip().splitlines()[0][:120]}); look at that node's log"
        ) from None
    if rank == 0:
        for note in verdict["notes"]:
            say(f"note: {note}")
    if verdict["error"]:
        if rank == 0:
            time.sleep(WORD_FIRST_S)
        raise (InputError if verdict["usage"] else RunFailed)(verdict["error"])


def _heard(store: dist.Store, keys: list[str]) -> dict[str, dict[str, Any]]:
    return {key: json.loads(store.get(key)) for key in keys if store.check([key])}


def _judged(heard: Callable[[list[str]], dict[str, dict[str, Any]]], nodes: int, timeout_s: float) -> dict[str, Any]:
    """Rank 0's verdict: {error: text or None, usage: whether it is the user's, notes: [text]}."""
    words: dict[str, dict[str, Any]] = {}
    hurried = False
    deadline = time.monotonic() + timeout_s
    while True:
        words |= heard([key for key in (*(f"word/{i}" for i in range(nodes)), "fault") if key not in words])
        missing = [key for key in (f"word/{i}" for i in range(nodes)) if key not in words]
        faulty = [word for word in words.values() if word["fault"]]
        if faulty and not hurried:
            deadline, hurried = min(deadline, time.monotonic() + GRACE_S), True
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.05 + nodes / 1000)
    if faulty:
        texts = {word["fault"]: _hosts(w["host"] for w in faulty if w["fault"] == word["fault"]) for word in faulty}
        everywhere = len(texts) == 1 and all(words.get(f"word/{i}", {}).get("fault") for i in range(nodes))
        text, hosts = next(iter(texts.items()))
        return {"error": text if everywhere else f"{hosts}: {text}", "usage": True, "notes": []}
    if missing:
        names = ", ".join(key.removeprefix("word/") for key in missing[:4]) + (" ..." if len(missing) > 4 else "")
        text = f"no word from node {names} of {nodes} for {timeout_s:.0f} s: look at its log, or raise --timeout"
        return {"error": text, "usage": False, "notes": []}
    errors, notes = [], []
    for what in next(iter(words.values()))["versions"]:
        if differ := _different(what, list(words.values())):
            (errors if what in MUST_AGREE else notes).append(differ)
    text = "; ".join(errors)
    error = f"nodes run different versions: {text}; give all nodes one checkout and one environment" if errors else None
    return {"error": error, "usage": True, "notes": [f"nodes run different versions: {note}" for note in notes]}


def _different(what: str, words: list[dict[str, Any]]) -> str | None:
    """'torch 2.13.0 on n1 and 2.11.0 on n2', or None where all have one."""
    found: dict[str, list[str]] = {}
    for word in words:
        found.setdefault(word["versions"].get(what, "unknown"), []).append(word["host"])
    if len(found) == 1:
        return None
    return f"{what} " + " and ".join(f"{version} on {_hosts(hosts)}" for version, hosts in found.items())


def _hosts(names: Iterator[str] | list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


# ---- at the end ----------------------------------------------------------------------------------------------------


def goes_on(asked: bool, gather: Callable[[tuple[str, bool]], list[tuple[str, bool]]]) -> bool:
    """True on the nodes of an elastic job that stay while another one, asked to stop, leaves. Collective.

    All ranks have saved and end together. One that ends with 0 tells its torchrun that the job is finished; on a node
    that nobody asked to stop it has to fail instead, for torchrun to start it again without the one that left.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return False
    own = os.environ["GROUP_RANK"]
    leaving = {node for node, one in gather((own, asked)) if one}
    return bool(leaving) and own not in leaving


@door
def main() -> None:
    endpoint, seconds, role = sys.argv[1:]
    print(*look(endpoint, float(seconds), role))


if __name__ == "__main__":
    main()
