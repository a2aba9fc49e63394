"""Tokenize a corpus on many machines with datatrove's pipeline; train.py and check.py read what it writes.

One node tokenizes 10 billion tokens with prepare.py. For more, or for text that stands on a cluster's file system, this
gives datatrove its steps (pip install "datatrove[io,processing]"):

    # on this machine: 64 tasks, 8 at a time
    python launch/datatrove_tokenize.py --input corpus/ --glob '*.jsonl.gz' --tokenizer gpt2 --out tokens \\
        --tasks 64 --workers 8
    # on Slurm, from a login node: array jobs of 1000 tasks, 100 at a time; --out on a file system that all nodes share
    python launch/datatrove_tokenize.py --input /corpus --kind parquet --tokenizer data/tokenizer.json --out tokens \\
        --executor slurm --tasks 1000 --workers 100 --partition cpu --time 04:00:00
    python check.py data tokens
    torchrun --nproc_per_node=8 train.py --data tokens --parallel fsdp

What it writes, once all tasks are finished (until then it stands in tokens/unfinished, where nothing trains on it):

    tokens/tokenizer.json                            the tokenizer; check.py and train.py find it there
    tokens/train/00000_unshuffled.ds, .index ...     ids, end-of-text after each document; where each document ends
    tokens/val/00000_unshuffled.ds, .index ...       the same of the held-out documents
    tokens/logs                                      datatrove's logs and statistics of each task

A task reads whole files, so tasks beyond the number of files stay idle. Files, documents and ids depend on --tasks, not
on --workers or the executor. Documents keep the order of their files: train.py shuffles windows over the whole stream.
A document is held out if a hash of its text says so: equal texts stay on one side, whatever --tasks is. Rows without
text (not JSON, no such field, null, a number, empty) are passed over; the last lines say how many and why, and the logs
of the tasks name the first of each. A finished command given again says so, and these numbers, which is how one gets
them on Slurm.

Killed: the same command goes on and skips finished tasks. Other flags need another --out, unless nothing was made, as
where no row has --text-field.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fourscale import formats, tokenization  # noqa: E402 (after the path to it)
from fourscale.cli import Count, InputError, MaybeText, RunFailed, door, parse, say  # noqa: E402

try:
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
    from datatrove.io import get_datafolder
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import HuggingFaceDatasetReader, JsonlReader, ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer
except ImportError as e:
    sys.exit(f'error: {e.name} is not installed; pip install "datatrove[io,processing]"')


@dataclass
class DatatroveConfig:
    """Text -> tokens on a cluster, by datatrove: shards (.ds) that train.py reads."""

    input: str = ""
    """directory of files (any path or URL that fsspec reads), or with --kind hub the id of a data set"""
    out: Path = Path("./tokens")
    """directory for the shards"""
    tokenizer: str = "gpt2"
    """gpt2, another tiktoken name, or a tokenizer.json such as prepare.py writes"""
    kind: Literal["jsonl", "parquet", "hub"] = "jsonl"
    """jsonl: also .gz and .zst"""
    glob: MaybeText = None
    """which files of the directory, such as '*.jsonl.gz' (default: all)"""
    text_field: str = "text"
    """field that holds the text"""
    name: MaybeText = None
    """configuration of the hub data set"""
    split: str = "train"
    """split of the hub data set"""
    revision: MaybeText = None
    """branch, tag or commit of the hub data set"""
    val_fraction: float = 0.001
    """share of documents held out, chosen by a hash of their text"""
    tasks: Count = 1
    """parts the files are divided into: as many as files at most"""
    workers: Count = 1
    """tasks at a time"""
    executor: Literal["local", "slurm"] = "local"
    partition: str = "cpu"
    """Slurm's"""
    time: str = "08:00:00"
    """limit of a task, for Slurm"""
    qos: str = "normal"
    """Slurm's"""
    mem_per_task_gb: Count = 4
    """memory of a task, for Slurm"""


# A Slurm task is sent the next six without their module, so they import what they use and don't know of each other.


