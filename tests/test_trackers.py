"""Trackers: what wandb and TensorBoard hold equals metrics.jsonl, over kills and resumes; none delays a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SMALL, command, environment, rows, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from fourscale import metrics, trackers

EQUAL = ("loss", "lr", "preclip_norm", "tokens", "val_loss")  # what both must hold, of every update


def records(path: Path) -> Iterator[Record]:
    """A .wandb file: blocks of 32 KiB of pieces, each with its crc32. One that a kill cut short just ends."""
    data, entry = path.read_bytes(), b""
    assert data[:7] == b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    at = 7
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
            continue
        crc, size, kind = struct.unpack("<IHB", data[at : at + 7])
        piece = data[at + 7 : at + 7 + size]
        if len(piece) < size or not kind:
            return
        assert crc == zlib.crc32(bytes([kind]) + piece)
        entry, at = (b"" if kind in (1, 2) else entry) + piece, at + 7 + size
        if kind in (1, 4):
            yield Record.FromString(entry)


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))


def wandb_history(run_dir: Path) -> dict[int, dict[str, Any]]:
    """All that wandb's files of a run say of each step; a step that is there twice fails."""
    found: dict[int, dict[str, Any]] = {}
    for path in wandb_files(run_dir):
        for record in records(path):
            if record.HasField("history"):
                step = record.history.step.num
                assert step not in found, f"step {step} is logged twice"
                items = record.history.item
                found[step] = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
    return found


