"""Verify what a run depends on, from end to end, and say in a line each what was found.

    python check.py data ./data                                   # written by prepare.py: hashes, counts, ids, text
    python check.py data ./a ./b --ctx 4096 --json checks.json    # several; each side must hold a window of --ctx
    python check.py data fineweb10B                               # llm.c's, modded-nanogpt's or datatrove's shards
    python check.py data nanogpt/data/openwebtext --data-dtype uint16 --tokenizer gpt2
    python check.py ckpt ./ckpt                                   # every checkpoint of a run: hashes, names, shapes
    python check.py ckpt ./ckpt/step_9000 --deep                  # one of them, and each number in it is finite
    python check.py run ./ckpt                                    # contract, attempts, skips, metrics, receipt

A line is a `pass`, a `FAIL` with its remedy, or a `note`. Exit code 0 if nothing failed, else 2. Memory does not grow
with what is read; a run may go on meanwhile, its directory is only read. A shard may be degenerate though its hash is
right: constant, padded, a repeated piece, the same as another. Held-out windows are looked for at every position of the
training set.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fourscale.cli import InputError, door, flag, parse, say
from fourscale.flags import CheckCkptConfig, CheckDataConfig, CheckRunConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fourscale.audit import Survey
    from fourscale.shards import TokenStream
    from fourscale.tokenization import Tokenizer

Status = Literal["pass", "FAIL", "note"]
SMALLEST_CTX = 256  # train.py's default on a CPU
DEFAULT_CTX = 1024  # and on a GPU
SAME_IDS = 0.95  # of a window's ids come back when its text is encoded again, unless another tokenizer made them
SHOWN_IDS, ROUND_TRIP_IDS = 48, 512


@dataclass
class Report:
    """The lines about one directory or set of shards, printed as they come."""

    subject: str
    checks: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, status: Status, name: str, text: str) -> None:
        self.checks.append({"status": status, "name": name, "text": text})
        say(f"{status}  {name:10s} {text}")

    def extend(self, findings: Iterable[tuple[Status, str, str]]) -> None:
        for finding in findings:
            self.add(*finding)

    def judge(self, name: str, problems: list[str], otherwise: str) -> None:
        """A FAIL for each problem, or else a pass."""
        for problem in problems:
            self.add("FAIL", name, problem)
        if not problems:
            self.add("pass", name, otherwise)

    @property
    def failed(self) -> list[str]:
        return [check["name"] for check in self.checks if check["status"] == "FAIL"]


# ---- one data set ----------------------------------------------------------------------------------------------------


def check_data(spec: str, cfg: CheckDataConfig) -> Report:
    """All checks of one directory or set of shards."""
    from fourscale import formats

    report = Report(spec)
    say(f"{spec}:")
    started = time.monotonic()
    try:
        survey, tokenizer = (check_foreign if formats.is_foreign(spec) else check_prepared)(spec, cfg, report)
    except InputError as e:
        report.add("FAIL", "open", str(e))
        return report
    if survey is not None:
        seconds = time.monotonic() - started
        survey.close()
        streams = survey.streams
        check_length(streams, cfg.ctx, report)
        check_sides(streams, report)
        check_overlap(survey, tokenizer, cfg.max_overlap, report)
        check_shards(survey, report)
        if tokenizer is not None:
            check_tokenizer(streams, tokenizer, report)
        report.figures |= figures_of(survey)
        size = bytes_of(streams) / 1e6
        report.add("note", "read", f"{size:,.1f} MB in {seconds:.1f} s ({size / max(seconds, 1e-9):,.0f} MB/s)")
    return report


def check_prepared(spec: str, cfg: CheckDataConfig, report: Report) -> tuple[Survey | None, Tokenizer | None]:
    """Compare a prepared directory with its manifest. Survey None where a side can't be opened."""
    from fourscale import audit, corpus, shards

    directory = Path(spec)
    manifest = shards.load_manifest(directory)
    survey = tokenizer = unopened = None
    streams: dict[str, TokenStream] = {}
    try:
        train, val, manifest, tokenizer = corpus.open_prepared(directory)
        streams = {"train": train, "val": val}
        survey = audit.Survey(streams, window_of(cfg, tokenizer), tokenizer.eot_id)
    except InputError as e:  # as a rule among the problems of `verify`, which has all of them
        unopened = str(e)
    with bar(bytes_of(streams)) as progress:
        problems = audit.verify(directory, progress.update, visit=survey and survey.visit)
    if unopened is not None and not problems:
        problems = [unopened]
    tokens = sum(s.total for s in streams.values())
    report.judge("hashes", problems, f"{tokens:,} tokens, sums, sha256 and ids are as the manifest has them")
    if survey is not None:
        survey.close()
        check_documents(survey, manifest, report)
        names = {shard.path.name for s in streams.values() for shard in s.shards}
        if extra := sorted(p.name for p in directory.glob("*.bin") if p.name not in names):
            report.add(
                "note", "files", f"{extra[0]} and {len(extra)} in all are not in the manifest; nothing reads them"
            )
    if not manifest.get("license"):
        report.add("note", "licence", "unknown; prepare.py --license NAME puts it into the manifest")
    return survey, tokenizer


