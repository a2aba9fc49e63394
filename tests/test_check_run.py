"""check.py ckpt and run: a good run passes untouched, and each thing that can be wrong with one fails by name."""

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import SMALL, command, environment, one_error, run

import check
from fourscale import checkpoint, rundir
from fourscale.flags import CheckCkptConfig, CheckRunConfig


@pytest.fixture(scope="module")
def good(trained):
    """A finished run of two ranks with checkpoints 5, 10, 15, 20."""
    return trained("--ckpt-every", 5, nproc=2)


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "ckpt")


def ckpt_faults(directory, deep=False):
    return faults(check.check_ckpt(str(directory), CheckCkptConfig((str(directory),), deep)))


def run_faults(directory):
    return faults(check.check_run(str(directory), CheckRunConfig((str(directory),))))


def faults(report):
    return [f"{c['name']}: {c['text']}" for c in report.checks if c["status"] == "FAIL"]


def notes(report, name):
    return [c["text"] for c in report.checks if c["status"] != "FAIL" and c["name"] == name]


def edit(path, change):
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def edit_rows(directory, change):
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in change(rows) or rows))


def reseal(step):
    """Make step.json's sums those of the files as they are."""

    def change(table):
        for name in table["files"]:
            data = (step / name).read_bytes()
            table["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    edit_step(step, change)


def edit_step(step, change):
    """Change step.json as its writer might have."""

    def sealed(table):
        change(table)
        table["sha256"] = rundir.seal(table)

    edit(step / "step.json", sealed)


def snapshot(directory):
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in directory.rglob("*")}


# ---- a good run ------------------------------------------------------------------------------------------------------


def test_checkpoints_of_a_good_run(good, tmp_path):
    before = snapshot(good)
    shown = run("check.py", "ckpt", good, good / "step_10", "--deep", "--json", tmp_path / "checks.json").stdout
    assert snapshot(good) == before, "a check only reads"
    lines = shown.splitlines()
    steps = [line for line in lines if line.startswith("pass  step_")]
    assert [line.split()[1] for line in steps] == ["step_5", "step_10", "step_15", "step_20", "step_10"]
    assert "3,840 tokens, held-out loss " in steps[1] and " in 3 files, written 20" in steps[1]
    assert steps[3].endswith("(latest, best)") and "no held-out loss" in steps[2]
    assert lines[-1] == "2 place(s) checked, nothing failed"
    whole, single = json.loads((tmp_path / "checks.json").read_text())
    assert whole["dir"] == str(good) and whole["ok"] and list(single["figures"]["checkpoints"]) == ["step_10"]
    assert whole["figures"]["checkpoints"]["step_20"]["tokens"] == 7_400


def test_a_good_run_in_words(good, data, tmp_path):
    before = snapshot(good)
    shown = run("check.py", "run", good, "--json", tmp_path / "checks.json").stdout
    assert snapshot(good) == before, "a check only reads"
    digest = json.loads((good / "DONE.json").read_text())["digest"]
    for words in (
        "note  model      gpt2, 2 layers x 32 wide, 4 heads, d_ff 128, ctx 32, 257 ids: 36,736 parameters",
        f"note  data       {data}: train sha256 ",
        "note  budget     20 updates of 12 windows x 32 = 384 tokens: 7,400 in all, the last update 104",
        "note  schedule   cosine, lr 0.003, min lr 0.0003, warmup 4",
        "note  precision  fp32",
        "note  guards     updates of 4 times the mean loss are dropped; stops after 10 dropped in a row",
        "pass  tokenizer  byte, 257 ids, sha256 ",
        "from update 0: 2 x cpu, ddp, 6 windows x 1 micro-batch a rank",
        "pass  metrics    20 rows, each update 1 .. 20 once, rates and tokens as planned; 7,400 tokens, 0 skipped",
        "pass  receipt    DONE.json: finished, 20 updates, 7,400 tokens, held-out loss ",
        f"digest {digest[:12]} recomputed from step_20",
        "1 run(s) checked, nothing failed",
    ):
        assert words in shown, shown
    table = json.loads((tmp_path / "checks.json").read_text())[0]
    assert table["ok"] and table["figures"]["rows"] == 20 and table["figures"]["training"]["token_budget"] == 7_400


