"""One writer a directory, and a checkpoint under its name is complete: whoever dies, wakes up, or fills the disk."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import command, environment, one_error, run
from saver_program import config, run_table

from fourscale import checkpoint, parallel, publish, saving
from fourscale.cli import InputError, RunFailed
from fourscale.rundir import open_checkpoint, step_dirs

PROGRAM = "tests/saver_program.py"
STEP = {"tokens": 1, "samples_seen": 1, "skipped": 0}


def program(case, path, nproc=None, code=0, **options):
    return run(PROGRAM, case, path, json.dumps(options), nproc=nproc, code=code)


def result(done):
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("result: "))[8:])


@pytest.fixture(scope="module")
def topology():
    """This process as a world of one."""
    topology = parallel.start(device="cpu")
    yield topology
    parallel.stop(topology)


@pytest.fixture
def opened(topology, tmp_path):
    """Makes a RunDir and its Saver in tmp_path/ckpt; the one made before is closed."""
    made = []

    def make(resume="auto", step=None, **options):
        if made:
            made.pop().close()
        made.append(publish.RunDir(tmp_path / "ckpt", topology))
        ckpt = made[0].resume_point(resume, step)
        made[0].write_contract(run_table(config()), None)
        options = {"keep": None, "keep_every": None, "async_ckpt": "off", "max_failures": 2} | options
        return made[0], saving.Saver(made[0], **options), ckpt

    yield make
    for run_dir in made:
        run_dir.close()


def few(value=1.0):
    return {f"model.{name}": torch.full((5, 3), value) for name in "abc"}


def save(saver, update, val_loss=None, tensors=None):
    saver.begin(tensors or few(update), {"update": update, "val_loss": val_loss, **STEP})
    saver.finish()


def names(path):
    return sorted(p.name for p in path.iterdir() if p.is_dir())


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_retention_keeps_the_newest_the_best_and_multiples(opened, tmp_path):
    path = tmp_path / "ckpt"
    run_dir, saver, _ = opened(keep=2, keep_every=4)
    for update, loss in enumerate((float("nan"), 2.0, None, 4.0, 5.0, 2.0, 3.0), start=1):
        save(saver, update, loss)
        assert (path / "latest").read_text() == f"step_{update}\n"
    run_dir.settle()
    assert names(path) == ["step_2", "step_4", "step_6", "step_7"]
    assert (path / "best").read_text() == "step_2\n" and saver.best == (2, 2.0)  # not 6, which is as good
    assert open_checkpoint(path / "best").step["update"] == 2
    run_dir, saver, ckpt = opened(keep=2, keep_every=4)
    assert ckpt.step["update"] == saver.saved == 7 and saver.best == (2, 2.0)
    save(saver, 8, 1.5)
    run_dir.settle()
    assert names(path) == ["step_4", "step_7", "step_8"] and (path / "best").read_text() == "step_8\n"
    (path / "best").unlink()
    (path / "latest").write_text("step_7\n")  # as a kill before the new one is written leaves it
    run_dir, saver, _ = opened(keep=1)
    run_dir.settle()
    assert names(path) == ["step_8"] and saver.best == (8, 1.5)  # what a kill kept from being removed
    assert (path / "best").read_text() == (path / "latest").read_text() == "step_8\n"


def test_pointers_of_any_bytes_are_written_anew_and_a_copied_step_is_never_the_best(opened, tmp_path):
    path = tmp_path / "ckpt"
    _, saver, _ = opened()
    for update, loss in ((3, 2.0), (4, 3.0)):
        save(saver, update, loss)
    shutil.copytree(path / "step_3", path / "step_1")
    for name in ("latest", "best"):
        (path / name).write_bytes(b"\xff\xfe\x00")
    _, saver, _ = opened()
    assert saver.best == (3, 2.0) and (path / "best").read_text() == "step_3\n"
    assert (path / "latest").read_text() == "step_4\n"


def test_a_run_without_held_out_losses_has_no_best(opened, tmp_path):
    _, saver, _ = opened()
    save(saver, 1)
    assert saver.best is None and not (tmp_path / "ckpt" / "best").exists()


def test_leftovers_of_a_dead_writer_go_and_nothing_else(opened, tmp_path):
    path = tmp_path / "ckpt"
    stay = ["step_3.tmp", "step_x.tmp-1", "thesis.tmp-old", "step_", "old-step_3.tmp-a"]
    for name in ["step_5.tmp-0badcafe", "step_6.tmp-0badcafe-purged", *stay]:
        (path / name).mkdir(parents=True)
        (path / name / "file").write_text("")
    (path / ".latest.tmp").write_text("")
    run_dir, _, _ = opened()
    run_dir.settle()
    assert names(path) == sorted(stay) and not (path / ".latest.tmp").exists()


@pytest.mark.parametrize("mode", ["off", "on"])
def test_nothing_that_is_not_finite_is_saved(opened, tmp_path, mode):
    _, saver, _ = opened(async_ckpt=mode)
    save(saver, 1)
    bad = few()
    bad["model.b"][4, 2] = math.inf
    with pytest.raises(RunFailed, match=r"step_2: model.b is not finite, not saved; the older checkpoints are intact"):
        save(saver, 2, tensors=bad)
    assert names(tmp_path / "ckpt") == ["step_1"]


def test_a_save_waits_for_no_new_pages_once_they_are_reserved(opened, tmp_path):
    large = {"model.w": torch.ones(64, 2**18)}  # 64 MiB: 16,384 pages
    faults = []
    for reserved in (False, True):
        _, saver, _ = opened(async_ckpt="on")
        if reserved:
            saver.reserve(lambda: large)
            saver._reserving.join()
            saver.reserve(lambda: pytest.fail("it takes the memory once"))
        large["model.w"].fill_(2 + reserved)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        staged = saver._stager.stage(large)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert staged["model.w"].min() == 2 + reserved
    assert faults[0] > 20 * faults[1], faults


def test_a_closed_directory_is_free_and_holds_no_trace(opened, tmp_path):
    run_dir, saver, _ = opened()
    save(saver, 1)
    run_dir.close()
    files = {p.name for p in (tmp_path / "ckpt").iterdir()}
    assert files == {".lock", "run.json", "latest", "step_1"}
    opened()  # again, in this process


# ---- going on from a checkpoint --------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda d: flip(d / "__0_0.distcp"), "is damaged: its sha256"),
        (lambda d: (d / "__0_0.distcp").unlink(), "is missing"),
        (lambda d: os.truncate(d / "__0_0.distcp", 10), "has 10 bytes"),
        (lambda d: flip(d / ".metadata"), "is damaged"),
        (lambda d: (d / "step.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "step.json").write_text((d / "step.json").read_text().replace("1", "2")), "its sha256 is not"),
        (lambda d: shutil.copy(d.parent / "step_2" / "step.json", d), "its step.json is that of step_2"),
    ],
)
def test_a_damaged_checkpoint_names_the_newest_sound_one(opened, tmp_path, harm, words):
    path = tmp_path / "ckpt"
    _, saver, _ = opened()
    for update in (1, 2, 3, 4):
        save(saver, update)
    harm(path / "step_4")
    flip(path / "step_3" / "__0_0.distcp")
    with pytest.raises(InputError) as e:
        opened()
    assert re.search(words, str(e.value)) and "step_4" in str(e.value)
    assert str(e.value).endswith("--resume-step 2 goes on from step_2, the newest undamaged one")
    assert names(path) == ["step_1", "step_2", "step_3", "step_4"]
    _, saver, ckpt = opened(step=2)
    assert ckpt.step["update"] == saver.saved == 2
    assert names(path) == ["discarded-step_3", "discarded-step_4", "step_1", "step_2"]
    assert (path / "latest").read_text() == "step_2\n"
    save(saver, 3)
    opened(step=2)
    assert names(path) == ["discarded-step_3", "discarded-step_3-2", "discarded-step_4", "step_1", "step_2"]
    for step in ("step_1", "step_2"):
        (path / step / "__0_0.distcp").unlink()
    with pytest.raises(InputError, match="there is no older undamaged one: start again in another directory"):
        opened()


def test_later_checkpoints_stay_until_the_contract_is_accepted(opened, topology, tmp_path):
    _, saver, _ = opened(keep=None)
    for update, loss in ((1, 3.0), (2, 2.0)):
        save(saver, update, loss)
    saver.run_dir.close()
    run_dir = publish.RunDir(tmp_path / "ckpt", topology)
    assert run_dir.resume_point("auto", 1).step["update"] == 1
    assert names(tmp_path / "ckpt") == ["step_1", "step_2"]
    run_dir.write_contract(run_table(config()), None)
    saver = saving.Saver(run_dir, None, None, "off", 0)
    assert names(tmp_path / "ckpt") == ["discarded-step_2", "step_1"] and saver.best == (1, 3.0)
    assert (tmp_path / "ckpt" / "best").read_text() == "step_1\n"
    run_dir.close()


def test_what_resume_refuses(opened, tmp_path):
    with pytest.raises(InputError, match="--resume must: no complete checkpoint"):
        opened("must")
    with pytest.raises(InputError, match=r"--resume-step 7: no complete step_7 in .*; there is none"):
        opened(step=7)
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {".lock"}
    _, saver, _ = opened()
    save(saver, 1)
    save(saver, 3)
    with pytest.raises(InputError, match=r"no complete step_2 in .*; there are step_1, step_3"):
        opened(step=2)
    with pytest.raises(InputError, match=r"holds step_3 of an earlier run; add --resume auto"):
        opened("never")


def test_damage_is_found_by_the_rank_that_reads_it_and_told_by_all(opened, tmp_path):
    program("modes", tmp_path, nproc=2, kinds=["ddp"], modes=["on"])
    path = tmp_path / "ddp-on"
    flip(path / "step_2" / "__1_0.distcp")
    done = program("damaged", path, nproc=2, code=1, step=None)
    said = sorted(x for x in done.stdout.splitlines() if " refused " in x)
    assert [x[:1] for x in said] == ["0", "1"] and said[0][1:] == said[1][1:]
    assert "__1_0.distcp is damaged" in one_error(done) and "--resume-step 1 goes on from step_1" in one_error(done)
    assert "1 resumes from step_1" in program("damaged", path, nproc=2, step=1).stdout


# ---- events ----------------------------------------------------------------------------------------------------------


def test_events_are_rows_also_after_one_that_was_cut_short(opened, tmp_path):
    run_dir, _, _ = opened()
    (tmp_path / "ckpt" / "events.jsonl").write_text('{"event": "first"}\n{"event": "cu')
    run_dir.event("next", update=3, why="a test")
    _, _, row = (tmp_path / "ckpt" / "events.jsonl").read_text().splitlines()
    assert json.loads(row).items() >= {"event": "next", "attempt": run_dir.attempt, "update": 3}.items()


# ---- disk and memory -------------------------------------------------------------------------------------------------


def test_room_for_checkpoints_is_told(opened, monkeypatch):
    _, saver, _ = opened()
    size = checkpoint.bytes_on_disk(few())

    def free(count):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, int(count * size)))

    free(0.9)
    with pytest.raises(InputError, match=r"a checkpoint takes 0.0 MiB, 0.0 MiB are free on its disk; make room"):
        saver.check_space(few())
    free(9.5)
    assert "there is room for 9; --keep N removes older ones" in saver.check_space(few())[0]
    free(10.5)
    assert saver.check_space(few()) == []
    _, saver, _ = opened(keep=3)
    free(3.9)
    assert "--keep 3 takes 4 checkpoints while one is written; 4 to come x 0.0 MiB" in saver.check_space(few())[0]
    free(4.1)
    assert saver.check_space(few()) == []
    save(saver, 1)
    free(3.1)
    assert saver.check_space(few()) == []  # one of the four is there


def test_copies_are_made_only_where_memory_is_free(opened, monkeypatch):
    bytes_ = checkpoint.local_bytes(few())
    monkeypatch.setattr(checkpoint, "available_memory", lambda: int(3 * bytes_ / 0.9) + 1)
    _, saver, _ = opened(async_ckpt="auto")
    assert saver.check_space(few()) == []  # a copy, and as much as the gradients and more on the CPU
    saver.begin(few(), {"update": 1, "val_loss": None, **STEP})
    assert saver.in_flight
    saver.finish()
    monkeypatch.setattr(checkpoint, "available_memory", lambda: int(2.9 * bytes_ / 0.9))
    _, saver, _ = opened(async_ckpt="auto")
    assert re.match(r"--async-ckpt: off, .* need 0.0 MiB of memory on \S+, 0.0 MiB are av", saver.check_space(few())[0])
    saver.begin(few(), {"update": 2, "val_loss": None, **STEP})
    assert not saver.in_flight and saver.saved == 2
    monkeypatch.setattr(checkpoint, "available_memory", lambda: None)
    _, saver, _ = opened(async_ckpt="auto")
    assert "this system doesn't tell" in saver.check_space(few())[0]
    _, saver, _ = opened(async_ckpt="on")
    assert saver.check_space(few()) == []  # as asked for


def in_small_disk(path, size, line):
    """Run a command with a tmpfs of `size` at `path`, which nobody else sees; skips where the system refuses."""
    path.mkdir()
    shell = ["unshare", "-Urm", "bash", "-c", f'mount -t tmpfs -o size={size} none {path} && exec "$@"', "-"]
    if not shutil.which("unshare") or subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system of his own")
    return subprocess.run([*shell, *map(str, line)], capture_output=True, text=True, env=environment(), timeout=300)


@pytest.mark.parametrize("mode", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_full_disk(tmp_path, mode):
    line = command(PROGRAM, "full_disk", tmp_path / "small" / "ckpt", json.dumps({"async_ckpt": mode}), nproc=2)
    done = in_small_disk(tmp_path / "small", "1600k", line)
    assert done.returncode == 1
    message = one_error(done)
    words = r"step \d+ could not be saved: \S+step_\d+: .*no space left on (the )?device"
    assert re.search(words, message.lower()), message
    assert re.search(
        r"\d\.\d MiB are needed, 0\.\d MiB are free on its disk; the older checkpoints are intact", message
    )
    assert done.stdout.count("NOT SAVED") == 3 and "training goes on" in done.stdout
    told = result(done)
    assert "there is room for 2" in told["notes"][0]
    assert {e["event"] for e in told["events"]} == {"save_failed"}


def test_a_disk_too_small_for_one_checkpoint(tmp_path):
    line = command(PROGRAM, "full_disk", tmp_path / "small" / "ckpt", json.dumps({"async_ckpt": "off"}))
    done = in_small_disk(tmp_path / "small", "300k", line)
    assert done.returncode == 2
    assert re.search(r"a checkpoint takes 0.\d MiB, 0.3 MiB are free on its disk", one_error(done))


@pytest.mark.slow
def test_a_read_only_directory(tmp_path):
    shell = f'mount -o remount,ro {tmp_path / "small"} && exec "$@"'
    line = ["bash", "-c", shell, "-", *command(PROGRAM, "hold", tmp_path / "small" / "ckpt", '{"update": 1}')]
    done = in_small_disk(tmp_path / "small", "1m", line)
    assert done.returncode == 2
    assert one_error(done).endswith("ckpt: read-only file system; choose a writable directory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "mode", "said"),
    [
        ("hash", "on", "rank 1: no space left on device: a file"),
        pytest.param("write", "off", "rank 1: no space left on device: a file", marks=pytest.mark.slow),
        pytest.param("stage", "on", "rank 1 has no memory for a copy", marks=pytest.mark.slow),
    ],
)
def test_one_rank_that_fails_hangs_no_other(tmp_path, where, mode, said):
    done = program("failing_rank", tmp_path / "ckpt", nproc=2, code=1, rank=1, async_ckpt=mode, where=where)
    assert done.stdout.count(f"NOT SAVED: {tmp_path}/ckpt/step_2: {said}") == 1
    assert "3 3 ['step_1', 'step_3']" in done.stdout  # the next save is sound, and counts anew
    assert said in one_error(done) and "step 5 could not be saved" in one_error(done)
    assert names(tmp_path / "ckpt") == ["step_1", "step_3"]


@pytest.mark.slow
def test_a_rank_without_memory_for_a_copy_makes_saves_synchronous(tmp_path):
    done = program("failing_rank", tmp_path / "ckpt", nproc=2, rank=1, async_ckpt="auto", where="stage")
    assert "note: --async-ckpt: off, training waits for saves: rank 1 has no memory" in done.stdout
    assert len(step_dirs(tmp_path / "ckpt")) == 5


@pytest.mark.slow
def test_a_directory_that_vanishes_and_comes_back(tmp_path):
    done = program("vanishing", tmp_path / "ckpt", nproc=2)
    assert result(done) == ["step_1", "step_3"]
    assert "step 2 | NOT SAVED" in done.stdout and "no such file or directory" in done.stdout


@pytest.mark.slow
def test_a_directory_that_nodes_do_not_share(tmp_path):
    done = program("unshared", tmp_path, nproc=2, code=1)
    assert "does not see what rank 0 wrote there" in one_error(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "every"),
    [("on", 9), ("off", 11)],  # 1 tries them all, in minutes
)
def test_killed_at_each_file_operation(tmp_path, mode, every):
    told = result(program("killed", tmp_path, async_ckpt=mode, every=every))
    assert told["operations"] > 50 and told["with leftovers"] > 20 / every


# ---- one writer ------------------------------------------------------------------------------------------------------


class Writer:
    """A process that holds the directory; `said` is what it printed before it was ready."""

    def __init__(self, path, **options):
        line = command(PROGRAM, "hold", path, json.dumps(options))
        self.process = subprocess.Popen(
            line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said, self.pid = "", 0
        for text in self.process.stdout:
            if text.startswith("ready"):
                self.pid = int(text.split()[1])
                break
            self.said += text

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait(timeout=30)

    def error(self):
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 1, out + err
        return next(x for x in err.splitlines() if x.startswith("error: "))


@pytest.fixture
def writer():
    made = []

    def make(path, **options):
        made.append(Writer(path, **options))
        assert made[-1].pid, made[-1].process.communicate()
        return made[-1]

    yield make
    for w in made:
        if w.process.poll() is None:
            w.process.send_signal(signal.SIGCONT)
            w.end()
        w.process.stdout.close()
        w.process.stderr.close()


@pytest.mark.slow
def test_two_live_writers(tmp_path, writer):
    path = tmp_path / "ckpt"
    first = writer(path, update=1)
    who = rf"another run is writing there \(pid {first.pid} on {re.escape(parallel.host_name())}, since 20\S+\)"
    assert re.search(who + "; wait for it or choose another", one_error(program("hold", path, code=2, update=2)))
    (path / ".lock").unlink()  # by hand, or a file system without locks
    done = program("hold", path, code=2, update=2)
    assert re.search(who, one_error(done)) and f"did not end in order (pid {first.pid}" in done.stdout
    first.end()
    second = writer(path, update=2)  # of this host, and dead: at once
    assert "did not end in order" not in second.said
    events = [json.loads(x) for x in (path / "events.jsonl").open()]
    assert [e["predecessor"]["pid"] for e in events if e["event"] == "took_over"] == [first.pid]
    assert names(path) == ["step_1", "step_2"]


@pytest.mark.slow
def test_a_stopped_holder_of_the_lock_is_told(tmp_path, writer):
    first = writer(tmp_path / "ckpt", update=1)
    first.process.send_signal(signal.SIGSTOP)
    message = one_error(program("hold", tmp_path / "ckpt", code=2, update=2))
    assert f"(pid {first.pid} on" in message and "seems stopped: no heartbeat for 2 s" in message
    assert message.endswith(f"let it go on (kill -CONT {first.pid}) or end it (kill -KILL {first.pid})")


@pytest.mark.parametrize(
    ("saving", "ended"),
    [
        ("in flight", False),
        pytest.param("before", False, marks=pytest.mark.slow),
        pytest.param("", False, marks=pytest.mark.slow),
        pytest.param("", True, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_writer_that_wakes_up_writes_nothing(tmp_path, writer, saving, ended):
    path = tmp_path / "ckpt"
    first = writer(path, update=1, stop=saving)
    if not saving:
        first.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    (path / ".lock").unlink()
    second = writer(path, update=2, seconds=1 if ended else 60)
    assert f"did not end in order (pid {first.pid} on" in second.said and "waiting up to 3 s" in second.said
    if ended:
        assert second.process.wait(timeout=60) == 0
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir() if p.name not in (".heartbeat", "events.jsonl")}
    first.process.send_signal(signal.SIGCONT)
    message = first.error()
    if ended:
        assert "its .writer.json is gone: another attempt took over and has ended, or it was removed" in message
    else:
        assert re.search(rf"superseded by attempt [0-9a-f]{{8}} of pid {second.pid} on", message)
    assert message.endswith("nothing more was written here")
    after = {p.name: p.stat().st_mtime_ns for p in path.iterdir() if p.name not in (".heartbeat", "events.jsonl")}
    assert before == after and names(path) == ["step_1", "step_2"]
    rows = [json.loads(x) for x in (path / "events.jsonl").open()]
    takeover = next(i for i, row in enumerate(rows) if row["event"] == "took_over")
    late = [row for row in rows[takeover:] if row["attempt"] != rows[takeover]["attempt"]]
    assert len(late) <= 1  # a row can be on its way into the file in the moment of the stop