def check_foreign(spec: str, cfg: CheckDataConfig, report: Report) -> tuple[Survey, Tokenizer | None]:
    """Open shards without a manifest and read them."""
    from fourscale import audit, formats, tokenization

    found = formats.open_foreign(spec, cfg.val_data, cfg.data_dtype, cfg.vocab_size)
    streams = found.streams
    sizes = ", ".join(f"{split} {s.total:,} tokens in {len(s.shards)} file(s)" for split, s in streams.items())
    report.add("pass", "format", f"{found.format}, {found.dtype}: {sizes}; sizes fit what the files say")
    report.add("note", "hashes", "no manifest, so nothing to compare the content with")
    for note in found.notes:
        report.add("note", "format", note)
    named = cfg.tokenizer or found.tokenizer
    tokenizer = None
    if named is not None:
        if tokenization.kind_of(named) in ("char", "bpe"):
            raise InputError(f"--tokenizer {named}: is made from text, which shards don't hold; name a tokenizer.json")
        tokenizer = tokenization.build(named, lambda: iter(()))
    survey = audit.Survey(streams, window_of(cfg, tokenizer), tokenizer and tokenizer.eot_id)
    with bar(bytes_of(streams)) as progress:
        survey.read(progress.update)
    survey.close()
    vocab_size = tokenizer.vocab_size if tokenizer else cfg.vocab_size
    highest = max(survey.facts, key=lambda f: f.highest)
    if vocab_size is None:
        report.add("note", "ids", f"0 .. {highest.highest:,}, so --vocab-size is at least {highest.highest + 1:,}")
        report.add("note", "tokenizer", found.ask)
    elif highest.highest >= vocab_size:
        report.add(
            "FAIL", "ids", f"{highest.shard.path}: id {highest.highest:,} is outside the vocabulary of {vocab_size:,}; "
            "name the tokenizer that made the ids, or check --data-dtype"
        )  # fmt: skip
    else:
        report.add("pass", "ids", f"0 .. {highest.highest:,}, within the vocabulary of {vocab_size:,}")
    return survey, tokenizer


def window_of(cfg: CheckDataConfig, tokenizer: Tokenizer | None) -> int:
    """--window, or about 256 bytes of text: shorter pieces recur in texts that have nothing to do with each other."""
    return cfg.window or (256 if tokenizer is not None and tokenizer.kind in ("byte", "char") else 64)


def bytes_of(streams: dict[str, TokenStream]) -> int:
    return sum(s.total * s.dtype.itemsize for s in streams.values())


