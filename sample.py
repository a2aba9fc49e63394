"""Continue prompts with a checkpoint or a Hugging Face directory.

    python sample.py --ckpt ckpt/step_2000 --prompt "Once upon a time" --temperature 0.8 --top_k 200
    python sample.py --ckpt ckpt --num-samples 5 --seed 1             # five documents from their beginning
    python sample.py --ckpt ckpt --prompt "def " --greedy --stop ":"  # the most likely continuation, up to a colon
    python sample.py --ckpt ckpt --prompts-file prompts.txt --json texts.jsonl --batch-size 64
    python sample.py --ckpt ckpt --interactive

Text goes to stdout, notes to stderr. A model of the kind trained here continues text; it doesn't answer questions. It
sees at most its context length. A text that outgrows it goes on: whenever the context is full, the older half of what
was seen drops out, and the rest is read again at positions from 0.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, door, is_rank_zero, parse
from fourscale.flags import SampleConfig

if TYPE_CHECKING:
    from fourscale.generate import Decoding, Text
    from fourscale.tokenization import Tokenizer

SEPARATOR = "-" * 40

# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(cfg: SampleConfig) -> list[tuple[str, str]]:
    """(where it stands, text) of each prompt of --prompt and --prompts-file. Raises InputError."""
    prompts = [("--prompt", _piped() if p == "-" else p) for p in cfg.prompt]
    if cfg.prompts_file is not None:
        prompts += parse_prompts(f"--prompts-file {cfg.prompts_file}", _file(cfg.prompts_file))
    return prompts or [("--prompt", "")]


def parse_prompts(name: str, content: str) -> list[tuple[str, str]]:
    """(where, text) of the prompts in a file: a line each, or JSON lines where the first line is an object.

    Raises InputError where there is none, and for a row of JSON without a text in "prompt".
    """
    lines = [(f"{name} line {n}", line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f'{name}: no prompts in it; write one on each line, or JSON lines with a field "prompt"')
    if _object(lines[0][1]) is None:
        return [(where, line.removesuffix("\r")) for where, line in lines]
    rows = [(where, (_object(line) or {}).get("prompt")) for where, line in lines]
    for where, text in rows:
        if not isinstance(text, str):
            raise InputError(f'{where}: the file is JSON lines, and this one has no text in a field "prompt"')
    return rows


def _object(line: str) -> dict[str, Any] | None:
    """A row of JSON lines; None for any other line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _piped() -> str:
    """The one prompt of --prompt -."""
    text = _stdin("--prompt -").removesuffix("\n")
    if not text:
        raise InputError("--prompt -: nothing came on standard input; to begin a document, leave the flag out")
    return text


def _stdin(name: str) -> str:
    return _decode(name, sys.stdin.buffer.read())


def _file(path: str) -> str:
    if path == "-":
        return _stdin("--prompts-file -")
    try:
        return _decode(f"--prompts-file {path}", Path(path).read_bytes())
    except OSError as e:
        raise InputError(f"--prompts-file {path}: {e.strerror.lower()}") from None


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data[: e.start].count(b"\n") + 1
        raise InputError(f"{name}: line {line} is not valid UTF-8; convert it first, as by iconv") from None


def encode_prompt(tokenizer: Tokenizer, text: str, where: str = "--prompt") -> list[int]:
    """Ids of a prompt; of an empty one, the end-of-text token, which a document follows.

    Raises InputError for a character that the tokenizer doesn't know, and for an empty prompt where that token is none.
    """
    try:
        ids = tokenizer.encode(text)
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
    if not ids and tokenizer.eot_id is None:
        raise InputError(f"{where}: empty, and the tokenizer has no end-of-text token to begin with; give a text")
    return ids or [tokenizer.eot_id]


def note_long(prompts: Sequence[tuple[str, list[int]]], ctx: int) -> None:
    """Say which prompts, (where, ids), are longer than the model's context."""
    from fourscale.generate import window_start

    long = [(where, len(ids)) for where, ids in prompts if len(ids) > ctx]
    if long:
        where, n = max(long, key=lambda one: one[1])
        others = f" (and {len(long) - 1} shorter ones more than {ctx})" if len(long) > 1 else ""
        seen = n - window_start(n, ctx)
        print(
            f"note: {where} has {n:,} tokens{others}; the model's context is {ctx:,}: it begins with the last {seen:,}",
            file=sys.stderr,
        )


