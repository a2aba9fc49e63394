"""The text that a run writes of itself at each evaluation: samples.jsonl, and one short line on the console."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fourscale.cli import InputError, RunFailed, say
from fourscale.durable import naming
from fourscale.generate import Decoding, Text, generate, sample_generator

if TYPE_CHECKING:
    from fourscale.model import GPT
    from fourscale.publish import RunDir
    from fourscale.tokenization import Tokenizer

HOW = Decoding(temperature=0.8)
SEED = 0
SHOWN = 80  # characters on the console


class Sampler:
    """Writes a text of `tokens` tokens after `prompt` (None: as a document begins), always by the same random numbers.

    Nothing is written with 0 tokens, and without a tokenizer, which is said. Raises InputError for a prompt that the
    tokenizer can't spell.
    """

    def __init__(self, run_dir: RunDir, tokenizer: Tokenizer | None, tokens: int, prompt: str | None) -> None:
        self.path, self.topology, self._check = run_dir.path / "samples.jsonl", run_dir.topology, run_dir.assert_writer
        self.tokenizer, self.tokens, self.prompt = tokenizer, tokens if tokenizer else 0, prompt or ""
        self._told = False
        if tokens and not tokenizer and self.topology.main:
            say("note: no text is sampled at evaluations: the data name no tokenizer (--tokenizer)")
        if self.tokens:
            try:
                self.ids = tokenizer.encode(self.prompt) or [tokenizer.eot_id]
            except InputError as e:
                raise InputError(f"--sample-prompt: {e}") from None

    def write(self, update: int, model: GPT) -> None:
        """Draw a text, append it and show its beginning. Collective.

        model: not DDP's wrapper but what is in it; sharded by FSDP it is itself. Every rank runs the same forwards,
        with random numbers of their own, and the model is left as it was.
        """
        if not self.tokens:
            return
        try:
            new = self._draw(model)
        except RunFailed as e:  # met by all ranks alike: they ran the same forwards
            if self.topology.main:
                say(f"note: step {update}: no text: {e}")
            return
        if not self.topology.main:
            return
        end = new.index(self.tokenizer.eot_id) if self.tokenizer.eot_id in new else len(new)
        # Decoded together: some tokenizers spell a token by its neighbours.
        before = self.ids if self.prompt else []
        text = self.tokenizer.decode([*before, *new[:end]])[len(self.tokenizer.decode(before)) :]
        row = json.dumps({"update": update, "prompt": self.prompt, "text": text}, ensure_ascii=False)
        try:
            self._check()
            with naming(self.path), self.path.open("a", encoding="utf-8") as f:
                f.write(row + "\n")
        except RunFailed:  # another attempt has taken over: the metrics that follow say so on all ranks
            return
        except OSError as e:
            if not self._told:
                say(f"note: {e.filename}: {(e.strerror or str(e)).lower()}; training goes on without texts there")
            self._told = True
        # One line, and no control character of a model that knows nothing yet reaches a terminal, nor a bar that would
        # make what a model has learnt of logs a line of this one.
        shown = " ".join("".join(c if c.isprintable() else " " for c in self.prompt + text).replace("|", "¦").split())
        say(f"step {update} | sample | {shown[:SHOWN]}{'…' if len(shown) > SHOWN else ''}")

    def _draw(self, model: GPT) -> list[int]:
        """Ids that follow the prompt. An end of text ends nothing: ranks that share the model count their forwards."""
        was_training = model.training
        text = Text(self.ids, sample_generator(SEED, self.ids, 0))
        model.eval()
        try:
            with self.topology.autocast():
                for _ in generate(model, [text], self.tokens, HOW, vocab_size=self.tokenizer.vocab_size):
                    pass
        finally:
            model.train(was_training)
            if hasattr(model, "reshard"):  # as after a held-out loss
                model.reshard()
        return text.new