def test_a_mixture_is_told_part_by_part(copy):
    def mix(run):
        parts = {name: run["data"] | {"weight": weight} for name, weight in (("web", "7/10"), ("code", "3/10"))}
        run["data"] = {"parts": parts}
        run["attempts"][0]["data"] = ["/data/web", "/data/code"]

    edit(copy / "run.json", mix)
    report = check.check_run(str(copy), CheckRunConfig())
    assert not faults(report)
    web, code = notes(report, "data")
    assert web.startswith("/data/web: train sha256 ") and web.endswith(", share 0.7") and code.endswith(", share 0.3")


@pytest.mark.slow
def test_attempts_and_branches(data, good, tmp_path):
    first, branch = tmp_path / "first", tmp_path / "branch"
    flags = ("--data", data, "--ckpt-dir", first, *SMALL)
    run("train.py", *flags, "--stop-after", 7)
    stopped = check.check_run(str(first), CheckRunConfig())
    assert not faults(stopped)
    assert notes(stopped, "receipt") == [
        "STOPPED.json: stopped by --stop-after 7 after update 7 of 20; --resume auto goes on"
    ]
    run("train.py", *flags, "--resume", "auto", "--local-bsz", 4)
    resumed = check.check_run(str(first), CheckRunConfig())
    assert not faults(resumed)
    attempts = notes(resumed, "attempt")
    assert len(attempts) == 3 and "from update 7: 1 x cpu" in attempts[1]
    assert attempts[2] == "2 changed local_bsz 8 -> 4, grad_accum 2 -> 3"

    run("train.py", "--branch-from", good / "step_10", "--ckpt-dir", branch, "--global-bsz", 6, "--tokens", 5_000)
    report = check.check_run(str(branch), CheckRunConfig())
    assert not faults(report), report.checks
    origin = notes(report, "origin")
    assert origin[0].startswith(f"branched from {good / 'step_10'} (digest ")
    assert origin[0].endswith("after 10 updates, 3,840 tokens")
    assert "differs: global_bsz: was 12, now 6" in origin
    assert "each update 11 .. 17 once" in notes(report, "metrics")[0]
    assert "17 updates (from 10 and 3,840 on) of 6 windows" in notes(report, "budget")[0]
    shutil.rmtree(branch / "step_17")
    shutil.copytree(good / "step_20", branch / "step_17")
    assert any("its step.json is that of step_20" in fault for fault in run_faults(branch))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def shard(step):
    return step / sorted(p.name for p in step.glob("*.distcp"))[0]


def truncate(step):
    shard(step).write_bytes(shard(step).read_bytes()[:-1])
    return "bytes"


def remove(step):
    shard(step).unlink()
    return "is missing"