# ---- texts -----------------------------------------------------------------------------------------------------------


class Writer:
    """The text of tokens as they come: whole characters alone, and nothing that may become a stop text.

    What has been shown stays: of tokenizers that spell bytes as <0x41>, whose decoder gives up a whole run of them for
    one that is invalid, the valid characters before it are kept.
    before: what the tokens follow, for tokenizers that decode a token by its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids = list(before)
        self.context, self.shown = 0, len(self.ids)  # ids[context:shown] are decoded again, those from shown on are new
        self.held = ""  # text that is ready but for what a stop text may begin with
        self.stopped = False  # a stop text came: nothing follows

    def add(self, token: int) -> str:
        """One more token -> the text that is certain by it, perhaps none."""
        self.ids.append(token)
        fresh = self._fresh()
        if not fresh or fresh.endswith("\ufffd"):  # the bytes of an unfinished character
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return self._before_stop(fresh)

    def end(self) -> str:
        """What was still waiting."""
        rest = self._before_stop(self._fresh()) + self.held
        self.shown, self.held = len(self.ids), ""
        return rest

    def _fresh(self) -> str:
        known = self.tokenizer.decode(self.ids[self.context : self.shown])
        return self.tokenizer.decode(self.ids[self.context :])[len(known) :]

    def _before_stop(self, fresh: str) -> str:
        if self.stopped:
            return ""
        text = self.held + fresh
        # The stop text that is complete first, as if characters came one by one.
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)[1]]
        begun = [n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        ready = len(text) - max(begun, default=0)
        self.held = text[ready:]
        return text[:ready]


@dataclass
class Sample:
    """A text in the making and what it is called by."""

    prompt: str
    index: int  # among the samples of its prompt
    tokens: Text
    writer: Writer
    text: str = ""  # so far, without the prompt


def grow(samples: Sequence[Sample], steps: Iterator[Text]) -> Iterator[tuple[Sample, str]]:
    """(sample, text that it grew by) for each step of `generate` on the samples' tokens; ends them at stop texts."""
    of = {id(sample.tokens): sample for sample in samples}
    for tokens in steps:
        sample = of[id(tokens)]
        piece = "" if tokens.finish == "eot" else sample.writer.add(tokens.ids[-1])
        if tokens.finish is not None:
            piece += sample.writer.end()
        if sample.writer.stopped:
            tokens.finish = "stop"
        sample.text += piece
        yield sample, piece


def stream(sample: Sample, grown: Iterator[tuple[Sample, str]]) -> None:
    """Print one sample as it is made."""
    print(sample.prompt, end="", flush=True)
    for _, piece in grown:
        print(piece, end="", flush=True)
    print()


def in_order(samples: Sequence[Sample], grown: Iterator[tuple[Sample, str]], most: int) -> Iterator[Sample]:
    """Samples of at most so many tokens, each as soon as it and all before it are finished, with a bar of tokens."""
    from tqdm import tqdm

    at = 0
    with tqdm(total=len(samples) * most, unit="token", leave=False, disable=None) as bar:  # on a terminal alone
        for sample, _ in grown:
            bar.update(1 if sample.tokens.finish is None else 1 + most - len(sample.tokens.new))
            while at < len(samples) and samples[at].tokens.finish is not None:
                with tqdm.external_write_mode(file=sys.stdout):
                    yield samples[at]
                at += 1


def row(sample: Sample, cfg: SampleConfig, how: Decoding, about: dict[str, Any]) -> str:
    """A row of --json: the text, and all that it follows from."""
    what = {"prompt": sample.prompt, "sample": sample.index, "seed": cfg.seed, "text": sample.text}
    what |= {"tokens": sample.tokens.new, "finish": sample.tokens.finish, **about, **dataclasses.asdict(how)}
    what |= {"stop": cfg.stop, "ignore_eot": cfg.ignore_eot, "max_new_tokens": cfg.max_new_tokens, "dtype": cfg.dtype}
    return json.dumps(what, ensure_ascii=False)


