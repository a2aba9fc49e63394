"""wandb and TensorBoard beside a run: a process for each follows metrics.jsonl and logs its rows as they are written.

A process of its own can neither stop nor delay training, whatever it meets: no package, no login, no network, no disk,
a call that hangs or dies. The file is its queue. What it has logged it reads back at a resume from where it was
logged, since what a kill leaves of that isn't known before: rows that are missing follow from metrics.jsonl, and
updates that are done again are not logged twice. wandb keeps nothing but the first value of a step, so of those it has
the first attempt's, bit-equal to metrics.jsonl on the same ranks; TensorBoard takes them back and has the last
attempt's, in 32 bits. Imports neither of them before it is asked for, and no torch.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import secrets
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from fourscale.cli import say
from fourscale.durable import read_json, write_json

if TYPE_CHECKING:
    from fourscale.publish import RunDir

POLL_S = 0.5
END_PATIENCE_S = 30.0  # that the end of a run waits for what is under way
ORPHAN_PATIENCE_S = 5.0  # that is left where the run died: the next attempt may be about to begin
TOLD = 3  # exit code of a tracker that has said why it ended

# ---- in the trainer ------------------------------------------------------------------------------------------------


class Trackers:
    """The processes that follow a run, started and ended by rank 0. Nothing here raises, nor waits but in `close`."""

    def __init__(self, kinds: Sequence[str], run_dir: RunDir, update: int, resumed: bool) -> None:
        """Start one for each of `kinds` ("none" undoes those before it). Not collective.

        metrics.jsonl must have been rewound to `update`. resumed: from a checkpoint of this directory; otherwise what
        an earlier attempt logged here is of another run.
        """
        if "none" in kinds:
            kinds = kinds[len(kinds) - kinds[::-1].index("none") :]
        self._processes: list[tuple[str, subprocess.Popen[str], threading.Thread]] = []
        self._closing = False
        for kind in dict.fromkeys(kinds):
            words = (kind, run_dir.path, run_dir.attempt, update, int(resumed))
            code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); "
            code += "from fourscale import trackers; trackers.main()"
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, *map(str, words)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,  # a Ctrl-C is for the trainer, which ends this in order
                )
            except OSError as e:
                say(f"note: --tracker {kind}: {(e.strerror or str(e)).lower()}; training goes on without it")
                continue
            thread = threading.Thread(target=self._listen, args=(kind, process), name=f"tracker-{kind}", daemon=True)
            thread.start()
            self._processes.append((kind, process, thread))

    def _listen(self, kind: str, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                say(line.rstrip("\n"))
        code = process.wait()
        if code not in (0, TOLD) and not self._closing:
            say(f"note: --tracker {kind}: its process ended with {code}; training goes on without it")

    def close(self, patience_s: float = END_PATIENCE_S) -> None:
        """All rows are written: let what follows them end, and end it where that takes too long."""
        deadline = time.monotonic() + patience_s
        for _, process, _ in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.write("end\n")
                process.stdin.close()
        for kind, process, thread in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._closing = True
                process.kill()
                way = "what it lacks is in metrics.jsonl"
                say(f"note: --tracker {kind}: not done {patience_s:.0f} s after the last update, and ended; {way}")
            thread.join(1.0)


# ---- in a process of its own ---------------------------------------------------------------------------------------


class Tail:
    """A file of JSON rows that another process appends to; a line that a full disk took back is written the same."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def read(self) -> list[dict[str, Any]]:
        """The whole rows that came since the last call."""
        try:
            with self.path.open("rb") as f:
                f.seek(self._at)
                new = f.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and type(row.get("update")) is int:
                    found.append(row)
        return found


