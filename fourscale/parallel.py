"""Processes and devices: the group, the dtype of products, and DDP or FSDP around the model."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fourscale.cli import InputError, RunFailed, is_rank_zero
from fourscale.order import key64

R = TypeVar("R")

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
PUBLISH_TIMEOUT = datetime.timedelta(hours=2)  # a large checkpoint on a slow disk is no dead peer


@dataclass(frozen=True)
class Topology:
    """Who this process is among the ranks, and where and in which dtype it computes."""

    rank: int
    world_size: int
    device: torch.device
    dtype: str  # fp32 or bf16, of matrix products
    parallel: str  # ddp or fsdp
    cpu_group: dist.ProcessGroup  # gloo, for small control messages and for publishing

    @property
    def main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The same autocast under DDP and FSDP, so that the residual stream has one dtype in both."""
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum over ranks, float64, on the CPU group."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.cpu_group)
        return total.tolist()

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Sum a tensor on the training device over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in order of rank. Plain data only."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.cpu_group)
        return out

    def from_main(self, fn: Callable[[], R]) -> R:
        """Run `fn` on rank 0 alone and hand its (plain) result to all.

        Its InputError or RunFailed is raised on all ranks; so is an OSError, as RunFailed.
        """
        box: list[Any] = [None, None]
        if self.main:
            try:
                box[0] = fn()
            except (InputError, RunFailed) as e:
                box[1] = e
            except OSError as e:
                box[1] = RunFailed(f"{e.filename or fn.__name__}: {(e.strerror or str(e)).lower()}")
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self.cpu_group)


def _die_with_parent() -> None:
    """On Linux, ask for SIGKILL when torchrun dies: a killed launcher must not leave ranks training."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # a libc without prctl
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def pick_device(device: str, backend: str) -> torch.device:
    """The device of this rank from --device and --backend. Raises InputError for what this machine doesn't have."""
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "auto":
        if backend == "gloo":
            device = "cpu"
        elif torch.cuda.is_available():
            device = "cuda"
        else:
            device = "mps" if world == 1 and torch.backends.mps.is_available() else "cpu"
    if backend == "nccl" and device != "cuda":
        why = "needs --device cuda" if device != "auto" and torch.cuda.is_available() else "no CUDA device is visible"
        raise InputError(f"--backend nccl: {why}; use --backend gloo to train on the CPU")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise InputError("--device cuda: no CUDA device is visible; use --device cpu")
        if local_rank >= (n := torch.cuda.device_count()):
            error = InputError(
                f"--nproc_per_node: rank {local_rank} of this node has no GPU, {n} visible; start {n} a node"
            )
            error.all_ranks = True
            raise error
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("--device mps: not available in this torch; use --device cpu")
        if world > 1:
            raise InputError("--device mps: one process only; start without torchrun or use --device cpu")
    return torch.device(device)


def start(parallel: str = "ddp", backend: str = "auto", device: str = "auto", dtype: str = "fp32") -> Topology:
    """Join the process group that torchrun announces (or make one of a single process) and pick the device."""
    _die_with_parent()
    where = pick_device(device, backend)
    if dtype == "auto":
        dtype = "bf16" if where.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if (
        where.type == "cpu"
        and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1
        and os.environ.get("OMP_NUM_THREADS") == "1"
    ):
        # torchrun gives each rank one thread; the cores are there to be shared out.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    kind = "cpu:gloo,cuda:nccl" if where.type == "cuda" and backend != "gloo" else "gloo"
    if "RANK" in os.environ:
        try:
            dist.init_process_group(kind, timeout=COLLECTIVE_TIMEOUT)
        except (dist.DistError, RuntimeError, ValueError) as e:
            host = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            first = str(e).strip().splitlines()[0]
            raise RunFailed(f"process group: rank {os.environ['RANK']} could not join at {host}: {first}") from None
    else:
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=where,
        dtype=dtype,
        parallel=parallel,
        cpu_group=dist.new_group(backend="gloo", timeout=PUBLISH_TIMEOUT),
    )