def as_document(reader: Any, row: Any, path: str, number: int | str) -> dict[str, Any]:
    """datatrove's adapter: a row -> its text, or "" where it has none, counted by reason in the reader's statistics."""
    from datatrove.utils.logging import logger

    field = reader.text_key
    if not isinstance(row, dict):
        reason = f"{type(row).__name__}, not an object"
    elif field not in row:
        reason = f"without the field {field}"
        if "fields/" not in "".join(reader.stats.stats):
            reader.stat_update(f"fields/{', '.join(sorted(map(str, row))[:20])}")
    elif row[field] is None:
        reason = f"{field} is null"
    elif not isinstance(row[field], str):
        reason = f"{field} is {type(row[field]).__name__}, not text"
    elif not row[field]:
        reason = f"{field} is empty"
    else:
        try:
            row[field].encode()
        except UnicodeEncodeError:
            reason = f"{field} holds a lone surrogate"
        else:
            return {"text": row[field], "id": f"{path}/{number}", "metadata": {}}
    reader._empty_warning = True  # what follows says more
    reader.stat_update(f"left out/{reason}")
    if (count := reader.stats[f"left out/{reason}"].total) <= 10:
        logger.warning(f"{path}: left out: {reason} (row {number}{', more are not listed' if count == 10 else ''})")
    return {"text": "", "id": ""}


class JsonRows(JsonlReader):
    """JsonlReader that counts lines which are no JSON, and whose lines end where a newline is."""

    def read_file(self, filepath: str) -> Any:
        import zlib

        import orjson
        from datatrove.utils.logging import logger

        with self.data_folder.open(filepath, "rb", compression=self.compression) as f:
            number = 0
            try:
                for number, line in enumerate(f, 1):
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")
                    if not line.strip():
                        continue
                    try:
                        row = orjson.loads(line)
                    except orjson.JSONDecodeError as e:
                        self.stat_update("left out/not JSON")
                        if self.stats["left out/not JSON"].total <= 10:
                            logger.warning(f"{filepath}, line {number}: left out: not JSON ({e})")
                        continue
                    if not isinstance(row, dict):
                        self.adapter(row, filepath, number)
                    elif document := self.get_document_from_dict(row, filepath, number):
                        yield document
            except (EOFError, OSError, zlib.error) as e:
                raise ValueError(f"{filepath}: damaged or unreadable after line {number} ({e})") from None


class PlainTextTokenizer(DocumentTokenizer):
    """DocumentTokenizer for which special tokens in the text are ordinary text, as everywhere else in this project."""

    plain: Any = None

    @property  # not cached_property: its lock does not survive being sent to another process
    def tokenizer(self) -> Any:
        from datatrove.utils.tokenization import TemplateProcessing, load_tokenizer

        if self.plain is None:
            self.plain = load_tokenizer(self.tokenizer_name_or_path)
            self.plain.encode_special_tokens = True
            self.plain.no_truncation()
            self.plain.no_padding()
            eos = ("<EOS>", self.plain.token_to_id(self.eos_token))
            self.plain.post_processor = TemplateProcessing(single="$A <EOS>", special_tokens=[eos], pair=None)
        return self.plain


def on_side(document: Any, side: str, share: float) -> bool:
    """Whether a document belongs to "train" or "val": 64 bits of a hash of its text below `share` hold it out."""
    import hashlib

    digest = hashlib.blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=8, key=b"datatrove-split")
    return (int.from_bytes(digest.digest(), "little") < share * 2**64) == (side == "val")


def nothing_made(logs: str, sides: list[str], source: str, field: str, share: float) -> str | None:
    """Why one of `sides`, whose tasks have all ended, holds no document; None where each holds some."""
    import json
    from collections import Counter
    from pathlib import Path

    for side in sides:
        reads, written, total = Counter(), 0, 0
        for path in sorted(Path(logs, side, "stats").glob("*.json")):
            steps = [step["stats"] for step in json.loads(path.read_text(encoding="utf-8"))]
            counts = [{k: v["total"] if isinstance(v, dict) else v for k, v in step.items()} for step in steps]
            reads.update(counts[0])
            total, written = total + counts[1].get("total", 0), written + counts[1].get("forwarded", 0)
        left = {k.partition("/")[2]: int(n) for k, n in reads.most_common() if k.startswith("left out/")}
        if not total and list(left) == [f"without the field {field}"]:
            fields = next((k.partition("/")[2] for k in reads if k.startswith("fields/")), "") or "none"
            return f"--text-field {field}: no row of {source} has this field; name one of those there are: {fields}"
        if not total:
            why = ", ".join(f"{n:,} {reason}" for reason, n in left.items()) or "no rows at all"
            return f"--input {source}: no row holds text ({why}); name other files or another --text-field"
        if not written:
            remedy = "raise" if side == "val" else "lower"
            return f"--val-fraction {share}: the {side} side gets none of {int(total):,} documents; {remedy} it"
    return None