def figures(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row by name, 'val_losses/NAME' for those of a table; its update is their step."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        flat |= {f"{key}/{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    numbers = {k: v for k, v in flat.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: v for k, v in numbers.items() if k != "update"}


def about(run: dict[str, Any]) -> dict[str, Any]:
    """What makes a run what it is, from its run.json: configuration, data digests, the git commit of the code."""
    tables = ("model", "training", "data", "tokenizer", "baselines", "config", "origin", "init")
    attempt = run["attempts"][-1]
    return {k: run[k] for k in tables if k in run} | {"code": attempt.get("code"), "attempt": attempt}


class WandB:
    """A wandb run whose step is the update. Its id stays in wandb.json; WANDB_* variables are wandb's own."""

    def __init__(self, run_dir: Path, run: dict[str, Any], update: int, resumed: bool) -> None:
        import wandb

        self._html = wandb.Html
        kept = run_dir / "wandb.json"
        its = os.environ.get("WANDB_RUN_ID")
        if its is None and resumed and kept.is_file():
            its = read_json(kept).get("id")
        its = its or secrets.token_hex(4)
        write_json(kept, {"id": its})
        directory = Path(os.environ.get("WANDB_DIR") or run_dir)
        (directory / "wandb").mkdir(parents=True, exist_ok=True)  # or wandb goes to /tmp, and a resume misses it there
        names = {"project": "fourscale", "name": run_dir.name}
        logged = max(logged_offline(directory, its), default=0)  # before this attempt has a file
        self.run = wandb.init(
            id=its,
            resume="allow",
            dir=str(directory),
            config=about(run),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", x_stats_pid=os.getppid()),
            **{k: v for k, v in names.items() if f"WANDB_{k.upper()}" not in os.environ},
        )
        # A server has the last word on what it holds; offline, the files here have.
        self.logged = logged if self.run.offline else max(0, self.run.starting_step - 1)
        where = self.run.url or f"offline, in {directory / 'wandb'}"
        self.greeting = f"wandb: run {its}, {where}"

    def log(self, row: dict[str, Any], text: str | None) -> None:
        extra = {} if text is None else {"sample": self._html(f"<pre>{html.escape(text)}</pre>", data_is_not_path=True)}
        self.run.log(figures(row) | extra, step=row["update"], commit=True)

    def flush(self) -> None:
        """wandb sends and writes by itself."""

    def finish(self, ended: bool) -> None:
        self.run.finish(exit_code=0 if ended else 1)


def logged_offline(directory: Path, run_id: str) -> Iterator[int]:
    """The steps that attempts of a wandb run logged into files under directory/wandb; a file may be cut short.

    Their format is LevelDB's log, of protocol buffers: blocks of 32 KiB, in them pieces with crc32, length and type
    (1 whole, 2 first, 3 middle, 4 last), after a head of 7 bytes.
    """
    for path in sorted(directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")):
        from wandb.proto.wandb_internal_pb2 import Record

        data, at, entry = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            piece = data[at + 7 : at + 7 + size]
            if kind not in (1, 2, 3, 4) or len(piece) < size:
                break
            at += 7 + size
            entry = piece if kind in (1, 2) else entry + piece
            if kind in (1, 4):
                record = Record.FromString(entry)
                if record.HasField("history"):
                    yield record.history.step.num


class TensorBoard:
    """Event files in tensorboard/ of the run directory; a resume takes back what it does again."""

    def __init__(self, run_dir: Path, run: dict[str, Any], update: int, resumed: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        directory = run_dir / "tensorboard"
        self.logged = min(update, logged_events(directory)) if resumed else 0
        self.writer = EventFileWriter(str(directory))
        start = SessionLog(status=SessionLog.START)  # what other files hold from this step on is taken back
        self.writer.add_event(Event(wall_time=time.time(), step=self.logged + 1, session_log=start))
        self._add(self.logged, self._text("run", json.dumps(about(run), indent=2)))
        self.greeting = f"tensorboard: {directory}"

    def _add(self, update: int, *values: Any) -> None:
        summary = self._summary(value=values)
        self.writer.add_event(self._event(wall_time=time.time(), step=update, summary=summary))

    def _text(self, tag: str, text: str) -> Any:
        """Markdown that shows a text as it is."""
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        code = "".join(f"    {line}\n" for line in text.splitlines())
        tensor = make_tensor_proto(code.encode())
        return self._summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))

    def log(self, row: dict[str, Any], text: str | None) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in figures(row).items()]
        self._add(row["update"], *values, *([] if text is None else [self._text("sample", text)]))

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, ended: bool) -> None:
        self.writer.close()