def stop(topology: Topology) -> None:
    """Leave the process group in an orderly way; call it after the last reference to a wrapped model is gone."""
    gc.collect()  # DDP's reducer and FSDP's hooks hold the group: destroyed under them it aborts now and then
    topology.barrier()
    dist.destroy_process_group()


def wrap(model: nn.Module, topology: Topology, compile_blocks: bool = False) -> nn.Module:
    """DDP or FSDP around a GPT that may still be on the meta device (FSDP shards its parameters in place).

    Call it before weights are set for FSDP, after that for DDP: see `build`.
    """
    if compile_blocks:
        for block in model.blocks:
            block.compile()  # one graph for all blocks, and no `_orig_mod` in the names
    if topology.parallel == "fsdp":
        mesh = init_device_mesh(topology.device.type, (topology.world_size,))
        # Products take bf16 weights off the wire; activations are autocast's business, as under DDP.
        wire = torch.bfloat16 if topology.dtype == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=wire, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)  # the root holds embeddings, final norm and head
    if topology.world_size == 1:
        return model
    device_ids = [topology.device.index] if topology.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def build(
    model: nn.Module, set_weights: Callable[[], None], topology: Topology, compile_blocks: bool = False
) -> nn.Module:
    """From a model on the meta device to a wrapped one with weights: no rank ever holds what it doesn't keep."""
    if topology.parallel == "fsdp":
        wrapped = wrap(model, topology, compile_blocks)
        model.to_empty(device=topology.device)
        set_weights()
        return wrapped
    model.to_empty(device=topology.device)
    set_weights()
    return wrap(model, topology, compile_blocks)


@contextlib.contextmanager
def accumulate(model: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch: DDP exchanges gradients only in the last one of an update.

    FSDP reduce-scatters in each, since keeping whole gradients would take back the memory that sharding saves.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Global L2 norm of the gradients before clipping (fp32 scalar, equal on all ranks); clips if max_norm > 0."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "NCCL",
)


def explained(topology: Topology, e: RuntimeError | OSError) -> Exception:
    """One line for what a run can meet on its way, told by the rank that met it; `e` itself where it is a bug.

    A disk that refuses, or a collective that failed since another rank is gone or stuck: that rank's own message has
    the cause.
    """
    if isinstance(e, OSError) and e.strerror:
        failed = RunFailed(f"rank {topology.rank}: {e.filename or topology.device}: {e.strerror.lower()}")
    elif isinstance(e, dist.DistError) or any(words in str(e) for words in _LOST):
        first = str(e).strip().splitlines()[0]
        failed = RunFailed(f"rank {topology.rank}: another rank is gone or stuck, see its own message ({first})")
    else:
        return e
    failed.all_ranks = True
    return failed


def seed_dropout(topology: Topology, seed: int, update: int, micro: int) -> None:
    """Seed torch for one micro-batch of this rank: dropout then needs no generator state in a checkpoint."""
    torch.manual_seed(int(key64(seed, update, micro, topology.rank) >> 1))


def device_name(device: torch.device) -> str:
    """'NVIDIA H100 80GB HBM3', or the device's type where there is no better name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_name() -> str:
    return socket.gethostname()


# ---- being asked to stop --------------------------------------------------------------------------------------------


class StopRequest:
    """Set by SIGTERM, SIGINT or SIGUSR1 on this rank; the loop lets all ranks agree on the update to stop at."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.first = 0.0
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # One Ctrl-C arrives twice under torchrun, from the terminal and passed on; a second one by hand comes later.
        if self.name is not None and number == signal.SIGINT and time.monotonic() - self.first > 1:
            os._exit(130)
        if self.name is None:
            self.name, self.first = signal.Signals(number).name, time.monotonic()
            if is_rank_zero():  # not print: the signal may have come in the middle of one
                os.write(2, f"{self.name}: saving and stopping after this update\n".encode())