def start_over(work: str, logs: str) -> None:
    """Forget that anything was begun; the tasks' logs stay."""
    import shutil
    from pathlib import Path

    for folder in (*(Path(logs, side, kind) for side in ("train", "val") for kind in ("completions", "stats")), work):
        shutil.rmtree(folder, ignore_errors=True)


def publish(data: Any, rank: int, world_size: int, work: str, out: str, fault: Any = None, forget: Any = None) -> None:
    """The last job: move what all tasks have finished to where it's read, unless `fault` has a word against it."""
    from pathlib import Path

    if fault is not None and (said := fault()):
        forget()
        raise ValueError(said)
    for name in ("train", "val", "tokenizer.json"):
        if (Path(work) / name).exists():
            (Path(work) / name).rename(Path(out) / name)
    Path(work, "command.json").rename(Path(out) / "command.json")
    Path(work).rmdir()


def reader(cfg: DatatroveConfig) -> Any:
    if cfg.kind == "hub":
        options = {"name": cfg.name, "split": cfg.split, "revision": cfg.revision}
        options = {key: value for key, value in options.items() if value is not None}
        return HuggingFaceDatasetReader(
            cfg.input, options, streaming=True, text_key=cfg.text_field, adapter=as_document
        )
    kind = JsonRows if cfg.kind == "jsonl" else ParquetReader
    return kind(cfg.input, text_key=cfg.text_field, glob_pattern=cfg.glob, adapter=as_document)


def executor(cfg: DatatroveConfig, job: str, pipeline: list[Any], tasks: int, depends: Any) -> Any:
    """One job of datatrove's; it begins once `depends` has ended."""
    logs = str(cfg.out.resolve() / "logs" / job)
    if cfg.executor == "local":
        return LocalPipelineExecutor(pipeline, tasks, min(cfg.workers, tasks), logging_dir=logs, depends=depends)
    return SlurmPipelineExecutor(
        pipeline, tasks, cfg.time, cfg.partition, mem_per_cpu_gb=cfg.mem_per_task_gb, workers=cfg.workers, qos=cfg.qos,
        job_name=f"tokenize-{job}", logging_dir=logs, depends=depends, mail_type="NONE",
        venv_path=virtual_environment(),
    )  # fmt: skip


def virtual_environment() -> str | None:
    return str(Path(sys.prefix) / "bin" / "activate") if sys.prefix != sys.base_prefix else None


