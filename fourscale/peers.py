"""Which ranks are alive: a heartbeat in the job's store, so that a lost rank is named and none is waited for in vain.

Each rank has one client of its own in the store (the main thread's may block for hours) and writes a counter an
interval. Rank 0 alone reads all counters, the others read rank 0's and its verdict: the store's load grows with the
number of ranks, not with its square. Silence is measured by the reader's monotonic clock, never by comparing hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

R = TypeVar("R")

INTERVAL_S = 1.0  # between beats, of up to 64 ranks; more ranks beat less often
LONGEST_INTERVAL_S = 5.0
ANSWER_S = 10.0  # a store that takes longer is asked again through a new connection
ENDED, LEAVING = b"ended", b"leaving"  # in place of a counter: at its end in good order; ending after a failure

ADVICE = "see its own message or its node's log; the checkpoints are intact, go on with --resume auto"


class Watch:
    """A daemon thread that beats for this rank and looks after the others; every rank of a job has one.

    store: the job's store (TCPStore or a PrefixStore of one), fresh for each attempt of a restarted job.
    timeout_s: seconds of silence after which a rank is given up: one line on stderr, and os._exit(1) on every rank,
    also where the main thread is blocked in a collective.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float):
        self.rank, self.world_size = rank, world_size
        self.interval = min(max(INTERVAL_S, world_size / 64), LONGEST_INTERVAL_S)
        self.timeout_s = max(timeout_s, 3 * self.interval)
        self.behind: list[int] = []
        self._names: dict[int, str] = {}
        self._ending = threading.Lock()  # whoever holds it tells the end of this process; never released
        self._asking = threading.Lock()  # of the client: one question at a time
        self._halted = threading.Event()
        self._left = self._store_gone = False
        self._count = 0
        self._answer_s = min(ANSWER_S, self.timeout_s / 4)
        self._client = dist.PrefixStore("peers", store.clone())
        self._client.set_timeout(timedelta(seconds=self._answer_s))
        self._client.set(_key("name", rank), f"pid {os.getpid()} on {socket.gethostname()}")
        self._client.set(_key("beat", rank), "0")
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()
        atexit.register(self._halt)  # a thread inside the store would abort an interpreter that is torn down

    # ---- for the main thread ---------------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """'rank 3 (pid 4242 on node7)', or 'rank 3' where the store can't tell."""
        if rank not in self._names:
            try:
                if name := self._ask(lambda client: _get(client, _key("name", rank))):
                    self._names[rank] = name.decode()
            except RuntimeError:
                pass
        return f"rank {rank} ({self._names[rank]})" if rank in self._names else f"rank {rank}"

    def lost(self, patience_s: float = 4.0) -> list[int]:
        """The ranks that no longer beat, asked by a rank whose collective has just failed; it takes `patience_s`.

        Rank 0 alone where the store is gone with its host. Ranks that ended in good order or are ending like this one
        are not lost. Afterwards `behind` holds those that beat and yet have not met the failure. From here on this
        process is ending: its watch accuses no one.
        """
        self._take_the_word()
        return self._lost(patience_s)

    def account(self, patience_s: float = 4.0) -> str:
        """What became of the others, for a rank whose collective has just failed: 'rank 3 (pid 4 on h) is gone ...'."""
        self._take_the_word()
        lost = self._lost(patience_s)
        if self._store_gone:
            return f"the job's store does not answer: {self._gone_store()}; {ADVICE}"
        if lost:
            return f"{self._list(lost)}: {self._state(lost)}; {ADVICE}"
        if self.behind:
            return (
                f"no rank is gone, but {self._list(self.behind)} did not come to the same point in time: "
                "look what it waits for (disk, data), or raise --timeout"
            )
        return f"a collective failed though no rank is gone: {ADVICE}"

    def _take_the_word(self) -> None:
        if not self._left:
            self._ending.acquire()

    def speaks(self) -> bool:
        """True on the first rank of each node that asks: the one that prints why this job ends. Ask once."""
        node = os.environ.get("GROUP_RANK", "0")
        try:
            if not self._store_gone:
                won = self._ask(lambda client: client.compare_set(_key("speaker", node), "", str(self.rank)))
                return won == str(self.rank).encode()
        except RuntimeError:
            pass
        # The store is gone, with rank 0 or its launcher: on that node the next rank speaks.
        return os.environ.get("LOCAL_RANK", "0") == ("1" if node == "0" else "0")

    def stop(self) -> None:
        """Say in the store that this rank ends in good order, and end the watch; call it before leaving the group."""
        if self._halted.is_set():
            return
        self._halt()
        with contextlib.suppress(RuntimeError):  # rank 0's process may be the store and gone already
            self._ask(lambda client: client.set(_key("beat", self.rank), ENDED))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _halt(self) -> None:
        self._halted.set()
        self._thread.join(timeout=2 * self._answer_s)
        atexit.unregister(self._halt)

    def _run(self) -> None:
        watched = range(1, self.world_size) if self.rank == 0 else range(1)
        values: dict[int, bytes] = {}
        silent = dict.fromkeys(watched, 0.0)  # seconds, by rank
        silence = 0.0  # of the store, seconds
        last, pause = time.monotonic(), self.interval
        while True:
            due = time.monotonic() + pause
            if self._halted.wait(pause):
                return
            # A process that was paused, or a slow store, makes this loop late: that is no one else's silence.
            now = time.monotonic()
            if now - due > self.timeout_s / 2:  # paused, perhaps with the others, who may wake later
                silent, silence = dict.fromkeys(watched, 0.0), 0.0
            passed, last, pause = min(now - last, pause + self.interval), now, self.interval
            try:
                self._beat()
                seen, verdict = self._look(watched)
                silence = 0.0
            except RuntimeError:
                silence += min(time.monotonic() - now, self._answer_s) + passed
                if silence > self.timeout_s:
                    self._store_gone = True
                    self._give_up([0], f"the job's store has not answered for {silence:.0f} s: {self._gone_store()}")
                self._reconnect()
                pause = max(self.interval, min(self.timeout_s / 10, 30.0))  # torch tells each failure in 30 lines
                continue
            if verdict:
                self._obey(json.loads(verdict))
            for rank in watched:
                value = seen.get(rank)
                alive = value is None or value in (ENDED, LEAVING) or value != values.get(rank)
                silent[rank] = 0.0 if alive else silent[rank] + passed
            values = seen
            if lost := [rank for rank in watched if silent[rank] > self.timeout_s]:
                who = f"{self._list(lost)} {'has' if len(lost) == 1 else 'have'} been silent for {self.timeout_s:.0f} s"
                self._give_up(lost, f"{who}: {self._state(lost)}")

    def _beat(self) -> None:
        def beat(client: dist.Store) -> None:
            if not (self._left or self._halted.is_set()):
                self._count += 1
                client.set(_key("beat", self.rank), str(self._count))

        self._ask(beat)
        if self.rank and 0 not in self._names:
            self.name(0)  # while the store can tell

    def _look(self, ranks: Iterable[int]) -> tuple[dict[int, bytes], bytes]:
        """Values of the ranks that have beaten yet, and the verdict (empty while there is none). One at a time."""

        def look(client: dist.Store) -> tuple[dict[int, bytes], bytes]:
            keys = {rank: _key("beat", rank) for rank in ranks}
            if keys and not client.check(list(keys.values())):  # at the start, or after an early death
                keys = {rank: key for rank, key in keys.items() if client.check([key])}
            values = client.multi_get(list(keys.values())) if keys else []
            return dict(zip(keys, values, strict=True)), _get(client, "verdict")

        return self._ask(look)

    def _ask(self, question: Callable[[dist.Store], R]) -> R:
        """The store's answer, one question at a time; RuntimeError where there is none in time.

        torch waits for most answers without a limit of its own: where the other end has vanished without a word, as
        long as TCP resends, a quarter of an hour. The thread that asked is then left to itself.
        """
        asking, client = self._asking, self._client
        if not asking.acquire(timeout=self._answer_s):
            raise RuntimeError("the store does not answer")

        def ask() -> R:
            try:
                return question(client)
            finally:
                asking.release()

        return self._in_time(ask)

    def _in_time(self, ask: Callable[[], R]) -> R:
        answers: queue.SimpleQueue[tuple[Any, RuntimeError | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((ask(), None))
            except RuntimeError as e:
                answers.put((None, e))

        threading.Thread(target=run, name="peers question", daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._answer_s)
        except queue.Empty:
            raise RuntimeError("the store does not answer") from None
        if error is not None:
            raise error
        return answer

    def _reconnect(self) -> None:
        """Begin anew: after a timeout the old connection would give the old answer to the next question."""
        server = self._client
        while isinstance(server, dist.PrefixStore):
            server = server.underlying_store
        try:
            socket.create_connection((server.host, server.port), timeout=self._answer_s).close()
            fresh = self._in_time(self._client.clone)  # a store whose process is stopped accepts, and says no more
        except (OSError, RuntimeError):
            return
        self._asking, self._client = threading.Lock(), fresh  # the old ones may be stuck

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _lost(self, patience_s: float) -> list[int]:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + max(patience_s, 2.5 * self.interval)
        try:
            self._left = True  # beats no more
            self._ask(lambda client: client.set(_key("beat", self.rank), LEAVING))
            first, verdict = self._look(others)
            still = {rank for rank in others if first.get(rank) not in (ENDED, LEAVING)}
            moving: set[int] = set()
            while still and not verdict and time.monotonic() < deadline:
                time.sleep(self.interval / 2)
                now, verdict = self._look(others)
                moving = {rank for rank in others if now.get(rank) != first.get(rank)}
                still = {rank for rank in others if now.get(rank) not in (ENDED, LEAVING)}
        except RuntimeError:
            self._store_gone = True
            return [0] if self.rank else []
        if verdict:
            return json.loads(verdict)["lost"]
        lost = sorted(still - moving)
        self.behind = [] if lost else sorted(still)
        return lost

    def _give_up(self, lost: list[int], text: str) -> None:
        """End the job since ranks are lost."""
        verdict = {"by": self.rank, "lost": lost, "text": text}
        try:
            if not self._store_gone:
                verdict = json.loads(self._ask(lambda client: client.compare_set("verdict", "", json.dumps(verdict))))
        except RuntimeError:
            pass
        self._obey(verdict)

    def _obey(self, verdict: dict[str, Any]) -> None:
        if not self._ending.acquire(blocking=False):
            return self._halted.set()  # the main thread has met the failure itself, and tells it
        if self.speaks():
            by = f"rank {verdict['by']} found that " if verdict["by"] != self.rank else ""
            os.write(2, f"error: rank {self.rank}: {by}{verdict['text']}; {ADVICE}\n".encode())
        if verdict["by"] == self.rank:
            # The others read the verdict before they lose their connections to this rank.
            time.sleep(min(1.5 * self.interval, 3.0))
        os._exit(1)

    # ---- words -----------------------------------------------------------------------------------------------------

    def _list(self, ranks: list[int]) -> str:
        more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
        return ", ".join(self.name(rank) for rank in ranks[:3]) + more

    def _gone_store(self) -> str:
        return f"{self.name(0)}, its launcher or its node is gone"

    def _state(self, ranks: list[int]) -> str:
        """'gone', 'stopped' or what can be said of processes that no longer beat; this host's are looked at."""
        states = {_process_state(self._names.get(rank, "")) for rank in ranks}
        return states.pop() if len(states) == 1 else "gone or stopped"


def _process_state(name: str) -> str:
    words = name.split()
    if sys.platform != "linux" or len(words) != 4 or words[3] != socket.gethostname():
        return "gone or stopped"
    try:
        state = Path(f"/proc/{words[1]}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running but silent")


def _get(client: dist.Store, key: str) -> bytes:
    """The value of a key, empty while there is none."""
    return client.get(key) if client.check([key]) else b""


def _key(what: str, whose: int | str) -> str:
    return f"{what}/{whose}"
