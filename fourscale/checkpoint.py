"""Tensors <-> files: what a checkpoint holds, its hashes, and loading it on any topology; no code in it is run."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import io
import pickle
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from fourscale.cli import InputError
from fourscale.durable import fsync


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


def share(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """What this rank is to write of `tensors`, so that each byte is staged and written by one rank only.

    A plain tensor is whole on all ranks, a DTensor's shard on the ranks along its replicated mesh dimensions: such
    copies are dealt, largest first, each to the rank that has the fewest bytes so far.
    """
    loads: dict[int, list[int]] = {}
    mine = set()
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        copies, me = world_size, rank
        if isinstance(t := tensors[name], DTensor):
            copies, me = 1, 0
            for size, at, placement in zip(
                t.device_mesh.shape, t.device_mesh.get_coordinate(), t.placements, strict=True
            ):
                if placement.is_replicate():
                    copies, me = copies * size, me * size + at
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += t.nbytes
        if writer == me:
            mine.add(name)
    return {name: t for name, t in tensors.items() if name in mine}


def local_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(_local(t).nbytes for t in tensors.values())


def bytes_on_disk(tensors: dict[str, Tensor]) -> int:
    """About what this rank's parts take in files: torch.save's records and the metadata come on top of the numbers."""
    return int(1.01 * local_bytes(tensors)) + 2560 * len(tensors) + 16384


def non_finite(tensors: dict[str, Tensor]) -> str | None:
    """The first of `tensors` whose part on this rank has a NaN or an infinity; one pass, and no copy."""
    parts = {name: p for name, t in tensors.items() if (p := _local(t)).numel()}
    if not parts:
        return None
    extremes = torch.stack([torch.stack(torch.aminmax(p)) for p in parts.values()])  # [N, 2]; a NaN is handed on
    return next((name for name, ok in zip(parts, extremes.isfinite().all(1).tolist(), strict=True) if not ok), None)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def stager(device: torch.device) -> DefaultStager:
    """Copies tensors into host memory that is kept and used again (pinned for a GPU's): returns when copied."""
    gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


def touch(stager: DefaultStager, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Stage `tensors` for the memory alone, in a thread and while they change; the next stage meets a lack of it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread begins on the first
    with contextlib.suppress(RuntimeError, MemoryError):
        stager.stage(tensors)


def write(
    directory: Path, tensors: dict[str, Tensor], rank: int, group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Write each rank's share as torch.distributed.checkpoint files into an existing fresh directory, durably.

    All ranks of `group` take part. Returns this rank's files, name -> {size, sha256}; rank 0 has the metadata too.
    Raises OSError, on all ranks where any can't write its part; on its own where its files can't be read back.
    """
    # One thread: with more, an error of a writing thread is lost.
    writer = dcp.FileSystemWriter(directory, thread_count=1, sync_files=False, overwrite=True)
    try:
        metadata = dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as e:  # a BaseException
        failed, failure = sorted(e.failures.items())[0]
        raise OSError(f"rank {failed}: {cause(failure[0])}") from None
    # Not by listing the directory: on NFS a listing can be a minute old, and what it lacks would go unverified.
    written = {where.relative_path for where in metadata.storage_data.values()}
    mine = {name for name in written if name.startswith(f"__{rank}_")} | ({".metadata"} if rank == 0 else set())
    table = {}
    try:
        for path in (directory / name for name in sorted(mine)):
            fsync(path)
            table[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    except OSError as e:
        raise OSError(f"rank {rank}: {cause(e)}") from None
    return table


def write_in_background(
    directory: Path, staged: dict[str, Tensor], rank: int, group: dist.ProcessGroup
) -> Future[dict[str, dict[str, Any]]]:
    """`write` in a thread, of tensors that nobody changes, over a group that nothing else uses meanwhile.

    torch's async_save starts its thread before other ranks are known to have their copy, and those that have would then
    wait for one that has not.
    """
    future: Future[dict[str, dict[str, Any]]] = Future()

    def work() -> None:
        try:
            future.set_result(write(directory, staged, rank, group))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=work, name="save", daemon=True).start()
    return future


def cause(e: BaseException) -> str:
    """One line for what stopped a writer."""
    if isinstance(e, OSError) and e.strerror:
        return e.strerror.lower() + (f": {e.filename}" if e.filename else "")
    if "inline_container" in str(e):  # torch.save's own words, which drown the disk's
        return "a write was cut short: no space left on the device, a used-up quota or a failing disk"
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__


def available_memory() -> int | None:
    """Bytes that can still be allocated on this host without swapping, within the limits of its control groups; None
    where the system doesn't tell."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup/memory")
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            here = root / path.lstrip("/")
            for directory in (here, *(p for p in here.parents if p.is_relative_to(root))):
                with contextlib.suppress(OSError, ValueError):  # the root has no limit, and "max" is none
                    limit, used = (int((directory / n).read_text()) for n in names[:2])
                    stat = dict(s.split() for s in (directory / "memory.stat").read_text().splitlines())
                    found.append(limit - used + int(stat.get(names[2], 0)))
    return max(0, min(found)) if found else None


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def well_formed(files: Any) -> bool:
    """True for step.json's table of files: plain name -> {size, sha256}, the metadata and a tensor file among them."""
    return (
        isinstance(files, dict)
        and ".metadata" in files
        and any(name.endswith(".distcp") for name in files)
        and all(
            Path(name).name == name
            and isinstance(entry, dict)
            and type(entry.get("size")) is int
            and isinstance(entry.get("sha256"), str)
            for name, entry in files.items()
        )
    )


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


def _enum_member(owner: Any, name: str) -> Any:
    """What getattr stands for in metadata: Python before 3.11.4 pickles a member of an enum as an attribute of it."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"an attribute {name!r} has no place in tensor metadata")


class _TensorMetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
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