def begin(cfg: DatatroveConfig, work: Path) -> tokenization.Tokenizer:
    """Check the flags and leave tokenizer.json and the command in `work`. Raises InputError, one line."""
    if not cfg.input:
        raise InputError("--input: name a directory of files, or with --kind hub a data set")
    if not 0 < cfg.val_fraction < 1:
        raise InputError(f"--val-fraction {cfg.val_fraction}: must be above 0 and below 1")
    if cfg.tasks < 1 or cfg.workers < 1:
        raise InputError(f"--tasks {cfg.tasks} --workers {cfg.workers}: at least 1 of each is needed")
    if tokenization.kind_of(cfg.tokenizer) in ("char", "bpe"):
        raise InputError(
            f"--tokenizer {cfg.tokenizer}: is made from the text, which no task has in whole; make it from a part with "
            "prepare.py and name its tokenizer.json"
        )
    if cfg.kind != "hub":
        try:
            files = get_datafolder(cfg.input).list_files(glob_pattern=cfg.glob)
        except FileNotFoundError:
            files = []
        if not files:
            raise InputError(f"--input {cfg.input}: no files{f' like {cfg.glob}' if cfg.glob else ''} there")
        if cfg.tasks > len(files):
            say(f"note: --tasks {cfg.tasks} for {len(files)} file(s): the others stay idle, a file is read by one task")
    tokenizer = tokenization.build(cfg.tokenizer, lambda: iter(()))
    free = ("workers", "executor", "partition", "time", "qos", "mem_per_task_gb", "out")
    command = {k: v for k, v in asdict(cfg).items() if k not in free} | {"tokenizer": tokenizer.sha256}
    for place in (cfg.out, work):
        path = place / "command.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) != command:
            raise InputError(f"--out {cfg.out}: begun with other flags (see {path}); choose another directory")
    if not (cfg.out / "command.json").exists():
        if any(p.name != "logs" for p in cfg.out.glob("*")) and not work.exists():
            raise InputError(f"--out {cfg.out}: holds other files; choose an empty or new directory")
        work.mkdir(parents=True, exist_ok=True)
        tokenizer.save(work)
        (work / "command.json").write_text(json.dumps(command, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def told(cfg: DatatroveConfig) -> list[str]:
    """What was made, a line each: documents and tokens of each side, and rows left out, by reason."""
    lines = []
    for side, stream in formats.open_foreign(str(cfg.out)).streams.items():
        documents = sum(path.stat().st_size for path in (cfg.out / side).glob("*.ds.index")) // 8  # uint64 ends
        size = stream.dtype.itemsize * stream.total / 1e9
        what = f"{documents:,} documents, {stream.total:,} tokens ({size:.3f} GB) in {len(stream.shards)} shard(s)"
        lines.append(f"{side} {what}")
    left: Counter[str] = Counter()  # both sides read every row; train's tasks count for both
    for path in sorted((cfg.out / "logs" / "train" / "stats").glob("*.json")):
        for label, n in json.loads(path.read_text(encoding="utf-8"))[0]["stats"].items():
            if label.startswith("left out/"):
                left[label.partition("/")[2]] += int(n["total"] if isinstance(n, dict) else n)
    why = ", ".join(f"{n:,} {reason}" for reason, n in left.most_common())
    where = f"; the first are named in {cfg.out / 'logs' / 'train' / 'logs'}"
    lines.append(f"left out {left.total():,} rows" + (f": {why}{where}" if why else ""))
    return lines


@door
def main() -> None:
    cfg = parse(DatatroveConfig)
    out, work, logs = (str(cfg.out.resolve() / name) for name in ("", "unfinished", "logs"))
    tokenizer = begin(cfg, Path(work))
    if (cfg.out / "command.json").exists():
        say(f"nothing to do: {cfg.out} is finished: {'; '.join(told(cfg))}")
        return
    local, job = cfg.executor == "local", None
    fault = partial(nothing_made, logs, source=cfg.input, field=cfg.text_field, share=cfg.val_fraction)
    for side in ("train", "val"):
        steps = [
            reader(cfg),
            LambdaFilter(partial(on_side, side=side, share=cfg.val_fraction)),
            # Shuffling documents would depend on the number of tasks, and train.py shuffles windows itself.
            PlainTextTokenizer(
                str(Path(work) / side), str(Path(work) / "tokenizer.json"), eos_token=tokenizer.eot_token,
                shuffle_documents=False, batch_size=1000,
            ),
        ]  # fmt: skip
        job = executor(cfg, side, steps, cfg.tasks, job)
        if local:
            try:
                job.run()
            except Exception as e:  # of any step, on any row
                why = f"{type(e).__name__}: {' '.join(str(e).split())}"
                raise RunFailed(f"a task failed ({why}); its log is in {logs}/{side}/logs") from None
            if said := fault([side]):
                start_over(work, logs)
                raise InputError(said)
    last = partial(publish, work=work, out=out)
    if not local:
        last = partial(last, fault=partial(fault, ["train", "val"]), forget=partial(start_over, work, logs))
        executor(cfg, "publish", [last], 1, job).run()
        say(f"submitted; once the last job has ended, the same command says what was made, and python check.py data "
            f"{cfg.out} reads it")  # fmt: skip
        return
    last(None, 0, 1)
    for line in told(cfg):
        say(line)
    say(f"wrote {cfg.out}")


if __name__ == "__main__":
    main()
