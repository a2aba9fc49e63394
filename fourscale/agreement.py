"""Whether our model and transformers' compute the same logits, with one of the two in memory at a time.

Logits of the first wait on the disk, in a file without a name. Both are computed in fp32 on the CPU, a row at a time.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fourscale.cli import RunFailed
from fourscale.config import ModelConfig
from fourscale.model import GPT

TOLERANCE = 1e-4  # of the largest logit, or of 1
COMPARED_TOKENS = 1024  # per row: the longest window that logits are compared on
ROW_BYTES = 256 << 20  # of logits: with a large vocabulary, windows are shorter
POSITIONS = 64  # compared at once


@dataclass(frozen=True)
class Agreement:
    """How transformers' model compares with ours of the same weights."""

    difference: float  # largest absolute difference of a logit
    largest: float  # largest absolute logit
    tokens: int  # positions compared, each over the whole vocabulary
    held_out: bool  # real held-out text among them
    rounding: float | None = None  # largest difference to our logits before weights were rounded; None: they weren't

    def table(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def told(self) -> str:
        """'largest difference of logits 2.1e-06 over 4,096 tokens of random ids (largest logit 12.3)'."""
        where = "random ids and held-out text" if self.held_out else "random ids"
        words = f"largest difference of logits {self.difference:.2g} over {self.tokens:,} tokens of {where} "
        words += f"(largest logit {self.largest:.3g})"
        if self.rounding is not None:
            words += f"; {self.rounding:.2g} to the unrounded weights'"
        return words


def window(cfg: ModelConfig) -> int:
    """Tokens of a row to compare."""
    return max(1, min(cfg.ctx, COMPARED_TOKENS, ROW_BYTES // (4 * cfg.padded_vocab)))


def random_ids(cfg: ModelConfig, vocab_size: int) -> Tensor:
    """Two windows of random ids, always the same, int64 [2, T].

    Where the model masks documents, each is one document of full length, and one begins with the end-of-text token.
    """
    ids = torch.randint(vocab_size, (2, window(cfg)), generator=torch.Generator().manual_seed(0))
    if cfg.doc_mask:
        ids[ids == cfg.eot_id] = (cfg.eot_id + 1) % vocab_size
        ids[1, 0] = cfg.eot_id
    return ids


def comparable(cfg: ModelConfig, ids: Tensor) -> list[Tensor]:
    """Rows int64 [T] of ids [B, T] on which transformers must compute the same.

    Its models have no document mask: where ours has one, windows are cut before each end-of-text token.
    """
    if not cfg.doc_mask:
        return list(ids)
    cuts = [(row == cfg.eot_id).nonzero().flatten().tolist() for row in ids]
    return [part for row, at in zip(ids, cuts, strict=True) for part in row.tensor_split(at) if len(part)]


class Logits:
    """Logits of a model on some rows, on the disk: fp32 [T, V] a row."""

    def __init__(self, model: GPT, rows: list[Tensor], directory: Path):
        """rows: int64 [T] each. Raises OSError where `directory` has no room."""
        self.rows, self.vocab_size, self.largest = rows, model.cfg.vocab_size, 0.0
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed with the last reference)
        with torch.no_grad():
            for row in rows:
                for piece in model(row[None])[0].split(POSITIONS):
                    low, high = torch.aminmax(piece)
                    self.largest = max(self.largest, *torch.nan_to_num(torch.stack((-low, high))).tolist())
                    self._file.write(piece.contiguous().numpy().data)  # cut from the padded rows: not contiguous
        self._file.flush()

    def _pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """(row, first position, logits [POSITIONS, V])."""
        self._file.seek(0)
        for i, row in enumerate(self.rows):
            for first in range(0, len(row), POSITIONS):
                shape = (min(POSITIONS, len(row) - first), self.vocab_size)
                data = self._file.read(4 * shape[0] * shape[1])
                yield i, first, torch.from_numpy(np.frombuffer(bytearray(data), np.float32).reshape(shape))


def differences(theirs: Any, kept: list[Logits]) -> list[float]:
    """Largest absolute difference of transformers' logits to those of each of `kept`, over the same rows; what isn't
    finite or has another shape is inf."""
    pieces = [logits._pieces() for logits in kept]
    out = [0.0] * len(kept)
    current, b = None, torch.empty(0)
    for together in zip(*pieces, strict=True):
        i, first, _ = together[0]
        if i != current:
            current, b = i, torch.empty(0)  # the row before is freed first
            with torch.no_grad():
                b = theirs(kept[0].rows[i][None], use_cache=False).logits[0]
        for k, (_, _, a) in enumerate(together):
            same_shape = b.shape == (len(kept[0].rows[i]), a.shape[1])
            gap = (a - b[first : first + len(a)]).abs().max() if same_shape else torch.tensor(float("inf"))
            out[k] = max(out[k], torch.nan_to_num(gap, nan=float("inf")).item())
    return out


def agrees(difference: float, largest: float) -> bool:
    """False for differences beyond what the order of summation explains."""
    return difference <= TOLERANCE * max(1.0, largest)


def load_theirs(directory: Path, fp32: bool = False) -> Any:
    """transformers' model from files alone, in evaluation mode; by its defaults, or in fp32 whatever the files have.

    Raises RunFailed in one line where it doesn't load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    how = {"dtype": torch.float32} if fp32 else {}
    try:
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **how).eval()
    except Exception as e:  # whatever it is, a user would meet it too
        raise RunFailed(f"transformers can't load it ({first_line(e)})") from None


def first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