def converse(answer: Callable[[str, int], None]) -> None:
    """Ask for prompts line by line until an empty one or the end: answer(prompt, how often it was given before)."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited and called back)

    print("note: type a prompt; Ctrl-C stops a text, an empty line or Ctrl-D ends", file=sys.stderr)
    marker = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    given: collections.Counter[str] = collections.Counter()
    while True:
        try:
            line = input(marker)
        except EOFError:
            line = ""
            print(end="\n" if marker else "")
        if not line:
            return
        try:
            answer(line, given[line])
        except InputError as e:
            print(f"error: {e}", file=sys.stderr)
        except KeyboardInterrupt:
            print()
        given[line] += 1


# ---- the door --------------------------------------------------------------------------------------------------------


@door
def main() -> None:
    cfg = parse(SampleConfig)
    cfg.check()
    if not is_rank_zero():  # under torchrun one process is enough
        return
    prompts = [] if cfg.interactive else read_prompts(cfg)
    import torch

    from fourscale import parallel
    from fourscale.generate import Decoding, Text, generate, sample_generator
    from fourscale.pretrained import open_pretrained

    # A terminal that can't show a character must not end the text; JSON is UTF-8 everywhere.
    sys.stdout.reconfigure(errors="replace", encoding="utf-8" if cfg.json == "-" else None)
    source = open_pretrained(cfg.ckpt)
    tokenizer = source.tokenizer()

    def start(prompts: Sequence[tuple[str, str]], first: int = 0) -> list[Sample]:
        """Samples from number `first` of each prompt, nothing drawn yet."""
        ids = [encode_prompt(tokenizer, text, where) for where, text in prompts]
        note_long([(where, i) for (where, _), i in zip(prompts, ids, strict=True)], source.cfg.ctx)
        return [
            Sample(text, k, Text(i, sample_generator(cfg.seed, i, k)), Writer(tokenizer, i if text else (), cfg.stop))
            for (_, text), i in zip(prompts, ids, strict=True)
            for k in range(first, first + cfg.num_samples)
        ]

    samples = start(prompts)  # what is wrong with a prompt is said before the model is read
    device = parallel.pick_device(cfg.device, "auto")
    model = source.model(device)
    temperature = 0.0 if cfg.greedy else 0.8 if cfg.temperature is None else cfg.temperature
    how = Decoding(temperature, cfg.top_k, cfg.top_p, cfg.min_p, cfg.repetition_penalty)
    eot_ids = () if cfg.ignore_eot else source.stop_ids

    def grown(samples: Sequence[Sample]) -> Iterator[tuple[Sample, str]]:
        texts, vocab = [sample.tokens for sample in samples], tokenizer.vocab_size
        return grow(samples, generate(model, texts, cfg.max_new_tokens, how, eot_ids, vocab, cfg.batch_size))

    if temperature == 0 and cfg.num_samples > 1:
        print(f"note: greedy: the {cfg.num_samples} samples of a prompt are the same", file=sys.stderr)

    def answer(prompt: str, before: int) -> None:
        for sample in start([("the prompt", prompt)], before * cfg.num_samples):
            stream(sample, grown([sample]))
            if not sys.stdin.isatty():  # a script's: where a text ends must show
                print(SEPARATOR, flush=True)

    with contextlib.ExitStack() as stack:
        if cfg.dtype == "bf16":  # around all, so that weights are rounded once
            stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
        if cfg.interactive:
            converse(answer)
            return
        out, about = None, {}
        if cfg.json is not None:
            out = sys.stdout if cfg.json == "-" else stack.enter_context(Path(cfg.json).open("w", encoding="utf-8"))
            about = source.about
        if len(samples) == 1 and out is not sys.stdout:
            stream(samples[0], grown(samples))
            finished: Iterable[Sample] = samples
        else:
            finished = in_order(samples, grown(samples), cfg.max_new_tokens)
        for sample in finished:
            if len(samples) > 1 and out is not sys.stdout:
                print(sample.prompt + sample.text)
                print(SEPARATOR, flush=True)
            if out is not None:
                print(row(sample, cfg, how, about), file=out, flush=True)


if __name__ == "__main__":
    main()
