"""Tensors <-> files: what a checkpoint holds, its hashes, and loading it on any topology; no code in it is run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fourscale.cli import InputError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name; under FSDP each rank's DTensor. The model has no buffers and no tied second names."""
    return {f"model.{name}": p.data for name, p in model.named_parameters()}


def optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state by parameter name; zeros are made where no step has been taken, to load into."""
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    out = {}
    for name, p in model.named_parameters():
        state = owner[id(p)].state[p]
        if not state and isinstance(owner[id(p)], torch.optim.AdamW):
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
        elif not state:
            state["momentum"] = torch.zeros_like(p.data)
        out |= {f"optim.{key}.{name}": value for key, value in state.items()}
    return out


def save(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write the tensors as torch.distributed.checkpoint files into an existing fresh directory; all ranks take part.

    Raises OSError where a rank can't write. Files are not yet durable nor hashed: see `seal`.
    """
    # One thread: with more, an error of a writing thread is lost.
    writer = dcp.FileSystemWriter(directory, thread_count=1, sync_files=False, overwrite=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as e:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(e.failures.items()))
        raise OSError(f"{directory}: {causes}") from None


def seal(directory: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Make this rank's files durable and describe them: name -> {size, sha256}. Rank 0 owns the metadata too."""
    table = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == ".metadata"):
            fsync(path)
            table[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    return table


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk; directories only where the system can."""
    if path.is_dir() and os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def damage(directory: Path, files: dict[str, dict[str, Any]], names: Iterable[str] | None = None) -> str | None:
    """The first fault among `names` (all files if None): missing, wrong size, wrong sha256; None if there is none."""
    for name in sorted(files) if names is None else names:
        path, expected = directory / name, files[name]
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected["size"]:
            return f"{path} has {size:,} bytes, {expected['size']:,} were written"
        if sha256_of(path) != expected["sha256"]:
            return f"{path} is damaged: its sha256 is not the recorded one"
    return None


_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class _TensorMetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in tensor metadata")


class SafeReader(dcp.FileSystemReader):
    """FileSystemReader whose pickled metadata may describe tensors and nothing else, so that loading runs no code."""

    def read_metadata(self) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _TensorMetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            tensors_only = all(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values())
        except OSError as e:
            raise InputError(f"{path}: {e.strerror}; the checkpoint is incomplete, use an older one") from None
        except Exception as e:  # a pickle can fail in any way
            raise InputError(f"{path}: not the metadata of a tensor checkpoint ({e}); do not trust this file") from None
        if not tensors_only:
            raise InputError(f"{path}: holds something other than tensors; do not trust this file")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def load(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place from the checkpoint, resharded as they are; without a group, in this process alone.

    Raises InputError where a name or shape differs, or the files can't be read.
    """
    reader = SafeReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    for name, t in tensors.items():
        if name not in stored:
            raise InputError(f"{directory}: has no {name}; it is a checkpoint of another model")
        if tuple(stored[name].size) != tuple(t.shape):
            found = tuple(stored[name].size)
            raise InputError(
                f"{directory}: {name} is {found}, the model's is {tuple(t.shape)}; another model's checkpoint"
            )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")  # a reader means it so
            dcp.load(tensors, storage_reader=SafeReader(directory), process_group=group, no_dist=group is None)
    except CheckpointException as e:
        rank, failure = sorted(e.failures.items())[0]
        raise InputError(f"{directory}: can't be read on rank {rank}: {failure[0]}; use an older checkpoint") from None