def bar(total: int) -> Any:
    """A progress bar over `total` bytes, for work that takes longer than a second."""
    from tqdm import tqdm

    pause = 0.2 if sys.stderr.isatty() else 10.0  # a log file wants few lines
    return tqdm(desc="reading", total=total, unit="B", unit_scale=True, mininterval=pause, leave=False, delay=1)


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_length(streams: dict[str, TokenStream], ctx: int | None, report: Report) -> None:
    least = min(s.total for s in streams.values()) - 1  # the longest context that both sides hold a window of
    sizes = ", ".join(f"{split} {s.total:,}" for split, s in streams.items())
    if least < (ctx or SMALLEST_CTX):
        report.add("FAIL", "length", f"{sizes} tokens; --ctx {ctx or SMALLEST_CTX} needs one more: prepare more text")
    elif ctx is None and least < DEFAULT_CTX:
        report.add("note", "length", f"{sizes} tokens: enough for --ctx up to {least:,}")
    else:
        report.add("pass", "length", f"{sizes} tokens: enough for --ctx {ctx or DEFAULT_CTX:,}")


def check_sides(streams: dict[str, TokenStream], report: Report) -> None:
    same = streams["train"].digest == streams["val"].digest
    problem = ["training and held-out tokens are the same; the held-out loss would be of training text: hold out other"]
    report.judge("sides", problem if same else [], "training and held-out tokens differ")


def check_overlap(survey: Survey, tokenizer: Tokenizer | None, limit: float, report: Report) -> None:
    overlap, length = survey.overlap, survey.length
    if not overlap.windows:
        report.add("note", "overlap", f"the held-out side holds no window of {length} tokens to look for")
        return
    share = overlap.found / overlap.windows
    figures = f"{share:.2%} of {overlap.windows:,} held-out windows of {length} tokens stand in the training set"
    if overlap.example is not None:
        held_out, trained = overlap.example
        ids = survey.streams["val"].read(held_out, length)
        figures += f"; train {trained:,} = val {held_out:,}: {shown(ids, tokenizer)}"
    status: Status = "FAIL" if share > limit else "note" if share > limit / 10 else "pass"
    remedy = "; keep duplicates off (prepare.py --dedup, --group-field) or allow it (--max-overlap)"
    report.add(status, "overlap", figures + (remedy if status == "FAIL" else ""))


def check_documents(survey: Survey, manifest: dict[str, Any], report: Report) -> None:
    """End-of-text tokens against documents. Exact shares and --max-tokens may cut the last document of each source."""
    sources = len(manifest.get("sources") or [0])
    cut = sources if sources > 1 or (manifest.get("command") or {}).get("max_tokens") else 0
    problems, counted = [], []
    for split in survey.streams:
        eots = sum(f.eots for f in survey.facts if f.split == split)
        documents = manifest["splits"][split].get("documents")
        counted.append(f"{split} {eots:,}")
        if not isinstance(documents, int) or not 0 <= documents - eots <= cut:
            problems.append(
                f"{split}: {eots:,} end-of-text tokens, but the manifest has {documents} documents; restore the "
                f"manifest, or delete {report.subject} and run prepare.py again"
            )
    report.judge("documents", problems, f"{', '.join(counted)} end-of-text tokens, as many as documents")


def check_shards(survey: Survey, report: Report) -> None:
    from fourscale import audit

    problems, notes = audit.degenerate(survey.facts)
    report.judge("shards", problems, f"none of {len(survey.facts)} is constant, padded, repeated or another's copy")
    for note in notes:
        report.add("note", "shards", note)


