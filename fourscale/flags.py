"""Flags of the doors beside train.py, as dataclasses. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fourscale.cli import Count, InputError, MaybeCount, MaybeFloat, MaybeText, Repeated, Texts, derived, flag

VERDICTS = ("healthy", "stalled", "diverging", "suspicious", "undecided")


@dataclass
class PrepareConfig:
    """Text -> tokens -> shards and a manifest. Killed, the same command goes on where it was."""

    dataset: Texts = ("stdlib",)
    """stdlib (no network), tinystories, fineweb-edu, a hub id owner/name, a save_to_disk directory, files 'c/*.txt.gz';
    repeat it for several sources, with shares of the training tokens as in --dataset a:0.7 --dataset b:0.3"""
    out: Path = Path("./data")
    """directory for shards and manifest.json"""
    tokenizer: str = "gpt2"
    """gpt2, another tiktoken name, a tokenizer.json, bpe:N (trained on the corpus), byte, or char"""

    name: MaybeText = None
    """configuration of the hub data set"""
    split: str = "train"
    """split of the hub data set or save_to_disk directory to read"""
    revision: MaybeText = None
    """branch, tag or commit of the hub data set (default: the newest, pinned in the manifest)"""
    text_field: str = "text"
    """field that holds the text in jsonl, csv, parquet and hub rows"""
    group_field: MaybeText = None
    """field whose equal values stay on one side of the split, such as a book or a URL (its host counts)"""
    doc_sep: MaybeText = None
    """separator of documents in plain text, such as '<|endoftext|>' (default: units of about 4 KB at blank lines)"""

    val_fraction: float = 0.01
    """share of documents held out, chosen by a hash of their text or group"""
    val_docs: MaybeCount = None
    """hold out exactly this many distinct documents instead"""
    max_tokens: MaybeCount = None
    """stop at exactly this many training tokens"""
    max_docs: MaybeCount = None
    """stop after this many documents"""
    dedup: bool = False
    """drop documents whose text was seen before (but for whitespace and Unicode form)"""
    skip_bad: bool = False
    """count malformed rows and go on, instead of stopping at the first"""

    shard_tokens: Count = 100_000_000
    """tokens per shard"""
    workers: MaybeCount = None
    """processes that tokenize (default: one a core); the output does not depend on it"""
    license: MaybeText = None
    """licence of the text, for the manifest (known for the named sources)"""


@dataclass
class SampleConfig:
    """Checkpoint -> text."""

    ckpt: Path = Path("./ckpt")
    """a step_N directory, a run directory (its newest), the file `best` in one, a Hugging Face directory or hub id"""
    prompt: Repeated = ()
    """text to continue, repeatable; '' begins a document, as do no prompts at all; - is the text on standard input,
    without its last newline"""
    prompts_file: MaybeText = None
    """a prompt on each line (blank ones are left out), or JSON lines with a field "prompt"; - is standard input. Those
    of --prompt come first"""
    num_samples: Count = 1
    """continuations of each prompt; where there is one in all, it is printed as it is made, several in order as they
    are finished"""
    max_new_tokens: Count = 256
    """tokens to add, unless the end-of-text token comes first. Past the context length the older half of what the model
    sees drops out whenever the context is full, and the rest is read again at positions from 0"""
    stop: Repeated = ()
    """end a text before this text, repeatable"""
    ignore_eot: bool = False
    """go on past the end-of-text token, which is then shown, into further documents"""

    temperature: MaybeFloat = None
    """divides the logits; 0 takes the most likely token (default: 0.8)"""
    greedy: bool = False
    """the same as --temperature 0"""
    top_k: MaybeCount = None
    """sample from the K most likely tokens (default: all)"""
    top_p: MaybeFloat = None
    """sample from the smallest set of tokens whose probability reaches P (default: all)"""
    min_p: MaybeFloat = None
    """sample from tokens at least P times as likely as the most likely one (default: all)"""
    repetition_penalty: float = 1.0
    """before the temperature, divide the positive logits of tokens that the prompt or the text has, and multiply the
    negative ones; above 1 repeats less"""
    seed: Count = 0
    """a text follows from the model, the seed, the prompt and the number of the sample alone, whatever is computed
    beside it (in fp32, but for rare cases of rounding); so equal prompts have equal texts"""

    interactive: bool = False
    """ask for prompts on the terminal; Ctrl-C stops a text, an empty line or Ctrl-D ends. A prompt given again is
    answered anew"""
    json: MaybeText = None
    """also write a row of JSON for each text to this file, in place of what it holds: prompt, sample, seed, text,
    tokens, finish (eot, stop or length), checkpoint and settings; - is standard output, without the text"""
    batch_size: Count = 16
    """texts computed side by side"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps (one process), else cpu"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of matrix products and of the keys and values kept; in bf16 --batch-size may change the texts"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        for name in ("num_samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{flag(name)} 0: must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature {self.temperature}: must be 0 (most likely token) or a positive number")
        if self.greedy and self.temperature:
            raise InputError(f"--greedy with --temperature {self.temperature}: give one of them")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k}: must be at least 1; leave it out for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p}: must be above 0 and at most 1; leave it out for all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"--min-p {self.min_p}: must be 0 .. 1, a share of the most likely token's probability")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise InputError(f"--repetition-penalty {self.repetition_penalty}: must be 0.01 .. 100; 1 changes nothing")
        if "" in self.stop:
            raise InputError("--stop '': an empty text stands everywhere; leave it out")
        for name in ("prompt", "stop"):
            try:
                "".join(getattr(self, name)).encode("utf-8")
            except UnicodeEncodeError:
                raise InputError(f"{flag(name)}: not valid UTF-8; check the terminal's encoding") from None
        if self.prompt.count("-") + (self.prompts_file == "-") + self.interactive > 1:
            raise InputError("standard input can be read once: give one of --prompt -, --prompts-file -, --interactive")
        if self.interactive and (self.prompt or self.prompts_file is not None or self.json is not None):
            given = "--prompt" if self.prompt else "--json" if self.prompts_file is None else "--prompts-file"
            raise InputError(f"--interactive asks for prompts and shows their texts: leave {given} out")
        if self.json not in (None, "-") and not Path(self.json).resolve().parent.is_dir():
            raise InputError(f"--json {self.json}: no such directory to write to; make it first")
        files = [Path(f).resolve() for f in (self.json, self.prompts_file) if f not in (None, "-")]
        if len(files) > len(set(files)):
            raise InputError(f"--json {self.json}: is the file of the prompts too; name another")


