"""Is it healthy? Judge runs by their curves: minutes after the start, while they run, or when they are over.

    python health.py ckpt                                          # one run: verdict, reasons, remedy, forecast
    python health.py ckpt/a ckpt/b --target-loss 3.2 --png race.png    # several: one table, one plot
    python health.py ckpt --html health.html --follow              # a page that is kept up to date until the end
    python health.py console.log nanogpt.log                       # scraped logs, of train.py or nanoGPT
    kubectl logs -f job/train | tee train.log; python health.py train.log
    python health.py ckpt --fail-on diverging,suspicious || scancel $JOB     # for scripts: exit code 1

healthy: let it finish. stalled: it will miss the target; a larger rate or more updates, not more patience. diverging:
a smaller rate, longer warmup, clipping. suspicious: it falls implausibly fast; read a batch. undecided: too early, or
the forecast's interval holds the target. The runs' directories are only read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fourscale.cli import InputError, RunFailed, door, parse, say
from fourscale.durable import naming
from fourscale.flags import HealthConfig

COLOURS = {"healthy": 32, "stalled": 33, "diverging": 31, "suspicious": 35, "undecided": 36}


@door
def main() -> None:
    cfg = parse(HealthConfig)
    cfg.check()
    from fourscale import curves

    _spare(cfg, {file for spec in cfg.runs for path in curves.find(spec) for file in curves.files(path)})
    seen = None
    while True:
        started = time.monotonic()
        now = [_stamp(path) for spec in cfg.runs for path in curves.find(spec)] if cfg.follow else None
        runs = None
        if now is None or now != seen:
            runs, seen = judge(cfg), now
            over = all(run.record.complete or run.record.state in ("stopped", "ended") for run in runs)
            report(cfg, runs, None if over or not cfg.follow else cfg.every)
            failed = [run for run in runs if run.judgement.verdict in cfg.failing()]
            if failed:
                words = ", ".join(f"{run.record.name} is {run.judgement.verdict}" for run in failed)
                raise RunFailed(f"{words} (--fail-on)")
            if over or not cfg.follow:
                return
        # A look at a run of a million rows takes seconds: it is not to become the job.
        time.sleep(max(cfg.every, 4 * (time.monotonic() - started)))


def judge(cfg: HealthConfig) -> list:
    """Read and judge each run; list of curves.Judged."""
    from fourscale import curves, verdict

    runs = []
    for record in curves.read_all(cfg.runs):
        target = record.target if cfg.target_loss is None else cfg.target_loss
        runs.append(curves.Judged(record, target, verdict.judge(record.curve, record.course, target)))
    return runs


def report(cfg: HealthConfig, runs: Sequence, again_s: float | None) -> None:
    """Say what was found, and write the files that were asked for, whole."""
    from fourscale import page

    if cfg.json != "-":
        if again_s and sys.stdout.isatty():
            say("\033[H\033[2J", end="")
        speak(runs)
    if cfg.png is not None or cfg.html is not None:
        from fourscale import plots  # matplotlib takes a second to import
    if cfg.png is not None:
        write(cfg.png, plots.draw(runs))
    if cfg.html is not None:
        light, dark = (plots.draw(runs, dark=dark, dpi=160) for dark in (False, True))
        write(cfg.html, page.render(runs, light, dark, again_s).encode())
    if cfg.json is not None:
        text = json.dumps([page.entry(run) for run in runs], indent=2) + "\n"
        if cfg.json == "-":
            say(text.rstrip("\n"))
        else:
            write(Path(cfg.json), text.encode())
    for path in (cfg.png, cfg.html):
        if path is not None and cfg.json != "-":
            say(f"written: {path}")


def speak(runs: Sequence) -> None:
    """One run with all that stands behind its verdict; of several a table, then why and what to do."""
    from fourscale import page

    if len(runs) == 1:
        say(f"{runs[0].record.name}: {shown(runs[0].judgement.verdict)}")
        tell(page.findings(runs[0]))
        return
    rows = page.table(runs)
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    targets = {run.target for run in runs if run.target is not None}
    if len(targets) == 1:
        say(f"target: a held-out loss of {targets.pop():g} nats a token\n")
    say("  ".join(name.ljust(width[name]) for name in width).rstrip())
    for row in rows:
        cells = {name: cell.ljust(width[name]) for name, cell in row.items()}
        cells["verdict"] = cells["verdict"].replace(row["verdict"], shown(row["verdict"]))
        say("  ".join(cells.values()).rstrip())
    for run in runs:
        say(f"\n{run.record.name}: {shown(run.judgement.verdict)}")
        tell([pair for pair in page.findings(run) if pair[0] in ("why", "", "what to do", "note")])


def tell(pairs: Sequence[tuple[str, str]]) -> None:
    for name, words in pairs:
        say(f"  {name:<10s}  {words}")


def shown(verdict: str) -> str:
    """The verdict; bold, in capitals and in its colour on a terminal that isn't told otherwise (NO_COLOR)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return verdict
    return f"\033[1;{COLOURS[verdict]}m{verdict.upper()}\033[0m"


def write(path: Path, content: bytes) -> None:
    """Replace a file whole: whoever looks at it while runs are followed sees the old one or the new one. A link keeps
    pointing; into a pipe or a device, such as /dev/null, it is written."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        temporary.write_bytes(content)
        temporary.replace(path)


def _spare(cfg: HealthConfig, read: set[Path]) -> None:
    """Raise InputError where what is to be written would take the place of what is read, or of another of its kind."""
    taken = {Path(os.path.realpath(path)): f"{path} is read" for path in read}
    for name in ("png", "html", "json"):
        path = getattr(cfg, name)
        if path in (None, "-"):
            continue
        real = Path(os.path.realpath(path))
        if real in taken and (real.is_file() or not real.exists()):
            raise InputError(f"--{name} {path}: {taken[real]}; name another file")
        taken[real] = f"--{name} is written there"


def _stamp(path: Path) -> tuple:
    """What changes when a run has moved on or ended."""
    from fourscale import curves

    stamps = []
    for file in curves.files(path):
        try:
            stat = file.stat()
            stamps.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except OSError:
            stamps.append(None)
    return str(path), *stamps


if __name__ == "__main__":
    main()