def flip(step):
    content = bytearray(shard(step).read_bytes())
    content[len(content) // 2] ^= 1
    shard(step).write_bytes(content)
    return "is damaged: its sha256"


def swap(step):
    one, other = sorted(step.glob("*.distcp"))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return "__0_0.distcp"


def swap_with_another_step(step):
    shutil.copy(shard(step.with_name("step_10")), shard(step))
    return "is damaged: its sha256"


def drop_step_json(step):
    (step / "step.json").unlink()
    return "has no step.json: half a copy"


def garble_step_json(step):
    (step / "step.json").write_text((step / "step.json").read_text()[:100])
    return "not valid JSON"


def lose_the_table(step):
    edit_step(step, lambda table: table.update(files=table["files"] | {"../run.json": {"size": 1, "sha256": ""}}))
    return "its table of files is not as train.py writes it"


class Payload:
    def __reduce__(self):
        return exec, (f"open({self.target!r}, 'w')",)


def booby_trap(step):
    Payload.target = str(step.parent / "executed")
    (step / ".metadata").write_bytes(pickle.dumps(Payload()))
    reseal(step)
    return "do not trust this file"


def other_model(step):
    edit(step.parent / "run.json", lambda run: run["model"].update(d_model=64, d_ff=256))
    return "(320, 32), by run.json (320, 64), and"


def other_depth(step):
    edit(step.parent / "run.json", lambda run: run["model"].update(n_layers=1))
    return "has no place in the model of run.json, and"


def no_optimizer(step):
    metadata = checkpoint.SafeReader(step).read_metadata()
    metadata.state_dict_metadata = {k: v for k, v in metadata.state_dict_metadata.items() if "exp_avg_sq" not in k}
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(step)
    return "has no optim.exp_avg_sq."


DAMAGE = (
    *(truncate, remove, flip, swap, swap_with_another_step, drop_step_json, garble_step_json, lose_the_table),
    *(booby_trap, other_model, other_depth, no_optimizer),
)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_checkpoints(copy, damage):
    words = damage(copy / "step_15")
    found = [fault for fault in ckpt_faults(copy) if "step_15" in fault]
    assert found and words in found[0], found
    assert not (copy / "executed").exists()
    if damage not in (other_model, other_depth):
        assert not [fault for fault in ckpt_faults(copy) if "step_15" not in fault], "the others are good"


def test_the_remedy_for_a_damaged_newest_checkpoint(copy):
    flip(copy / "step_20")
    done = run("check.py", "ckpt", copy, code=2)
    assert one_error(done) == f"error: failed: {copy}: step_20"
    remedy = "note  remedy     the newest good one is step_15: go on from it with --resume auto --resume-step 15"
    assert remedy in done.stdout.splitlines()


def with_piece(step, change):
    """Change a piece of a tensor of a rank's file, sums and all. torch.load would notice a bare flip by itself."""
    for index, where in checkpoint.SafeReader(step).read_metadata().storage_data.items():
        if index.fqn.startswith("model.") and where.length > 4096:
            content = bytearray((step / where.relative_path).read_bytes())
            piece = torch.load(io.BytesIO(content[where.offset :][: where.length]), weights_only=True)
            out = io.BytesIO()
            torch.save(change(piece), out)
            content[where.offset :][: where.length] = out.getvalue()
            assert len(out.getvalue()) == where.length
            content[where.offset : where.offset + where.length] = out.getvalue()
            (step / where.relative_path).write_bytes(content)
            reseal(step)
            return index.fqn
    raise AssertionError("no piece to change")


def test_deep_reads_the_numbers(copy):
    def poison(piece):
        piece.view(-1)[7] = float("nan")
        return piece

    name = with_piece(copy / "step_15", poison)
    assert not ckpt_faults(copy)
    found = ckpt_faults(copy, deep=True)
    assert found == [f"step_15: {copy / 'step_15'}: {name} is not finite"]
    with_piece(copy / "step_10", lambda piece: piece.T.contiguous() if piece.dim() == 2 else piece.view(-1, 1))
    assert any("step_10" in fault and "by .metadata" in fault for fault in ckpt_faults(copy, deep=True))


def test_leftovers_and_pointers(copy):
    shutil.copytree(copy / "step_5", copy / "step_25.tmp-abcd1234")
    shutil.copytree(copy / "step_5", copy / "discarded-step_30")
    (copy / "latest").write_text("step_15\n")
    report = check.check_ckpt(str(copy), CheckCkptConfig())
    assert not faults(report)
    left = notes(report, "leftover")
    assert left[0].startswith("discarded-step_30 (") and "set aside by a resume" in left[0]
    assert left[1].startswith("step_25.tmp-abcd1234 (") and "next start removes it" in left[1]
    assert notes(report, "latest") == ["says 'step_15'; the newest is step_20, which readers take"]
    (copy / "best").write_text("step_17\n")
    assert ckpt_faults(copy)[0].startswith("best: ")
    (copy / "best").unlink()
    (copy / "tokenizer.json").write_text("{}")
    assert ckpt_faults(copy)[0].startswith("tokenizer: ")


# ---- records ---------------------------------------------------------------------------------------------------------


def gap(directory):
    edit_rows(directory, lambda rows: rows[:6] + rows[8:])
    return "metrics: updates 7 .. 8 are missing; restore"


def gap_at_the_end(directory):
    edit_rows(directory, lambda rows: rows[:17])
    return "metrics: rows end at update 17, but there is step_20"


def no_metrics(directory):
    (directory / "metrics.jsonl").unlink()
    return "metrics: rows are missing, but there is step_5"


def twice(directory):
    edit_rows(directory, lambda rows: rows[:9] + rows[7:])
    return "metrics: update 8 stands after 9"


def tokens(directory):
    edit_rows(directory, lambda rows: rows[3].update(tokens=9))
    return "metrics: update 4 has 9 tokens, by the contract 1,536"


def tail(directory):
    edit_rows(directory, lambda rows: rows[19].update(tokens=7_680))
    return "metrics: update 20 has 7,680 tokens, by the contract 7,400"


def rate(directory):
    edit_rows(directory, lambda rows: [r.update(lr=1e-3) for r in rows[10:12]] and None)
    return "metrics: update 11 has lr 0.001, by the contract 0.00"


def skips(directory):
    edit_rows(directory, lambda rows: rows[12].update(skipped=2, applied=11))
    return "metrics: update 13: the counts of applied and skipped updates do not add up"


def odd(directory):
    edit_rows(directory, lambda rows: rows[12].update(lr="much"))
    return "metrics: update 13: lr is 'much', not a number"


def step_and_row(directory):
    edit_step(directory / "step_10", lambda step: step.update(skipped=1))
    return "metrics: update 10 has skipped 0, step_10 1"


def digest(directory):
    edit(directory / "DONE.json", lambda done: done.update(digest="0" * 64))
    return "receipt: the digest of step_20 is not that of DONE.json"


def damaged_final(directory):
    flip(directory / "step_20")
    return "receipt: step_20 is not there in good order"


def receipt(directory):
    edit(directory / "DONE.json", lambda done: done.update(tokens=7_401))
    return "receipt: DONE.json has tokens 7,401, the run 7,400"


def stopped_elsewhere(directory):
    (directory / "DONE.json").rename(directory / "STOPPED.json")
    shutil.rmtree(directory / "step_20")
    return "receipt: STOPPED.json is of update 20, there is step_15"


def budget(directory):
    edit(directory / "run.json", lambda run: run["training"].update(token_budget=7_000))
    return "budget: "


def contract_by_hand(directory):
    edit(directory / "run.json", lambda run: run["training"].pop("lr"))
    return "open: "


def newer(directory):
    edit(directory / "run.json", lambda run: run.update(format=9))
    return "open: "


RECORDS = (
    *(gap, gap_at_the_end, no_metrics, twice, tokens, tail, rate, skips, odd, step_and_row),
    *(digest, damaged_final, receipt, stopped_elsewhere, budget, contract_by_hand, newer),
)


@pytest.mark.parametrize("change", RECORDS, ids=lambda f: f.__name__)
def test_records_that_do_not_agree(copy, change):
    words = change(copy)
    assert any(fault.startswith(words) for fault in run_faults(copy)), run_faults(copy)


def test_skips_and_events_are_told(copy):
    skip = {"event": "skipped", "attempt": "a", "why": "loss not finite on rank 1", "loss": None, "norm": None}
    lines = [skip | {"update": i, "samples": [12 * i - 12, 12 * i]} for i in range(2, 9)]
    lines += [{"time": "2026-01-02T03:04:05+00:00", "event": "changed", "update": 7, "what": ["a: 1", "b: 2"]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (copy / "events.jsonl").write_text(text + '{"event": "skip')
    report = check.check_run(str(copy), CheckRunConfig())
    assert not faults(report)
    told = notes(report, "skipped")
    assert told[0] == "update 2, samples 12 .. 23: loss not finite on rank 1"
    assert len(told) == 6 and told[5] == "and 2 more in events.jsonl"
    assert notes(report, "event") == [
        "2026-01-02 03:04 changed: update 7, what a: 1; b: 2",
        "1 line(s) of events.jsonl were cut short by a crash",
    ]


def test_updates_that_a_run_dropped(trained, tmp_path):
    """A rate that throws the weights far off, and a guard that drops what follows: rows and events tell the same."""
    dropped = ("--skip-spikes", 1.5, "--skip-limit", 100, "--lr", 1.0)
    out = shutil.copytree(trained(*dropped, nproc=2), tmp_path / "ckpt")
    report = check.check_run(str(out), CheckRunConfig())
    assert not faults(report)
    last = report.figures["last"]
    events = [e for e in report.figures["events"] if e["event"] == "skipped"]
    assert len(events) == last["skipped"] > 0 and last["applied"] + last["skipped"] == 20
    for e in events:
        assert e["samples"] == [12 * e["update"] - 12, 12 * e["update"]]
        assert e["why"] == f"loss {e['loss']:.4g} is a spike"
    assert f"{last['skipped']} skipped" in notes(report, "metrics")[0]
    (out / "events.jsonl").unlink()
    told = notes(check.check_run(str(out), CheckRunConfig()), "skipped")
    first = events[0]["update"]
    assert told[0].startswith(
        f"{len(events)} of the skipped updates, the first {first}, have no reason in events.jsonl"
    )


def test_what_is_no_run_gets_one_line(good, data, tmp_path):
    half = shutil.copytree(good, tmp_path / "half")
    (half / "run.json").unlink()
    (half / "step_5" / "step.json").unlink()
    (tmp_path / "step_9.tmp-ab").mkdir()
    (tmp_path / "empty").mkdir()
    shutil.copytree(good / "step_5", tmp_path / "alone" / "step_5")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    shutil.copy(good / "run.json", tmp_path / "runs" / "a")
    expected = {
        tmp_path / "missing": "no such directory; train.py writes one under --ckpt-dir",
        tmp_path / "empty": "no run directory (no run.json)",
        data: "a data directory, no run; python check.py data",
        half: "holds checkpoints but no run.json; copy it and tokenizer.json",
        half / "step_5": "has no step.json: half a copy",
        tmp_path / "alone" / "step_5": "no run.json beside it; copy it and tokenizer.json",
        tmp_path / "step_9.tmp-ab": "an unfinished save, no checkpoint",
        tmp_path / "runs": "holds runs, is none; name one, such as",
    }
    for path, words in expected.items():
        for found in (ckpt_faults(path), run_faults(path)):
            assert len(found) == 1 and found[0].startswith(f"open: {path}: ") and words in found[0], found
    assert "python check.py run" in run_faults(good / "step_5")[0]
    for words in (("ckpt",), ("run",), ("shards", good), ()):
        message = one_error(run("check.py", *words, code=2))
        assert "python check.py" in message, message


@pytest.mark.slow
def test_a_living_and_a_dead_run(data, tmp_path):
    """Checked while it trains and writes, and after it was killed: neither is a fault."""
    out = tmp_path / "ckpt"
    flags = ("--data", data, "--ckpt-dir", out, *SMALL, "--tokens", "none", "--steps", 1_000_000)
    process = subprocess.Popen(
        command("train.py", *flags, "--ckpt-every", 20, "--keep", 2, "--eval-every", 0),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("step_*[0-9]")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(3):
            report = check.check_run(str(out), CheckRunConfig())
            assert not faults(report), report.checks
            assert not ckpt_faults(out)
        assert "neither DONE.json nor STOPPED.json: running (attempt " in notes(report, "receipt")[0]
        os.kill(process.pid, signal.SIGSTOP)
        stopped = check.check_run(str(out), CheckRunConfig())
        assert "dead or stopped, no heartbeat for 12 s" in notes(stopped, "receipt")[0]
    finally:
        process.kill()
        process.wait()
    dead = check.check_run(str(out), CheckRunConfig())
    assert not faults(dead)
    first, second = notes(dead, "receipt")
    assert f"dead (attempt {json.loads((out / 'run.json').read_text())['attempts'][0]['attempt']}, pid " in first
    assert second.startswith("a resume would go on from step_")