@dataclass
class EvalConfig:
    """Held-out nats per token, perplexity and bits per byte of a checkpoint or other model; also under torchrun."""

    data: Texts = ("./data",)
    """directory written by prepare.py; shards of nanoGPT, llm.c or datatrove (a directory, a file, a glob); or text:
    .txt, .jsonl, .csv, .gz or .zst of these, .parquet. Repeat it for a table of each"""
    val_data: MaybeText = None
    """held-out shards, where --data has foreign ones whose names don't tell train from val"""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """of headerless shards without a manifest"""
    ckpt: Path = Path("./ckpt")
    """a step_N directory, a run directory (its newest), the file `best` in one, a Hugging Face directory or hub id"""
    split: Annotated[Literal["val", "train"] | None, derived] = None
    """side of the data to score (default: val); text, and shards whose names tell no two sides, are scored whole"""
    text_field: MaybeText = None
    """field that holds the text in jsonl, csv and parquet (default: text)"""
    doc_sep: MaybeText = None
    """separator of documents in plain text (default: as prepare.py, units of about 4 KB at blank lines); an end-of-text
    token follows each"""
    whole_files: bool = False
    """take each plain text file as one document"""
    ctx: MaybeCount = None
    """window length in tokens (default: the model's)"""
    stride: MaybeCount = None
    """tokens from one window's start to the next (default: --ctx, no overlap). Each token is scored once; a smaller N
    shows it at least ctx - N tokens before it, for ctx / N times the work, and makes the standard error, which takes
    windows as independent, too small"""
    by_shard: bool = False
    """a line for each shard or text file too; a window counts for the one that holds the first token scored in it"""
    local_bsz: Count = 8
    """windows per rank and forward; the result does not depend on it"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps (one process), else cpu"""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on cuda, else gloo"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of matrix products"""
    json: Path | None = None
    """also write the figures to this file, in place of what it holds"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        for name in ("ctx", "local_bsz", "stride"):
            if getattr(self, name) == 0:
                raise InputError(f"{flag(name)} 0: must be at least 1")
        if self.ctx is not None:
            self.stride_for(self.ctx)
        if self.doc_sep is not None and self.whole_files:
            raise InputError(f"--doc-sep {self.doc_sep!r}: divides what --whole-files keeps whole; give one of them")
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise InputError(f"--json {self.json}: no such directory to write to; make it first")

    @property
    def side(self) -> Literal["val", "train"]:
        """The split to score of data that have two."""
        return self.split or "val"

    def stride_for(self, ctx: int) -> int:
        """--stride, or `ctx`. Raises InputError where windows of `ctx` tokens would leave some unscored."""
        if self.stride is not None and self.stride > ctx:
            raise InputError(f"--stride {self.stride}: leaves tokens out between windows of {ctx}; use at most {ctx}")
        return self.stride or ctx


@dataclass
class BenchmarkConfig:
    """lm-evaluation-harness tasks on a checkpoint or a Hugging Face directory; also under torchrun."""

    ckpt: Path = Path("./ckpt")
    """a step_N directory, a run directory (its newest), `best` in one, or a Hugging Face directory or hub id"""
    tasks: str = "hellaswag"
    """names of tasks, groups or tags of the harness, or task YAML files, separated by commas"""
    offline_data: Texts = ()
    """TASK=FILE, repeatable: score the harness's definition of TASK on the rows of a .jsonl, .json or .parquet file, in
    the columns of its own data set, instead of fetching that"""
    include_path: Texts = ()
    """directory of task YAML files of your own, repeatable; they win over the harness's of the same name"""
    limit: MaybeFloat = None
    """score the first N documents of each task, or a share below 1 (default: all)"""
    num_fewshot: MaybeCount = None
    """worked examples before each question (default: the task's own number)"""
    batch_size: Count = 16
    """sequences per rank and forward"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps (one process), else cpu"""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on cuda, else gloo. gloo means the CPU unless --device says otherwise"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of matrix products; weights are fp32"""
    seed: str = "0,1234,1234,1234"
    """of Python, numpy, torch and the choice of worked examples, as the harness's --seed; one number serves all four"""
    json: Path | None = None
    """also write the harness's results, and what was scored, to this file, in place of what it holds"""
    out: Path | None = None
    """also write them below this directory as lm_eval --output_path does: MODEL/results_DATE.json"""
    log_samples: bool = False
    """also write each document with the model's answers, as samples_TASK_DATE.jsonl below --out"""

    def seeds(self) -> list[int]:
        """The four of --seed. Raises InputError where it is written otherwise."""
        try:
            numbers = [int(x) for x in self.seed.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 4) or min(numbers) < 0:
            raise InputError(f"--seed {self.seed}: write one number, or four as in 0,1234,1234,1234")
        return numbers * 4 if len(numbers) == 1 else numbers

    def local_data(self) -> dict[str, Path]:
        """Task -> file of --offline-data. Raises InputError."""
        files: dict[str, Path] = {}
        for spec in self.offline_data:
            task, _, file = spec.partition("=")
            if not task or not file:
                raise InputError(f"--offline-data {spec}: write TASK=FILE, as in hellaswag=hellaswag_val.jsonl")
            if task not in self.tasks.split(","):
                raise InputError(f"--offline-data {spec}: {task} is not among --tasks {self.tasks}; add it there")
            if task in files:
                raise InputError(f"--offline-data {spec}: {task} has {files[task]} already; a task takes one file")
            if not Path(file).is_file():
                raise InputError(f"--offline-data {spec}: no such file")
            if Path(file).suffix not in (".jsonl", ".json", ".parquet"):
                raise InputError(f"--offline-data {spec}: must end in .jsonl, .json or .parquet")
            files[task] = Path(file)
        return files

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if not all(self.tasks.split(",")):
            raise InputError(f"--tasks {self.tasks!r}: an empty name; write them as in hellaswag,arc_easy")
        if self.limit is not None and not (0 < self.limit < 1 or (self.limit >= 1 and self.limit % 1 == 0)):
            raise InputError(f"--limit {self.limit:g}: a whole number of documents, or a share of them below 1")
        if self.batch_size == 0:
            raise InputError("--batch-size 0: must be at least 1")
        self.seeds()
        self.local_data()
        for directory in self.include_path:
            if not Path(directory).is_dir():
                raise InputError(f"--include-path {directory}: no such directory")
        if self.log_samples and self.out is None:
            raise InputError("--log-samples: goes with --out, the directory to write them below")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out}: a file; name a directory, or use --json for a file")
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise InputError(f"--json {self.json}: no such directory to write to; make it first")


