"""A model to start or read from: a checkpoint of train.py, or a Hugging Face directory or hub name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourscale import checkpoint, hfdir, rundir
from fourscale.cli import InputError
from fourscale.config import ModelConfig
from fourscale.hfdir import HFDir
from fourscale.model import GPT, set_full
from fourscale.rundir import Checkpoint
from fourscale.tokenization import Tokenizer


@dataclass(frozen=True)
class Pretrained:
    """A model at rest: its shape is known, its weights are still on the disk."""

    path: Path  # step_N, or the Hugging Face directory
    cfg: ModelConfig
    ckpt: Checkpoint | None  # None for a Hugging Face directory
    hf: HFDir | None = None  # None for a checkpoint
    hub_id: str | None = None  # of a Hugging Face directory that was downloaded
    revision: str | None = None  # its commit

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What identifies it in a result: path or hub id, update (None where there is none) and digest of its tensors,
        for which a Hugging Face directory's weights are read."""
        if self.ckpt is not None:
            return {"ckpt": str(self.path), "update": self.ckpt.step["update"], "digest": rundir.digest(self.ckpt)}
        place = {"ckpt": self.hub_id or str(self.path), "update": None, "digest": self.hf.digest}
        return place | ({"revision": self.revision} if self.revision else {})

    @functools.cached_property
    def tokenizer_entry(self) -> dict[str, Any] | None:
        """The tokenizer as run.json has it: kind, sha256, vocab_size, ...; None where there is none. Raises InputError
        for a Hugging Face directory's that can't be read."""
        if self.ckpt is not None:
            return self.ckpt.run["tokenizer"]
        return self._hf_tokenizer.entry() if self._hf_tokenizer is not None else None

    @functools.cached_property
    def _hf_tokenizer(self) -> Tokenizer | None:
        return hfdir.tokenizer_of(self.path, self.hf.config)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text: the tokenizer's end-of-text, and those that the source of published weights names, as
        chat models have several. Raises InputError as `tokenizer`."""
        own = {self.tokenizer().eot_id}
        if self.ckpt is None:
            return frozenset(own.union(hfdir.stop_ids(self.path, self.hf.config)))
        return frozenset(own.union(self.ckpt.run.get("imported", {}).get("stop_ids", ())))

    def tokenizer(self) -> Tokenizer:
        """Raises InputError where there is none."""
        if self.ckpt is not None:
            return rundir.load_tokenizer(self.ckpt)
        if self._hf_tokenizer is None:
            lacks = "only a sentencepiece model: let transformers save it as tokenizer.json"
            if not (self.path / "tokenizer.model").is_file():
                lacks = "no tokenizer.json, so its ids are no text: put the model's own there"
            raise InputError(f"{self.path}: has {lacks}")
        return self._hf_tokenizer

    def model(self, device: torch.device | str = "cpu") -> GPT:
        """The whole model in this process, in evaluation mode; what can be verified is. Raises InputError."""
        if self.ckpt is not None:
            return rundir.load_model(self.ckpt, device)
        with torch.device("meta"):
            model = GPT(self.cfg)
        model.to_empty(device=device)
        self.fill(dict(model.named_parameters()))
        return model.eval()

    @torch.no_grad()
    def fill(self, params: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Set our parameters in place by their names (plain tensors or DTensors, on any device); some of them will do.

        A rank holds one full matrix at a time. Learned positions may be fewer than are stored: the first are taken.
        Padded rows of the vocabulary become zero. All ranks of `group` take part. A checkpoint's hashes are not looked
        at. Raises InputError for another shape, and for what can't be read.
        """
        short = {n: p for n, p in params.items() if n == "wpe.weight" and len(p) < self.cfg.ctx}
        if self.ckpt is None:
            for name, p in params.items():
                full = self.hf.parameter(name)
                full = full[: len(p)] if name in short else full
                if full.shape != p.shape:
                    raise InputError(f"{self.path}: {name} is {tuple(full.shape)}, the model's is {tuple(p.shape)}")
                set_full(p, full)
            return
        held = {n: torch.empty(self.cfg.ctx, self.cfg.d_model) if n in short else p.data for n, p in params.items()}
        checkpoint.load(self.path, {f"model.{name}": t for name, t in held.items()}, group)
        for name, p in short.items():
            set_full(p, held[name][: len(p)])


def open_pretrained(path: Path | str, named: str = "--ckpt", revision: str | None = None) -> Pretrained:
    """Find what `path` names: a step_N directory, a run directory (its newest), `best` or `latest` in one, a Hugging
    Face directory, or a hub id. named: the flag that messages quote; revision: of a hub id. Raises InputError."""
    place = Path(path)
    try:
        if place.is_dir() and hfdir.is_model(place) and not rundir.step_dirs(place):
            found = hfdir.open_directory(place.resolve())
            return Pretrained(found.path, found.cfg, None, found, *hfdir.cached_from(found.path))
        if not place.exists() and hfdir.may_be_hub_id(str(path)):
            directory, revision = hfdir.download(str(path), revision)
            found = hfdir.open_directory(directory)
            return Pretrained(directory, found.cfg, None, found, str(path), revision)
    except InputError as e:
        raise InputError(f"{named} {e}") from None
    try:
        ckpt = rundir.open_checkpoint(place)
    except InputError as e:
        raise InputError(str(e).replace("--ckpt", named, 1)) from None
    return Pretrained(ckpt.dir, ckpt.model, ckpt)
