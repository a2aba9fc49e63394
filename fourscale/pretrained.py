"""A model to start or read from: a checkpoint of train.py, or a Hugging Face directory or hub name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourscale import rundir
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.rundir import Checkpoint
from fourscale.tokenization import Tokenizer


@dataclass(frozen=True)
class Pretrained:
    """A model at rest: its shape is known, its weights are still on the disk."""

    path: Path  # step_N, or the Hugging Face directory
    cfg: ModelConfig
    ckpt: Checkpoint | None  # None for a Hugging Face directory

    @property
    def about(self) -> dict[str, Any]:
        """What identifies it in a result: path, update (None where there is none) and digest of its tensors."""
        return {"ckpt": str(self.path), "update": self.ckpt.step["update"], "digest": rundir.digest(self.ckpt)}

    @property
    def tokenizer_entry(self) -> dict[str, Any] | None:
        """The tokenizer as run.json has it: kind, sha256, vocab_size, ...; None where it is unknown."""
        return self.ckpt.run["tokenizer"]

    def tokenizer(self) -> Tokenizer:
        """Raises InputError where there is none."""
        return rundir.load_tokenizer(self.ckpt)

    def model(self, device: torch.device | str = "cpu") -> GPT:
        """The whole model in this process, in evaluation mode; what can be verified is. Raises InputError."""
        return rundir.load_model(self.ckpt, device)


def open_pretrained(path: Path | str, named: str = "--ckpt") -> Pretrained:
    """Find what `path` names: a step_N directory, a run directory (its newest), `best` or `latest` in one, a Hugging
    Face directory, or a hub id. `named`: the flag that messages quote. Raises InputError."""
    ckpt = rundir.open_checkpoint(Path(path))
    return Pretrained(ckpt.dir, ckpt.model, ckpt)