@dataclass
class ExportConfig:
    """Checkpoint -> Hugging Face directory, published only if its logits equal ours."""

    ckpt: Path = Path("./ckpt")
    """a step_N directory, a run directory (its newest), or the file `best` in one"""
    out: Path = Path("./ckpt_hf")
    """directory to write; must not exist yet"""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the weights; training keeps them in fp32, the others round"""
    max_shard_size: Count = 5_000_000_000
    """bytes of a safetensors file; a larger model gets several and an index"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if self.max_shard_size == 0:
            raise InputError("--max-shard-size 0: must be at least 1 byte, as in 5e9")


@dataclass
class ImportConfig:
    """Hugging Face directory or hub id (GPT-2, Llama, Mistral without window, Qwen3) -> a run to train on from."""

    model: MaybeText = None
    """directory with config.json and weights, or a hub id such as openai-community/gpt2"""
    revision: MaybeText = None
    """branch, tag or commit of a hub id (default: the newest, written down)"""
    out: Path = Path("./ckpt_imported")
    """run directory to write; must not exist yet"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if self.model is None:
            raise InputError("--model: name a Hugging Face directory or a hub id, such as openai-community/gpt2")
        if self.revision is not None and Path(self.model).exists():
            raise InputError(f"--revision {self.revision}: {self.model} is a directory; it goes with a hub id")


@dataclass
class HealthConfig:
    """Judge runs by their curves: healthy, stalled, diverging, suspicious or undecided, with reasons and a remedy."""

    runs: tyro.conf.Positional[Texts] = ()
    """run directories, directories of runs, a metrics.jsonl, console logs of train.py or nanoGPT (- for stdin)"""
    target_loss: MaybeFloat = None
    """held-out loss to beat, in nats a token (default: each run's own --target-loss)"""
    png: Path | None = None
    """also draw all runs: loss, learning rate, gradient norm, throughput"""
    html: Path | None = None
    """also write one page that needs nothing else: verdicts, figures, what each run is, samples of its text"""
    json: MaybeText = None
    """also write the verdicts to this file, in place of what it holds; - is standard output, without the text"""
    follow: bool = False
    """look again whenever a run has moved on, until all have ended"""
    every: float = 10.0
    """seconds between looks of --follow"""
    fail_on: MaybeText = None
    """verdicts that end this command with exit code 1, separated by commas, as in diverging,stalled,suspicious"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if not self.runs:
            raise InputError("health.py: name what to judge, as in python health.py ./ckpt")
        if self.target_loss is not None and not 0 < self.target_loss < float("inf"):
            raise InputError(f"--target-loss {self.target_loss}: must be above 0, in nats a token")
        for name in ("png", "html", "json"):
            path = getattr(self, name)
            if path in (None, "-"):
                continue
            if Path(path).is_dir():
                raise InputError(f"{flag(name)} {path}: a directory; name a file in it")
            if not Path(os.path.realpath(path)).parent.is_dir():
                raise InputError(f"{flag(name)} {path}: no such directory to write to; make it first")
        if unknown := [v for v in self.failing() if v not in VERDICTS]:
            raise InputError(f"--fail-on {unknown[0]}: the verdicts are {', '.join(VERDICTS)}")
        if self.follow and "-" in self.runs:
            raise InputError("--follow: standard input ends by itself; name the file that it is written to")
        if not 0.1 <= self.every < 86_400:
            raise InputError(f"--every {self.every}: must be 0.1 .. 86,400 seconds")

    def failing(self) -> list[str]:
        """The verdicts of --fail-on."""
        return [] if self.fail_on is None else [v.strip() for v in self.fail_on.split(",")]


@dataclass
class CheckDataConfig:
    """Read shards from end to end and judge them: hashes, ids, counts, held-out text in the training set, padding."""

    dirs: tyro.conf.Positional[Texts] = ()
    """directories written by prepare.py, or shards of nanoGPT, llm.c or datatrove"""
    ctx: MaybeCount = None
    """context length to train with: each side must hold a window of it (default: said, and 256 must fit)"""
    window: MaybeCount = None
    """tokens of the held-out windows looked for in the training set (default: 64, of bytes or characters 256)"""
    max_overlap: float = 0.5
    """share of held-out windows that may stand in the training set before the check fails; noted from a tenth of it"""
    val_data: MaybeText = None
    """held-out shards, where the names of foreign ones don't tell train from val"""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """of headerless shards without a manifest"""
    tokenizer: MaybeText = None
    """of shards without a manifest: gpt2, another tiktoken name, a tokenizer.json, byte"""
    vocab_size: MaybeCount = None
    """ids of shards without a manifest and without a tokenizer"""
    json: Path | None = None
    """also write the checks to this file"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        if not self.dirs:
            raise InputError("check.py data: name what to check, as in python check.py data ./data")
        for name in ("ctx", "window", "vocab_size"):
            if getattr(self, name) == 0:
                raise InputError(f"{flag(name)} 0: must be at least 1")
        if self.window is not None and not 8 <= self.window <= 1 << 16:
            raise InputError(f"--window {self.window}: must be 8 .. 65,536 tokens; shorter ones recur in any text")
        if not 0 <= self.max_overlap <= 1:
            raise InputError(f"--max-overlap {self.max_overlap}: a share, 0 .. 1")
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise InputError(f"--json {self.json}: no such directory to write to; make it first")


@dataclass
class CheckCkptConfig:
    """List the checkpoints of a run and verify each: sizes, sha256, names and shapes against the run's model."""

    dirs: tyro.conf.Positional[Texts] = ()
    """run directories (all their checkpoints), or step_N directories"""
    deep: bool = False
    """also read every tensor: all must be finite"""
    json: Path | None = None
    """also write the checks to this file"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        _check_dirs("ckpt", self.dirs, self.json)


@dataclass
class CheckRunConfig:
    """Show what a run is and what happened to it, and check that its records agree: contract, metrics, receipt."""

    dirs: tyro.conf.Positional[Texts] = ()
    """run directories, as --ckpt-dir named them"""
    json: Path | None = None
    """also write the checks to this file"""

    def check(self) -> None:
        """Raise InputError, naming the flag, where the values are impossible."""
        _check_dirs("run", self.dirs, self.json)


def _check_dirs(word: str, dirs: tuple[str, ...], json: Path | None) -> None:
    if not dirs:
        raise InputError(f"check.py {word}: name what to check, as in python check.py {word} ./ckpt")
    if json is not None and not json.resolve().parent.is_dir():
        raise InputError(f"--json {json}: no such directory to write to; make it first")
