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
A document is held out if a hash of its text says so: equal texts stay on one side, whatever --tasks is. datatrove
passes over documents without text and lines that are no JSON: their number is in the logs.

Killed: the same command goes on and skips finished tasks. Other flags need another --out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fourscale import formats, tokenization  # noqa: E402 (after the path to it)
from fourscale.cli import Count, InputError, MaybeText, door, parse, say  # noqa: E402

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


# A Slurm task is sent the next three without their module, so they import what they use.


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


def publish(data: Any, rank: int, world_size: int, work: str, out: str) -> None:
    """The last job: move what all tasks have finished to where it's read."""
    from pathlib import Path

    for name in ("train", "val", "tokenizer.json"):
        if (Path(work) / name).exists():
            (Path(work) / name).rename(Path(out) / name)
    Path(work, "command.json").rename(Path(out) / "command.json")
    Path(work).rmdir()


def reader(cfg: DatatroveConfig) -> Any:
    if cfg.kind == "hub":
        options = {"name": cfg.name, "split": cfg.split, "revision": cfg.revision}
        options = {key: value for key, value in options.items() if value is not None}
        return HuggingFaceDatasetReader(cfg.input, options, streaming=True, text_key=cfg.text_field)
    kind = JsonlReader if cfg.kind == "jsonl" else ParquetReader
    return kind(cfg.input, text_key=cfg.text_field, glob_pattern=cfg.glob)


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
        if any(cfg.out.glob("*")) and not work.exists():
            raise InputError(f"--out {cfg.out}: holds other files; choose an empty or new directory")
        work.mkdir(parents=True, exist_ok=True)
        tokenizer.save(work)
        (work / "command.json").write_text(json.dumps(command, indent=2) + "\n", encoding="utf-8")
    return tokenizer


@door
def main() -> None:
    cfg = parse(DatatroveConfig)
    work = cfg.out.resolve() / "unfinished"
    tokenizer = begin(cfg, work)
    if not (cfg.out / "command.json").exists():
        job = None
        for side in ("train", "val"):
            steps = [
                reader(cfg),
                LambdaFilter(partial(on_side, side=side, share=cfg.val_fraction)),
                # Shuffling documents would depend on the number of tasks, and train.py shuffles windows itself.
                PlainTextTokenizer(
                    str(work / side), str(work / "tokenizer.json"), eos_token=tokenizer.eot_token,
                    shuffle_documents=False, batch_size=1000,
                ),
            ]  # fmt: skip
            job = executor(cfg, side, steps, cfg.tasks, job)
        executor(cfg, "publish", [partial(publish, work=str(work), out=str(cfg.out.resolve()))], 1, job).run()
        if cfg.executor == "slurm":
            say(f"submitted; once the last job has ended, python check.py data {cfg.out} reads {cfg.out}")
            return
    streams = formats.open_foreign(str(cfg.out)).streams
    for side, stream in streams.items():
        say(f"{side:5s}  {stream.total:,} tokens in {len(stream.shards)} shard(s)")
    tokens, size = (
        sum(f(s) for s in streams.values()) for f in (lambda s: s.total, lambda s: s.dtype.itemsize * s.total)
    )
    say(f"wrote {cfg.out}: {tokens:,} tokens ({size / 1e9:.3f} GB)")


if __name__ == "__main__":
    main()