def logged_events(directory: Path) -> int:
    """The last update in TensorBoard's event files there, what later ones take back left out; 0 for none."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    last = 0
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                last = min(last, event.step - 1)
            elif any(value.tag == "tokens" for value in event.summary.value):
                last = event.step
    return last


KINDS: dict[str, Callable[..., Any]] = {"wandb": WandB, "tensorboard": TensorBoard}


class Ending(threading.Event):
    """Set once no more rows will come; in_order: whether the run said so itself."""

    in_order = False


def follow(
    kind: str, run_dir: Path, attempt: str, update: int, resumed: bool, over: Ending, tell: Callable[[str], Any]
) -> None:
    """Log the rows of a run as they come, and its texts beside them, until `over` is set and all are logged.

    Only while `attempt` is the directory's writer. tell: takes a line to show.
    """
    metrics, samples = Tail(run_dir / "metrics.jsonl"), Tail(run_dir / "samples.jsonl")
    with _alone(run_dir / f".tracker-{kind}.lock"):
        log = KINDS[kind](run_dir, read_json(run_dir / "run.json"), update, resumed)
        tell(log.greeting)
        texts: dict[int, str] = {}
        last = log.logged
        while True:
            closing = over.is_set()
            if not _writes(run_dir, attempt):
                break
            rows = metrics.read()
            texts |= {row["update"]: row["prompt"] + row["text"] for row in samples.read()}  # written before the row
            for row in rows:
                if row["update"] > last:
                    last = row["update"]
                    log.log(row, texts.get(last))
            if rows:
                log.flush()
                texts = {update: text for update, text in texts.items() if update > last}  # whose row is to come
            if closing:
                break
            over.wait(POLL_S)
        log.finish(over.in_order)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until the tracker of an attempt that died is gone, where the file system has locks."""
    lock = filelock.FileLock(path, timeout=2 * ORPHAN_PATIENCE_S)
    with contextlib.suppress(NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _writes(run_dir: Path, attempt: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / ".writer.json").read_text(encoding="utf-8")).get("attempt") == attempt
    return False


def main() -> None:
    """The process of one tracker: KIND RUN_DIR ATTEMPT UPDATE RESUMED. Its input is open as long as the run lives; a
    line there says that it ended in order."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # batch systems send them to all processes of a job
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(5)  # on a CPU it shares the cores that train
    kind, run_dir, attempt, update, resumed = sys.argv[1:]
    voice = os.fdopen(os.dup(1), "w", encoding="utf-8")  # ours alone: what libraries print, and start, goes nowhere
    os.dup2(2, 1)
    over = Ending()

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, file=voice, flush=True)

    def listen() -> None:
        over.in_order = sys.stdin.readline() == "end\n"
        over.set()
        time.sleep(2 * END_PATIENCE_S if over.in_order else ORPHAN_PATIENCE_S)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        follow(kind, Path(run_dir), attempt, int(update), resumed == "1", over, tell)
    except ModuleNotFoundError as e:
        tell(f"note: --tracker {kind}: {e.name} is not installed; training goes on without it")
    except BaseException as e:  # each library has exceptions of its own
        first = f"{type(e).__name__}: {e}".strip().splitlines()[0]
        tell(f"note: --tracker {kind}: {first}; training goes on without it, its rows are in metrics.jsonl")
    else:
        os._exit(0)  # what a library still waits for at exit is no business of the run
    os._exit(TOLD)