def check_tokenizer(streams: dict[str, TokenStream], tokenizer: Tokenizer, report: Report) -> None:
    """Text of a few windows encoded again: the same text, and (but at a window's edges) the same ids."""
    import numpy as np

    windows = same = total = 0
    problems = []
    for split, stream in streams.items():
        count = min(ROUND_TRIP_IDS, stream.total)
        for start in sorted({i * (stream.total - count) // 3 for i in range(4)}):
            ids = stream.read(start, count)
            ends = np.flatnonzero(ids == tokenizer.eot_id)
            try:
                for piece in np.split(ids, np.unique(np.concatenate([ends, ends + 1]))):
                    if len(piece) and piece[0] != tokenizer.eot_id:  # which no text encodes to
                        text = tokenizer.decode(piece)
                        again = tokenizer.encode(text)
                        if tokenizer.decode(again) != text:
                            raise InputError("decoded, encoded and decoded again is other text")
                        same += (Counter(piece.tolist()) & Counter(again)).total()
                        total += len(piece)
            except InputError as e:
                problems.append(f"{split} {start:,}: {e}")
            windows += 1
    if not problems and same < SAME_IDS * total:
        problems.append(
            f"only {same / total:.1%} of the ids come back when their text is encoded again; another tokenizer than "
            f"this one ({tokenizer.kind}) made them: name that one"
        )
    report.judge("tokenizer", problems[:3], f"{windows} windows decode and encode to the same text and {same:,} ids")
    if not problems:
        for split, stream in streams.items():
            count = min(SHOWN_IDS, stream.total)
            for part in (1, 2):
                start = part * (stream.total - count) // 3
                report.add("note", "text", f"{split} {start:,}: {shown(stream.read(start, count), tokenizer)}")


def shown(ids: Any, tokenizer: Tokenizer | None) -> str:
    """A line that shows a window: its text quoted, or its ids."""
    if tokenizer is None:
        return f"ids {' '.join(map(str, ids[:16]))} ..."
    try:
        return repr(tokenizer.decode(ids))
    except InputError as e:
        return str(e)


def figures_of(survey: Survey) -> dict[str, Any]:
    shards = []
    for f in survey.facts:
        table = dataclasses.asdict(f) | {"file": str(f.shard.path), "tokens": f.shard.tokens}
        shards.append({k: v for k, v in table.items() if k not in ("shard", "digest")})
    overlap = {"length": survey.length, "windows": survey.overlap.windows, "found": survey.overlap.found}
    return {"tokens": {split: s.total for split, s in survey.streams.items()}, "overlap": overlap, "shards": shards}


# ---- runs and their checkpoints --------------------------------------------------------------------------------------


def check_ckpt(spec: str, cfg: CheckCkptConfig) -> Report:
    """List and verify the checkpoints of one run, or the one that is named."""
    from fourscale import receipts, steps

    report = Report(spec)
    say(f"{spec}:")
    try:
        place = steps.locate(Path(spec))
        run = receipts.read_run(place.run_dir)
        words, findings = steps.pointers(place.run_dir)
        report.extend([receipts.tokenizer_finding(place.run_dir, run), *findings])
    except (InputError, *MALFORMED) as e:
        report.add("FAIL", "open", opening(spec, e))
        return report
    good = verify_steps(place, words, cfg.deep, report)
    if place.whole:
        report.extend(steps.leftovers(place.run_dir))
        if not place.steps:
            report.add("note", "none", "no checkpoint yet")
        elif good and good[-1].dir != place.steps[-1]:
            way = f"--resume auto --resume-step {good[-1].step['update']}"
            report.add("note", "remedy", f"the newest good one is {good[-1].dir.name}: go on from it with {way}")
        elif not good:
            report.add("note", "remedy", "none is good: restore one from a copy, or start again in another directory")
    return report


def check_run(spec: str, cfg: CheckRunConfig) -> Report:
    """Show one run, and check that what its directory holds agrees."""
    from fourscale import receipts, steps

    report = Report(spec)
    say(f"{spec}:")
    try:
        place = steps.locate(Path(spec))
        run = receipts.read_run(place.run_dir)
        if not place.whole:
            raise InputError(
                f"{spec}: a checkpoint; python check.py run {place.run_dir}, or check.py ckpt for this one"
            )
        report.extend(receipts.contract(run))
        report.extend([receipts.tokenizer_finding(place.run_dir, run)])
        report.extend(receipts.branch(run))
        report.extend(receipts.imported(run))
        report.extend(receipts.attempts(run))
        events, torn = receipts.read_events(place.run_dir)
        found, trained = receipts.Metrics(), "imported" not in run
        if trained:
            there = steps.openable(place.steps)
            found = receipts.read_metrics(place.run_dir, run, {ckpt.step["update"] for ckpt in there})
            report.extend(receipts.happened(events, torn, found.dropped))
            report.extend(receipts.metrics_findings(found, there))
        words, findings = steps.pointers(place.run_dir)
        report.extend(findings)
        newest = dataclasses.replace(place, steps=place.steps[-1:])
        good = verify_steps(newest, words, False, report)
        report.extend(steps.leftovers(place.run_dir))
        if trained:
            report.extend(receipts.ending(place.run_dir, run, good[-1] if good else None, found))
    except (InputError, *MALFORMED) as e:
        report.add("FAIL", "open", opening(spec, e))
        return report
    contract = {key: run[key] for key in ("model", "tokenizer", "data", "training", "attempts")}
    report.figures |= contract | {"origin": run.get("origin"), "rows": found.rows, "last": found.last, "events": events}
    return report


MALFORMED = (KeyError, TypeError, AttributeError, ValueError)  # what a record edited by hand may lead to


def opening(spec: str, e: Exception) -> str:
    """Why a run can't be read on."""
    if isinstance(e, InputError):
        return str(e)
    return f"{spec}: its records are not as train.py writes them ({type(e).__name__}: {e}); restore them from a copy"


def verify_steps(place: Any, words: dict[str, list[str]], deep: bool, report: Report) -> list[Any]:
    """A line or more for each checkpoint of `place`, oldest first; those in which nothing is wrong."""
    from fourscale import steps

    good = []
    total = sum(steps.recorded_bytes(path) for path in place.steps) * (2 if deep else 1)
    with bar(total) as progress:
        for path in place.steps:
            ckpt, faults = steps.checkpoint_faults(path, deep, progress.update)
            if sys.stderr.isatty():
                progress.clear()  # before a line of the report
            if not path.exists():
                report.add("note", path.name, "was removed meanwhile, as --keep has it")
                continue
            marks = ", ".join(words.get(path.name, []))
            about = f"{steps.listed(ckpt)}{f' ({marks})' if marks else ''}" if ckpt else ""
            report.judge(path.name, faults, about)
            if ckpt is not None:
                entry = {k: v for k, v in ckpt.step.items() if k != "files"} | {"ok": not faults, "marks": marks}
                report.figures.setdefault("checkpoints", {})[path.name] = entry
                if not faults:
                    good.append(ckpt)
    return good


# ---- the door --------------------------------------------------------------------------------------------------------


def data_config(argv: list[str]) -> CheckDataConfig:
    """The flags of check.py data. Raises InputError for one that has nothing to act on."""
    cfg = parse(CheckDataConfig, argv, prog="check.py data")
    cfg.check()
    from fourscale import formats

    for name in ("val_data", "data_dtype", "tokenizer", "vocab_size"):
        value = getattr(cfg, name)
        if value not in (None, "auto") and not any(map(formats.is_foreign, cfg.dirs)):
            raise InputError(f"{flag(name)} {value}: known from the manifest of {cfg.dirs[0]}; leave it out")
    return cfg


@door
def main() -> None:
    word, *rest = sys.argv[1:] or [""]
    if word in ("-h", "--help"):
        print(__doc__, "Flags: python check.py data --help, and so on", sep="\n")
        return
    if word == "data":
        cfg, check, kind = data_config(rest), check_data, "data set(s)"
    elif word in ("ckpt", "run"):
        cfg = parse(CheckCkptConfig if word == "ckpt" else CheckRunConfig, rest, prog=f"check.py {word}")
        cfg.check()
        check, kind = (check_ckpt, "place(s)") if word == "ckpt" else (check_run, "run(s)")
    else:
        found = word or "without a word"
        raise InputError(f"check.py {found}: what can be checked is: data, ckpt, run; as in python check.py data DIR")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a character must not end the check
    reports = [check(spec, cfg) for spec in cfg.dirs]
    if cfg.json is not None:
        key = "data" if word == "data" else "dir"
        table = [{key: r.subject, "ok": not r.failed, "checks": r.checks, "figures": r.figures} for r in reports]
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
        cfg.json.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it
    failed = [f"{r.subject}: {', '.join(dict.fromkeys(r.failed))}" for r in reports if r.failed]
    if failed:
        raise InputError(f"failed: {'; '.join(failed)}")
    say(f"{len(reports)} {kind} checked, nothing failed")


if __name__ == "__main__":
    main()
