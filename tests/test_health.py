"""health.py: verdicts in words, tables, pictures and a page; of runs that live, and for scripts."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, command, environment, one_error, run
from test_curves import RUN, TRAINING, row, written

import health
from fourscale import curves, page, plots, verdict
from fourscale.cli import InputError


def race(directory, name, updates=500, lr=3e-3, floor=1.5, noise=0.02, run=RUN, **fields):
    """A run whose loss falls to `floor`; the fields of a row from its update."""
    rng = np.random.default_rng(len(name))
    contract = run | {"training": TRAINING | {"lr": lr, "min_lr": lr / 10}}
    lines = []
    for u in range(1, updates + 1):
        loss = floor + (4.19 - floor) / (1 + (u - 1) / 12) ** 0.7
        held = {"val_loss": loss + 0.03} if u % 20 == 0 else {}
        changed = {k: f(u) for k, f in fields.items()}
        lines.append(row(u, loss=loss + rng.normal(0, noise), lr=lr, **held) | changed)
    run_dir = written(directory / name, lines, contract)
    if updates == 500:
        (run_dir / "DONE.json").write_text('{"update": 500}')
    return run_dir


def judged(*paths, target=1.75):
    records = [curves.read(p) for p in paths]
    return [curves.Judged(r, target, verdict.judge(r.curve, r.course, target)) for r in records]


def said(capsys, monkeypatch, *args):
    """What health.py says in this process."""
    monkeypatch.setattr(sys, "argv", ["health.py", *map(str, args)])
    health.main.__wrapped__()
    return capsys.readouterr().out


# ---- words ---------------------------------------------------------------------------------------------------------


def test_one_run_is_told_in_full_without_torch_or_matplotlib(tmp_path):
    run_dir = race(tmp_path, "good", updates=250, floor=1.3)
    script = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "heavy = {'torch', 'matplotlib', 'tokenizers', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    line = [sys.executable, "-c", script, str(ROOT / "health.py"), str(run_dir)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == f"good: {judged(run_dir)[0].judgement.verdict}"
    words = {line[2:14].strip(): line[14:] for line in rest if line[2:14].strip()}
    assert words["progress"].startswith("update 250 of 500 (50.0%), 250,000 tokens")
    assert re.fullmatch(r"1\.\d{4} at the end, 90% interval 1\.\d{4} \.\. 1\.\d{4}", words["forecast"])
    assert words["target"].startswith("1.75; reached at update ") and "below" in words["target"]
    assert re.match(r"1\.\d{4} at update 240 \(\d\.\d{3} bits a byte\)", words["held out"])
    assert words["why"] and words["what to do"] and "smoothed" in words["loss"]
    assert "\033" not in done.stdout, "no colours in a pipe"


def test_several_runs_are_a_table(tmp_path, capsys, monkeypatch):
    race(tmp_path, "slow", lr=2e-4, floor=2.0)
    race(tmp_path, "right")
    race(tmp_path, "young", updates=100, lr=1e-2)
    out = said(capsys, monkeypatch, tmp_path)
    lines = out.splitlines()
    assert lines[0] == "target: a held-out loss of 1.75 nats a token"
    head = re.split(r"  +", lines[2])
    columns = "run,peak lr,updates,verdict,held out,forecast,beat the target,crossed at"
    assert head == columns.split(",")
    table = {cells[0]: dict(zip(head, cells, strict=True)) for line in lines[3:6] if (cells := re.split("  +", line))}
    right, slow, young = table["right"], table["slow"], table["young"]
    assert (right["verdict"], right["beat the target"], right["updates"]) == ("healthy", "yes", "500")
    assert right["forecast"] == "-" and right["held out"] == page.nats(judged(tmp_path / "right")[0].held_out[1])
    first = next(
        r for r in map(json.loads, (tmp_path / "right" / "metrics.jsonl").open()) if r.get("val_loss", 9) <= 1.75
    )
    assert right["crossed at"] == str(first["update"])
    assert (slow["verdict"], slow["beat the target"], slow["crossed at"]) == ("stalled", "no", "-")
    assert (slow["peak lr"], young["updates"]) == ("0.0002", "100 of 500")
    assert re.fullmatch(r"\d\.\d{3} \(\d\.\d{3} \.\. \d\.\d{3}\)", young["forecast"])
    assert "\nslow: stalled\n  why" in out and "\n  what to do" in out


def test_a_target_of_the_command_line_wins_over_the_runs_own(tmp_path, capsys, monkeypatch):
    run_dir = race(tmp_path, "good")
    assert "1.75; reached at" in said(capsys, monkeypatch, run_dir)
    out = said(capsys, monkeypatch, run_dir, "--target-loss", 1.3)
    assert "good: stalled" in out and "1.3; the newest held-out loss is" in out


def test_other_tokenizers_are_compared_in_bits_a_byte(tmp_path):
    race(tmp_path, "bytes")
    race(tmp_path, "bpe", run=RUN | {"baselines": {"unigram_nats": 6.0, "bytes_per_token": 3.0}})
    rows = page.table(judged(tmp_path / "bytes", tmp_path / "bpe"))
    assert float(rows[0]["bits/byte"]) == pytest.approx(3 * float(rows[1]["bits/byte"]), rel=0.01)


def test_json_holds_what_is_said_and_stands_alone_on_standard_output(tmp_path, capsys, monkeypatch):
    race(tmp_path, "good")
    race(tmp_path, "broken", updates=60, loss=lambda u: None if u > 30 else 4.0, val_loss=lambda u: None)
    table = {r["run"]: r for r in json.loads(said(capsys, monkeypatch, tmp_path, "--json", "-"))}
    good, broken = table["good"], table["broken"]
    assert (good["verdict"], good["update"], good["beat"], good["target"]) == ("healthy", 500, True, 1.75)
    assert good["crossed"] and good["forecast"]["low"] <= good["val_loss"] <= good["forecast"]["high"]
    assert (broken["verdict"], broken["val_loss"], broken["beat"]) == ("diverging", None, False)
    said(capsys, monkeypatch, tmp_path, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == list(table.values())


def test_the_verdict_has_its_colour_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert health.shown("diverging") == "diverging"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert health.shown("diverging") == "\033[1;31mDIVERGING\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert health.shown("diverging") == "diverging"


# ---- scripts, errors, runs that live -------------------------------------------------------------------------------


def test_exit_codes_and_errors_of_one_line(tmp_path):
    race(tmp_path, "slow", floor=2.0)
    race(tmp_path, "right")
    run("health.py", tmp_path, "--fail-on", "diverging,suspicious")
    done = run("health.py", tmp_path, "--fail-on", "diverging, stalled", code=1)
    assert one_error(done) == "error: slow is stalled (--fail-on)"
    assert "slow: stalled" in done.stdout, "the verdict is said all the same"
    done = run("health.py", tmp_path / "right", "--fail-on", "stale", code=2)
    assert one_error(done).startswith("error: --fail-on stale: the verdicts are healthy, stalled, diverging")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name what to judge, as in python health.py ./ckpt"),
        (["x", "--target-loss", "-1"], "--target-loss -1.0: must be above 0"),
        (["x", "--png", "no/dir/x.png"], "--png no/dir/x.png: no such directory to write to"),
        (["x", "--html", "."], "--html .: a directory; name a file in it"),
        (["-", "--follow"], "--follow: standard input ends by itself"),
        (["x", "--follow", "--every", "0"], "--every 0.0: must be 0.1"),
        (["nowhere"], "nowhere: no such file or directory"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_usage_errors(args, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["health.py", *args])
    with pytest.raises(Exception, match=re.escape(words)) as caught:
        health.main.__wrapped__()
    assert type(caught.value).__name__ == "InputError" and "\n" not in str(caught.value)


def test_outputs_go_where_links_and_devices_lead_and_over_nothing_that_is_read(tmp_path, capsys, monkeypatch):
    run_dir = race(tmp_path, "run", updates=60)
    (tmp_path / "link.json").symlink_to("real.json")
    said(capsys, monkeypatch, run_dir, "--json", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text())
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    said(capsys, monkeypatch, run_dir, "--json", tmp_path / "pipe")
    assert json.loads(os.read(reader, 1 << 16))[0]["run"] == "run", "as /dev/null is, when root is asked to write there"
    os.close(reader)
    before = (run_dir / "metrics.jsonl").read_bytes()
    (tmp_path / "other").symlink_to(run_dir / "metrics.jsonl")
    for args in (
        ["--png", run_dir / "metrics.jsonl"],
        ["--json", tmp_path / "other"],
        ["--html", run_dir / "DONE.json"],
    ):
        with pytest.raises(InputError, match="is read; name another file"):
            said(capsys, monkeypatch, run_dir, *args)
    with pytest.raises(InputError, match=r"--html .*: --png is written there"):
        said(capsys, monkeypatch, run_dir, "--html", tmp_path / "x", "--png", tmp_path / "x")
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_metrics_through_a_pipe_are_refused_instead_of_read_as_nothing(tmp_path):
    line = command("health.py", "-")
    text = "".join(json.dumps(row(u)) + "\n" for u in range(1, 60))
    done = subprocess.run(line, input=text, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 2 and "not from a pipe" in done.stderr and done.stderr.count("\n") == 1


def test_a_log_on_standard_input(tmp_path):
    text = "".join(f"iter {i}: loss {4 - i / 100:.4f}, time 3ms\n" for i in range(60))
    line = command("health.py", "-")
    done = subprocess.run(line, input=text, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("stdin: "), done.stderr
    assert "update 60\n" in done.stdout


def test_a_run_is_followed_to_its_end(tmp_path):
    run_dir = race(tmp_path, "live", updates=40)
    (run_dir / ".heartbeat").write_text("a 1\n")
    (run_dir / ".writer.json").write_text("{}")
    out = tmp_path / "live.json"
    line = command("health.py", run_dir, "--follow", "--every", 0.2, "--json", out)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment())
    seen = []
    try:
        for upto in (40, 80, 500):
            if upto > 40:
                race(tmp_path, "live", updates=upto)
            if upto == 500:
                (run_dir / ".writer.json").unlink()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not (
                out.exists() and json.loads(out.read_text())[0]["update"] == upto
            ):
                time.sleep(0.05)
            seen.append(json.loads(out.read_text())[0])
        told = process.communicate(timeout=30)[0]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    assert [s["update"] for s in seen] == [40, 80, 500] and [s["state"] for s in seen[:2]] == ["running"] * 2
    assert told.count("live: ") == told.count("  progress ") >= 3 and "update 500 of 500 (100.0%)" in told


def test_a_writer_without_a_heartbeat_is_told(tmp_path):
    run_dir = race(tmp_path, "silent", updates=40)
    assert curves.read(run_dir).state == "ended"
    (run_dir / ".writer.json").write_text("{}")
    (run_dir / ".heartbeat").write_text("a 1\n")
    assert curves.read(run_dir).state == "running"
    old = time.time() - 300
    os.utime(run_dir / ".heartbeat", (old, old))
    assert "no sign of life" in page.progress(curves.read(run_dir))
    os.utime(run_dir / ".heartbeat")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for pid, state in ((os.getpid(), "running"), (gone.pid, "ended")):
        (run_dir / ".writer.json").write_text(json.dumps({"host": socket.gethostname(), "pid": pid}))
        assert curves.read(run_dir).state == state, "a writer of this host that is gone has ended"
    (run_dir / ".writer.json").unlink()
    (run_dir / "STOPPED.json").write_text('{"update": 40}')
    assert curves.read(run_dir).state == "stopped"


# ---- pictures and the page -----------------------------------------------------------------------------------------

HOSTILE = "_a$b_^$<script>alert(1)<b>" + "x" * 90


def texts(figure):
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    return legend, [t.get_text() for ax in figure.axes for t in ax.texts]


def test_the_plot_of_a_run_under_way(tmp_path):
    (run_,) = judged(race(tmp_path, "half", updates=250, loss=lambda u: 300.0 if u == 99 else 2.0 + 2 / u))
    figure = plots.panels([run_])
    legend, notes = texts(figure)
    assert legend[:3] == ["training", "training, smoothed", "held out"] and "target 1.75" in legend
    assert any(t.startswith("forecast of the end") for t in legend)
    loss, lr, norm, rate = figure.axes
    assert [ax.get_ylabel().replace("\n", " ") for ax in figure.axes] == [
        *("loss (nats per token)", "learning rate", "gradient norm", "tokens per second")
    ]
    assert rate.get_xlabel() == "update" and norm.get_yscale() == "log" and lr.get_yscale() == "linear"
    low, high = loss.get_ylim()
    f = run_.judgement.forecast
    assert high < 4.5, "a spike of 300 must not flatten the curve"
    assert low < min(f.low, 1.75) and loss.get_xlim()[1] > 500, "target and forecast are within the axes"
    assert any(re.fullmatch(r"\d of 262 losses lie above", t) for t in notes)
    assert "clipped at 1" in notes


def test_the_png_is_as_wide_as_a_readme_and_nothing_is_cut_off(tmp_path):
    runs = judged(race(tmp_path, "right"), race(tmp_path, "slow", lr=2e-4, floor=2.0), race(tmp_path, HOSTILE[:80]))
    png = plots.draw(runs)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", png[16:20]) == (900,)
    (tmp_path / "x.png").write_bytes(png)
    pixels = matplotlib.image.imread(tmp_path / "x.png")[..., :3]
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge > 0.99).all(), "no ink on the border"
    dark = plots.draw(runs, dark=True)
    (tmp_path / "y.png").write_bytes(dark)
    assert np.median(matplotlib.image.imread(tmp_path / "y.png")[..., :3]) < 0.2
    figure = plots.panels(runs)
    legend, _ = texts(figure)
    assert legend[0] == "right: healthy" and legend[1] == "slow: stalled" and len(legend[2]) < 60
    assert figure.axes[1].get_yscale() == "log", "rates that lie a decade apart"


def test_plots_of_nothing_and_of_a_run_that_has_left_for_the_sky(tmp_path):
    (nothing,) = judged(written(tmp_path / "new", []))
    assert plots.draw([nothing])[:4] == b"\x89PNG"
    gone = race(tmp_path, "gone", updates=200, loss=lambda u: 4.0 if u < 20 else None if u > 150 else 1e9)
    (run_,) = judged(gone)
    figure = plots.panels([run_])
    legend, _ = texts(figure)
    assert "50 skipped or not finite" in legend and figure.axes[0].get_ylim()[1] > 1e9
    right, gone = judged(race(tmp_path, "right"), gone)
    assert plots.panels([right, gone]).axes[0].get_ylim()[1] < 6, "it must not flatten another"


def test_runs_of_other_batches_stand_against_tokens(tmp_path):
    runs = judged(race(tmp_path, "small"), race(tmp_path, "large", tokens=lambda u: 4000 * u))
    figure = plots.panels(runs)
    assert figure.axes[3].get_xlabel() == "tokens" and figure.axes[0].get_xlim()[1] > 2e6
    assert plots._counted(1_500_000) == "1.5M" and plots._counted(20_000) == "20k" and plots._counted(500) == "500"


class Page(HTMLParser):
    """What a page holds: tags, attributes that fetch, text; and that each tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.fetched, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "srcset", "href", "action", "data")]
        assert not [k for k, _ in attrs if k.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else_and_shows_names_as_they_are(tmp_path, capsys, monkeypatch):
    attempt = {"started": "2026-11-30", "code": "abc+", "torch": "2.13.0", "device": "cpu", "world_size": 2}
    contract = RUN | {
        "attempts": [attempt | {"data": ["./data<i>"]}],
        "data": {"train_digest": "d1", "val_digest": "d2"},
    }
    contract |= {"config": {"steps": 500, "seed": 0, "lr": 3e-3, "target_loss": 1.75, "stop_when": ["reached"]}}
    contract |= {"tokenizer": {"kind": "char", "vocab_size": 66, "sha256": "ab12"}}
    run_dir = race(tmp_path, HOSTILE[:60], run=contract)
    samples = [
        {"update": u, "prompt": "ROMEO:", "text": f"ROMEO: <b>&</b> </pre><script>x</script> {u}"} for u in (20, 40)
    ]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    race(tmp_path, "slow", lr=2e-4, floor=2.0)
    said(capsys, monkeypatch, tmp_path, "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    found = Page(text)
    assert not found.open and "script" not in found.tags and found.tags.count("table") >= 5
    assert all(v.startswith(("data:image/png;base64,", "#run")) for v in found.fetched) and "://" not in text
    pictures = [base64.b64decode(v.partition(",")[2]) for v in found.fetched if v.startswith("data:")]
    assert len(pictures) == 2 and all(p[:4] == b"\x89PNG" for p in pictures)
    assert "prefers-color-scheme: dark" in text and "default-src 'none'" in text and "refresh" not in text
    for words in (
        *(
            HOSTILE[:60],
            "healthy",
            "stalled",
            "it ended at",
            "crossed at",
            "train digest d1",
            "code abc+",
            "world size 2",
        ),
        *("./data<i>", "kind char", "--stop-when reached", "<b>&</b> </pre><script>x</script> 40", "at update 40"),
    ):
        assert words in found.text, words
    assert "--seed 0" not in found.text, "defaults are left out"
    assert 'content="10"' in page.render(judged(run_dir), b"", b"", refresh_s=10.0)


def test_loss_png_shows_the_target(tmp_path):
    def greens(target):
        run_dir = race(tmp_path, "run", updates=100, run=RUN | {"config": {"target_loss": target}})
        plots.plot_loss(run_dir)
        picture = matplotlib.image.imread(run_dir / "loss.png")
        return int(((picture[..., 1] > 0.55) & (picture[..., 0] < 0.4) & (picture[..., 2] < 0.4)).sum())

    assert greens(1.75) > 100 and greens(None) == 0 and greens("low") == 0


# ---- the race ------------------------------------------------------------------------------------------------------


def shell(*args, **variables):
    line = ["bash", str(ROOT / "launch" / "race.sh"), *map(str, args)]
    env = environment(PYTHON=sys.executable, **{k: str(v) for k, v in variables.items()})
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=600, stdin=subprocess.DEVNULL)


def test_the_race_says_what_it_needs(tmp_path):
    assert "TARGET=" in shell("--help").stdout
    for args, variables, words in (
        (["--lr", "1"], {}, "error: --lr: is set by the race"),
        (["--steps", "2e3"], {}, "error: --steps 2e3: a plain number"),
        (["--stop_after", "9"], {}, "error: --stop_after: is set by the race"),
        (["--target_loss=2"], {}, "error: --target_loss: say TARGET=X"),
        (["--plan"], {}, "error: --plan: trains nothing"),
        (["--steps", "08"], {}, "error: --steps 8: at least 10"),
        ([], {"PROCS": 0}, "error: PROCS=0: a number of processes"),
        ([], {"TEXT": "nowhere"}, "error: TARGET: with another text say"),
        ([], {"TEXT": "nowhere", "TARGET": 2}, "error: TEXT=nowhere: no such file"),
    ):
        done = shell(*args, **variables)
        assert done.returncode == 2 and done.stderr.startswith(words), done.stderr


@pytest.mark.slow
def test_a_race_interrupted_before_the_tenth_is_still_judged_there(data, tmp_path):
    small = ("--d-model", 32, "--n-layers", 1, "--n-heads", 2, "--ctx", 32, "--steps", 40)
    set_ = {"DATA": data, "TARGET": 2.6, "OUT": tmp_path / "race", "PROCS": 1}
    shared = ("--backend", "gloo", "--global-bsz", 16, "--local-bsz", 16, "--warmup", 1, "--eval-every", 1)
    shared += ("--eval-tokens", 8192, "--sample-tokens", 0, "--ckpt-every", 0, "--keep", 1, "--target-loss", 2.6)
    run_dir = tmp_path / "race" / "low_2e-4"
    run("train.py", *small, *shared, "--data", data, "--ckpt-dir", run_dir, "--lr", "2e-4", "--stop-after", 1)
    done = shell(*small, **set_)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tenth = done.stdout.split("== after a tenth")[1].split("==")[0]
    assert tenth.count("4 of 40") == 3 and done.stdout.count("the first tenth") == 3


@pytest.mark.slow
def test_the_race_is_judged_at_a_tenth_and_at_the_end(data, tmp_path):
    small = ("--d-model", 32, "--n-layers", 1, "--n-heads", 2, "--ctx", 32, "--steps", 200)
    set_ = {
        "DATA": data,
        "TARGET": 2.6,
        "OUT": tmp_path / "race",
        "PROCS": 1,
        "LOW": "1e-4",
        "RIGHT": "1e-2",
        "HIGH": 3,
    }
    done = shell(*small, **set_)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tenth, outcome = done.stdout.split("== after a tenth")[1].split("== the outcome")
    assert "20 of 200" in tenth
    lines = [re.split("  +", line.strip()) for line in outcome.splitlines()]
    at = next(i for i, cells in enumerate(lines) if cells[0] == "run")
    assert {"peak lr", "updates", "verdict", "held out", "beat the target", "crossed at"} < set(lines[at])
    table = {cells[0]: dict(zip(lines[at], cells, strict=True)) for cells in lines[at + 1 : at + 4]}
    beat = {name: cells["beat the target"] for name, cells in table.items()}
    assert beat == {"low_1e-4": "no", "right_1e-2": "yes", "high_3": "no"}
    assert (table["low_1e-4"]["verdict"], table["high_3"]["verdict"]) == ("stalled", "diverging")
    assert (tmp_path / "race" / "race.png").read_bytes()[:4] == b"\x89PNG"
    assert not Page((tmp_path / "race" / "race.html").read_text()).open
    again = shell(*small, **set_)
    assert again.returncode == 0 and "a tenth" not in again.stdout and "to the end" not in again.stdout
    assert again.stdout.split("== the outcome")[1] == outcome, "what is over is judged again, not trained again"