def board(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def board_history(run_dir: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    events = board(run_dir)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            of = found.setdefault(event.step, {})
            assert tag not in of, f"{tag} of {event.step} is logged twice"
            of[tag] = event.value
    return found


def agree(run_dir: Path) -> None:
    """Each update once, with the values of metrics.jsonl."""
    truth = {row["update"]: row for row in rows(run_dir)}
    for name, found, tolerance in (
        ("wandb", wandb_history(run_dir), 0.0),
        ("tensorboard", board_history(run_dir), 1e-7),  # 32 bits
    ):
        assert sorted(found) == sorted(truth), name
        for update, row in truth.items():
            for key in EQUAL:
                assert (row.get(key) is None) == (key not in found[update]), (name, update, key)
                if row.get(key) is not None:
                    assert found[update][key] == pytest.approx(row[key], rel=tolerance, abs=0), (name, update, key)


def row(update: int) -> dict[str, Any]:
    """As a deterministic run writes it, but for the time that it took."""
    table = {"update": update, "tokens": 384 * update, "loss": 5 / update, "lr": 1e-3 / update, "preclip_norm": 0.3}
    table |= {"ms": time.time() % 100, "mfu": None, "epochs": {"web": 0.1, "code": 0.2}, "skipped": 0}
    if update == 7:
        table |= {"loss": None, "preclip_norm": None, "skipped": 1}
    if update % 10 == 0:
        table |= {"val_loss": 4 / update, "val_losses": {"web": 3 / update, "code": None}}
    return table


class Run:
    """A run directory as rank 0 writes it, without the training."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.attempt = path, "a0"

    def begin(self, kinds: tuple[str, ...], update: int, resumed: bool) -> trackers.Trackers:
        self.attempt = f"a{int(self.attempt[1:]) + 1}"
        (self.path / ".writer.json").write_text(json.dumps({"attempt": self.attempt}))
        run = {"model": {"d_model": 32}, "training": {"lr": 1e-3}, "data": {"train_digest": "f00d", "val_digest": "d"}}
        run |= {"config": {"seed": 0}, "attempts": [{"attempt": self.attempt, "code": "c0ffee+"}]}
        (self.path / "run.json").write_text(json.dumps(run))
        for stem in ("metrics", "samples"):
            metrics.rewind(self.path, update, stem)
        return trackers.Trackers(kinds, self, update, resumed)

    def write(self, first: int, last: int) -> None:
        for update in range(first, last + 1):
            if update % 10 == 0:
                with (self.path / "samples.jsonl").open("a") as f:
                    f.write(json.dumps({"update": update, "prompt": "Once", "text": f" <b>{update}\n"}) + "\n")
            with (self.path / "metrics.jsonl").open("a") as f:
                f.write(json.dumps(row(update)) + "\n")


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.2)


def reach(run_dir: Path, update: int, both: bool = True) -> None:
    """Wait until TensorBoard's file holds this update, and wandb's, which is written in blocks, if `both`."""

    def there() -> bool:
        if not wandb_files(run_dir) or not list(run_dir.glob("tensorboard/*")):
            return False
        checked = (board_history, wandb_history)[: 1 + both]
        return all(max(found(run_dir), default=0) >= update for found in checked)

    wait_for(there)


def kill(following: trackers.Trackers) -> None:
    """As a node dies: the trackers' processes, and those that they started, between two instructions."""
    for _, process, _ in following._processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_what_is_logged_is_metrics_over_kills_and_resumes(tmp_path, offline, capsys):
    job = Run(tmp_path / "ckpt")
    first = job.begin(("tensorboard", "wandb"), 0, resumed=False)
    job.write(1, 900)
    reach(job.path, 301)  # wandb writes blocks at once, and the rest after some seconds
    kill(first)
    reached = max(wandb_history(job.path))
    # Back to 240: what was logged beyond is done again, here with other values of `ms`.
    second = job.begin(("tensorboard", "wandb"), 240, resumed=True)
    job.write(241, 1800)
    reach(job.path, 1101)
    kill(second)
    reached_again = max(wandb_history(job.path))
    # And a resume from further on than what reached a tracker before: it is made up for.
    job.write(1801, 1845)
    third = job.begin(("tensorboard", "wandb"), 1840, resumed=True)
    job.write(1841, 1860)
    began = time.monotonic()
    third.close()
    assert time.monotonic() - began < trackers.END_PATIENCE_S
    assert 240 < reached < 900 < reached_again < 1840
    assert [r["update"] for r in rows(job.path)] == list(range(1, 1861))
    agree(job.path)
    out = capsys.readouterr().out
    assert out.count("wandb: run ") == 3 and out.count("tensorboard: /") == 3
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 4 and all("its process ended with -9" in line for line in notes), "those that were killed"
    its = json.loads((job.path / "wandb.json").read_text())["id"]
    assert {p.stem for p in wandb_files(job.path)} == {f"run-{its}"} and len(wandb_files(job.path)) == 3
    # Everything else of a row too, by name; texts and what the run is.
    of_260 = wandb_history(job.path)[260]
    assert of_260["val_losses/web"] == 3 / 260 and of_260["epochs/code"] == 0.2 and "mfu" not in of_260
    page = next(job.path.glob(f"wandb/*/files/{of_260['sample/path']}")).read_text()
    assert "Once &lt;b&gt;260\n" in page
    assert "sample/path" not in wandb_history(job.path)[259]
    config = {u.key: json.loads(u.value_json) for r in records(wandb_files(job.path)[-1]) for u in r.run.config.update}
    assert config["code"] == "c0ffee+" and config["data"]["train_digest"] == "f00d" and config["attempt"]["attempt"]
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in board(job.path).Tensors("sample")}
    assert sorted(texts) == list(range(10, 1861, 10)) and texts[260] == "    Once <b>260\n"
    assert "c0ffee+" in board(job.path).Tensors("run")[0].tensor_proto.string_val[0].decode()


def test_a_run_that_begins_anew_is_another_one_to_its_trackers(tmp_path, offline):
    """Without a checkpoint there is no contract: the rows of the attempt before may be of another learning rate."""
    job = Run(tmp_path / "ckpt")
    first = job.begin(("tensorboard", "wandb"), 0, resumed=False)
    job.write(1, 20)
    reach(job.path, 20, both=False)
    kill(first)
    old = json.loads((job.path / "wandb.json").read_text())["id"]
    second = job.begin(("tensorboard", "wandb"), 0, resumed=False)
    job.write(1, 5)
    second.close()
    new = json.loads((job.path / "wandb.json").read_text())["id"]
    assert new != old
    steps = [r.history.step.num for p in wandb_files(job.path) if new in p.name for r in records(p) if r.history.item]
    assert steps == [1, 2, 3, 4, 5]
    assert sorted(board_history(job.path)) == [1, 2, 3, 4, 5]


BROKEN = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')", "wandb is not installed"),
    "no login": ("def init(**k): raise RuntimeError('api_key not configured\\nsee docs')", "api_key not configured;"),
    "a call": (
        "class R:\n offline, url = True, None\n def log(*a, **k): raise OSError('no space left')",
        "no space left",
    ),
    "crash": ("import os\ndef init(**k): os.abort()", "its process ended with -6"),
    "exits": ("def init(**k): raise SystemExit(0)", "SystemExit"),
    "hangs": ("import time\ndef init(**k): time.sleep(600)", "not done 1 s after the last update, and ended"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_tracker_that_fails_is_one_note_and_the_other_goes_on(tmp_path, monkeypatch, capsys, how):
    code, told = BROKEN[how]
    fake = tmp_path / "fake" / "wandb"
    (fake / "proto").mkdir(parents=True)
    rest = "" if "def init" in code or "raise Mod" in code else "\ndef init(**k): return R()"
    (fake / "__init__.py").write_text(f"Settings = lambda **k: None\nHtml = None\n{code}{rest}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    job = Run(tmp_path / "ckpt")
    began = time.monotonic()
    following = job.begin(("wandb",), 0, resumed=False)
    assert time.monotonic() - began < 0.5, "nothing is waited for"
    job.write(1, 3)
    if how != "hangs":
        wait_for(lambda: following._processes[0][1].poll() is not None)
    following.close(patience_s=1.0)
    assert time.monotonic() - began < 20
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("wandb: ")]
    assert len(lines) == 1 and lines[0].startswith("note: --tracker wandb: ") and told in lines[0], lines
    assert following._processes[0][1].poll() is not None


def test_a_tracker_of_a_trainer_that_dies_ends_too(tmp_path, offline):
    job = Run(tmp_path / "ckpt")
    following = job.begin(("tensorboard",), 0, resumed=False)
    job.write(1, 3)
    wait_for(lambda: list(job.path.glob("tensorboard/*")))
    process = following._processes[0][1]
    job.write(4, 5)
    process.stdin.close()  # as the end of its process does
    process.wait(trackers.ORPHAN_PATIENCE_S + 5)
    assert sorted(board_history(job.path)) == [1, 2, 3, 4, 5], "what was written is still logged"


def test_a_tracker_that_hangs_outlives_its_trainer_by_seconds_alone(tmp_path, monkeypatch):
    fake = tmp_path / "fake" / "wandb"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    job = Run(tmp_path / "ckpt")
    process = job.begin(("wandb",), 0, resumed=False)._processes[0][1]
    wait_for((job.path / ".tracker-wandb.lock").exists)
    process.stdin.close()
    assert process.wait(trackers.ORPHAN_PATIENCE_S + 5) == 1


def test_a_tracker_of_a_superseded_attempt_logs_nothing_of_the_next(tmp_path, offline):
    job = Run(tmp_path / "ckpt")
    following = job.begin(("tensorboard",), 0, resumed=False)
    job.write(1, 3)
    wait_for(lambda: list(job.path.glob("tensorboard/*")) and len(board_history(job.path)) == 3)
    (job.path / ".writer.json").write_text('{"attempt": "of another process"}')
    job.write(4, 5)
    assert following._processes[0][1].wait(10) == 0
    assert sorted(board_history(job.path)) == [1, 2, 3]


def test_a_text_that_is_there_before_its_row_waits_for_it(tmp_path):
    job = Run(tmp_path / "ckpt")
    job.begin((), 0, resumed=False)
    job.write(1, 9)
    (job.path / "samples.jsonl").write_text(
        '{"update": 10, "prompt": "Once", "text": " upon"}\n'
    )  # as in an evaluation
    over, told = trackers.Ending(), []
    following = threading.Thread(
        target=trackers.follow, args=("tensorboard", job.path, job.attempt, 0, False, over, told.append)
    )
    following.start()
    wait_for(lambda: len(board_history(job.path)) == 9 if list(job.path.glob("tensorboard/*")) else False)
    with (job.path / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(row(10)) + "\n")
    over.in_order = True
    over.set()
    following.join(30)
    assert [e.step for e in board(job.path).Tensors("sample")] == [10]


def test_wandb_is_not_left_to_choose_a_temporary_directory(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", "/proc/self/nowhere")  # can't be made, by root neither
    with pytest.raises(OSError, match="nowhere"):
        trackers.WandB(tmp_path, {"attempts": [{}]}, 0, resumed=False)


def test_none_undoes_the_trackers_before_it(tmp_path, offline):
    job = Run(tmp_path / "ckpt")
    assert job.begin(("wandb", "tensorboard", "none"), 0, resumed=False)._processes == []
    assert job.begin((), 0, resumed=False)._processes == []


def test_a_tail_gives_each_whole_row_once(tmp_path):
    path = tmp_path / "rows"
    tail = trackers.Tail(path)
    assert tail.read() == []
    path.write_text('{"update": 1}\n{"update": 2')
    assert tail.read() == [{"update": 1}] and tail.read() == []
    path.write_text('{"update": 1}\n')  # a full disk: the half line is taken back
    assert tail.read() == []
    path.write_text('{"update": 1}\n{"update": 2}\nno row\n[3]\n{"update": 4}\n')
    assert tail.read() == [{"update": 2}, {"update": 4}]


def test_nothing_is_imported_unless_it_is_asked_for():
    code = (
        "import sys; from fourscale import trackers; print(sorted({'torch', 'wandb', 'tensorboard'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_run_killed_and_resumed_under_torchrun_has_each_update_once_in_its_trackers(data, tmp_path):
    out = tmp_path / "ckpt"
    flags = ("--data", data, "--ckpt-dir", out, *SMALL, "--log-every", 1, "--ckpt-every", 6)
    flags += ("--tracker", "wandb", "--tracker", "tensorboard", "--price", "2.5@2026-01-02", "--async-ckpt", "off")
    env = environment(WANDB_MODE="offline")
    # A Python that stops for good after its 15th update, as a node does that hangs before it dies.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('RANK') == '0' and os.environ.pop('HANG', None):\n"
        "    import importlib.abc\n"
        "    def watch():\n"
        "        import json, pathlib\n"
        f"        path = pathlib.Path({str(out)!r}) / 'metrics.jsonl'\n"
        "        while not (path.is_file() and path.read_bytes().count(b'\\n') >= 15): time.sleep(0.001)\n"
        "        os.kill(os.getpid(), 19)\n"
        "    import threading; threading.Thread(target=watch, daemon=True).start()\n"
    )
    hang = env | {"HANG": "1", "PYTHONPATH": str(tmp_path)}
    first = subprocess.Popen(
        command("train.py", *flags, nproc=2), env=hang, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        reach(out, 13, both=False)
        time.sleep(1.5)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    assert len(rows(out)) >= 15
    spent = rows(out)[-1]
    done = subprocess.run(
        command("train.py", *flags, "--resume", "must", nproc=2), env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from step_12" in done.stdout and "note: --tracker" not in done.stdout
    assert [r["update"] for r in rows(out)] == list(range(1, 21))
    assert len(wandb_files(out)) == 2
    agree(out)
    # What was spent is spent, also on updates 13 to 15 that were done twice.
    last, per_token = rows(out)[-1], rows(out)[0]["flops"] / rows(out)[0]["tokens"]
    again = spent["tokens"] - rows(out)[11]["tokens"]
    assert last["flops"] == pytest.approx(per_token * (last["tokens"] + again), rel=1e-12)
    hours = spent["device_hours"] + 2 * last["elapsed_s"] / 3600
    assert last["device_hours"] == pytest.approx(hours, abs=2e-6)
    assert last["cost"] == pytest.approx(2.5 * hours, abs=1e-5)
    assert "every record agrees" not in done.stdout
    run("check.py", "run", out)
