"""Continue a prompt with a checkpoint.

    python sample.py --ckpt ckpt/step_2000 --prompt "Once upon a time" --temperature 0.8 --top_k 200
    python sample.py --ckpt ckpt --num-samples 5 --seed 1             # five documents from their beginning
    python sample.py --ckpt ckpt --prompt "def " --temperature 0      # the most likely continuation

Text goes to stdout, notes to stderr. A model of the kind trained here continues text; it doesn't answer questions. It
sees at most its context length: of a longer prompt the end, and past that length the oldest tokens drop out of sight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fourscale.cli import InputError, door, is_rank_zero, parse
from fourscale.config import SampleConfig

if TYPE_CHECKING:
    from fourscale.tokenization import Tokenizer

BATCH = 16  # samples computed side by side
SEPARATOR = "-" * 40


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text that tokens add to a prompt, in pieces as they come; what may be half a character waits for the rest."""
    ids, shown = list(prompt), len(tokenizer.decode(prompt))
    text = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        ready = text.rstrip("\ufffd")  # the bytes of an unfinished character
        if len(ready) > shown:
            yield ready[shown:]
            shown = len(ready)
    yield text[shown:]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the prompt. Raises InputError for a character that the tokenizer doesn't know."""
    try:
        return tokenizer.encode(prompt)
    except InputError as e:
        raise InputError(f"--prompt: {e}") from None


@door
def main() -> None:
    cfg = parse(SampleConfig)
    cfg.check()
    if not is_rank_zero():  # under torchrun one process is enough
        return
    from tqdm import tqdm

    from fourscale import parallel, rundir
    from fourscale.generate import Decoding, generate, sample_generators

    sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character must not end the text
    ckpt = rundir.open_checkpoint(cfg.ckpt)
    tokenizer = rundir.load_tokenizer(ckpt)
    eot = tokenizer.eot_id
    prompt = encode_prompt(tokenizer, cfg.prompt)
    if len(prompt) > ckpt.model.ctx:
        print(f"note: --prompt has {len(prompt)} tokens; the model sees the last {ckpt.model.ctx}", file=sys.stderr)
    model = rundir.load_model(ckpt, parallel.pick_device(cfg.device, "auto"))
    how = Decoding(cfg.temperature, cfg.top_k, cfg.top_p)

    def steps(first: int, count: int) -> Iterator[list[int | None]]:
        generators = sample_generators(cfg.seed, first, count)
        return generate(model, prompt or [eot], generators, cfg.max_new_tokens, how, eot, tokenizer.vocab_size)

    if cfg.num_samples == 1:
        print(cfg.prompt, end="", flush=True)
        for piece in continuation(tokenizer, prompt, (t for (t,) in steps(0, 1) if t != eot)):
            print(piece, end="", flush=True)
        print()
        return
    for first in range(0, cfg.num_samples, BATCH):
        count = min(BATCH, cfg.num_samples - first)
        label = f"samples {first + 1} to {first + count}"
        pause = 0.1 if sys.stderr.isatty() else 10  # a log file wants few lines
        rows = list(tqdm(steps(first, count), label, cfg.max_new_tokens, unit="token", leave=False, mininterval=pause))
        for k in range(count):
            tokens = [row[k] for row in rows if row[k] not in (None, eot)]
            print(cfg.prompt + "".join(continuation(tokenizer, prompt, tokens)))
            print(SEPARATOR, flush=True)


if __name__ == "__main__":
    main()
