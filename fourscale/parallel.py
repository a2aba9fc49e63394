"""Processes and devices: the groups, the dtype of products, and DDP, FSDP or HSDP around the model."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import gc
import logging
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
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from fourscale import headloss, nodes, peers
from fourscale.budget import shard_size_of
from fourscale.cli import InputError, RunFailed, die_with_launcher, is_rank_zero
from fourscale.model import GPT, Block
from fourscale.order import key64

R = TypeVar("R")

PATIENT = datetime.timedelta(hours=2)  # a large checkpoint on a slow disk is no dead peer
FULL = (errno.ENOSPC, errno.EDQUOT)
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE_BLOCK = 4 << 20
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Topology:
    """Who this process is among the ranks, and where and in which dtype it computes."""

    rank: int
    world_size: int
    device: torch.device
    dtype: str  # fp32, bf16 or fp16, of matrix products
    parallel: str  # ddp, fsdp or hsdp
    shard_size: int  # ranks that share one copy: 1 under ddp, world_size under fsdp
    cpu_group: dist.ProcessGroup  # gloo, --timeout: the small message of each update
    publish_group: dist.ProcessGroup  # gloo, patient: what may take one rank long, as publishing does
    save_group: dist.ProcessGroup  # gloo, patient: of the thread that writes checkpoints
    watch: peers.Watch | None = None  # None in a world of one

    @property
    def main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The same autocast under DDP and FSDP, so that the residual stream has one dtype in both."""
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.dtype])

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
        dist.all_gather_object(out, value, group=self.publish_group)
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
                what = (e.strerror or str(e) or "a file could not be read or written").lower()
                way = "; make room and start again with --resume auto" if e.errno in FULL else ""
                box[1] = RunFailed(f"{e.filename or 'rank 0'}: {what}{way}")
        dist.broadcast_object_list(box, src=0, group=self.publish_group)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self.publish_group)


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
            error.speaks = True
            raise error
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("--device mps: not available in this torch; use --device cpu")
        if world > 1:
            raise InputError("--device mps: one process only; start without torchrun or use --device cpu")
    return torch.device(device)


def start(
    parallel: str = "ddp",
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "fp32",
    shard_size: int | None = None,
    timeout_s: float = 600,
    expect_world_size: int | None = None,
) -> Topology:
    """Join the process group that torchrun announces (or make one of a single process) and pick the device.

    timeout_s: seconds that a collective or a silent rank is waited for. Raises InputError for what this machine doesn't
    have, for sizes that don't fit, and for nodes that differ in code or torch, before a group is joined.
    """
    die_with_launcher()
    if timeout_s < 1:
        raise InputError(f"--timeout {timeout_s:g}: must be at least 1 second")
    several = "RANK" in os.environ and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    world = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    fault, shards, where = None, 1, torch.device("cpu")
    try:
        _check_world(world, expect_world_size)
        shards = shard_size_of(parallel, shard_size, world)
        where = pick_device(device, backend)
    except InputError as e:
        if not several:
            raise
        fault = e  # other nodes may be without it, and would wait
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
    timeout = datetime.timedelta(seconds=timeout_s)
    watch = None
    if "RANK" in os.environ:
        try:
            store, rank, world = next(rendezvous("env://", timeout=timeout))
            if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
                # torchrun --max-restarts keeps the store, and with it the addresses of the dead. Among several nodes
                # the count may differ: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt a store.
                store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            if several:
                nodes.meet(dist.PrefixStore("nodes", store), rank, fault, timeout_s)
            dist.init_process_group(kind, store=store, rank=rank, world_size=world, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as e:
            host = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            first = str(e).strip().splitlines()[0]
            raise RunFailed(f"process group: rank {os.environ['RANK']} could not join at {host}: {first}") from None
        if world > 1:
            watch = peers.Watch(store, rank, world, timeout_s)
    else:
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=where,
        dtype=dtype,
        parallel=parallel,
        shard_size=shards,
        cpu_group=dist.new_group(backend="gloo", timeout=timeout),
        publish_group=dist.new_group(backend="gloo", timeout=PATIENT),
        save_group=dist.new_group(backend="gloo", timeout=PATIENT),
        watch=watch,
    )


def _check_world(world: int, expected: int | None) -> None:
    if expected is not None and expected != world:
        hint = "start it with torchrun" if "RANK" not in os.environ else "look at --nnodes and --nproc_per_node"
        are = "is 1 rank" if world == 1 else f"are {world} ranks"
        raise InputError(f"--expect-world-size {expected}: there {are}; {hint}")


def stop(topology: Topology) -> None:
    """Leave the process group in an orderly way; call it after the last reference to a wrapped model is gone."""
    gc.collect()  # DDP's reducer and FSDP's hooks hold the group: destroyed under them it aborts now and then
    topology.barrier()
    if topology.watch is not None:
        topology.watch.stop()
    dist.destroy_process_group()


# ---- the model on many ranks ---------------------------------------------------------------------------------------


def compile_blocks(model: GPT, topology: Topology, local_bsz: int) -> tuple[bool, str]:
    """Compile what each block of `model` runs in training, in place, where all ranks can: (whether so, a line to say).

    One block of the model's shape is tried first, forward and backward, alone on each rank: a missing compiler or a
    graph break is met there, where no rank waits for another. Shapes are static, the same in every micro-batch, and
    evaluation stays uncompiled: nothing is compiled again during a run. Call it before `build`. Collective.
    """
    started = time.monotonic()
    torch.compiler.reset()  # of an earlier run in this process
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # advice on what blocks don't do
    fault = None
    try:
        _try_block(model, topology, local_bsz)
    except Exception as e:  # each of dynamo, inductor, the C++ compiler and Triton has exceptions of its own
        fault = (str(e).strip() or type(e).__name__).splitlines()[0]
    faults = [(rank, f) for rank, f in enumerate(topology.gather(fault)) if f]
    if faults:
        rank, first = faults[0]
        torch.compiler.reset()
        return False, f"note: --compile: not on rank {rank} ({first}); training goes on uncompiled"
    for block in model.blocks:
        block.train_forward = torch.compile(block.train_forward, dynamic=False)  # one graph for all blocks
    model.softmax_gradient = torch.compile(model.softmax_gradient, dynamic=False)
    return True, f"compiled a block in {time.monotonic() - started:.1f} s"


def _try_block(model: GPT, topology: Topology, local_bsz: int) -> None:
    """Compile and run one block of random weights on random input, forward and backward, and the loss of as many."""
    cfg, device = model.cfg, topology.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with torch.device(device):  # not around the call: what is compiled under it serves nowhere else
            block = Block(cfg, model.blocks[0].act_ckpt)
            x = torch.zeros(local_bsz, cfg.ctx, cfg.d_model, requires_grad=True)
            idx = torch.zeros(local_bsz, cfg.ctx, dtype=torch.int64)
        with topology.autocast():
            _, rope, mask = model.places(idx)
            torch.compile(block.train_forward, fullgraph=True, dynamic=False)(x, rope, mask).sum().backward()
            head = torch.zeros(cfg.padded_vocab, 1, device=device)
            compiled = torch.compile(model.softmax_gradient, dynamic=False)
            headloss.summed_loss(x[..., :1], head, idx, cfg.vocab_size, compiled)


def warm_up(model: nn.Module, topology: Topology, local_bsz: int, ctx: int) -> float:
    """Seconds that one forward and backward of the run's shapes took: afterwards all is compiled. Collective.

    Gradients are dropped and dropout is seeded anew for each micro-batch, so that training doesn't notice.
    """
    started = time.monotonic()
    idx = torch.zeros(local_bsz, ctx, dtype=torch.int64, device=topology.device)
    with topology.autocast():
        loss = model(idx, idx)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.monotonic() - started


def return_large_blocks(topology: Topology, residual_bytes: int) -> None:
    """On a CPU, let freed blocks go back to the system where the residual stream of a micro-batch takes twice
    LARGE_BLOCK or more. glibc keeps those of up to 32 MiB, full of holes: 1.2 of 5.6 GiB of GPT-2 124M at 4 x 1,024
    tokens. A smaller model would feel the time that new pages take."""
    if topology.device.type == "cpu" and sys.platform == "linux" and residual_bytes >= 2 * LARGE_BLOCK:
        with contextlib.suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def wrap(model: GPT, topology: Topology) -> nn.Module:
    """DDP, FSDP or HSDP around a GPT that may still be on the meta device (sharding replaces its parameters in place).

    Call it before weights are set for FSDP and HSDP, after that for DDP: see `build`.
    """
    if topology.parallel in ("fsdp", "hsdp"):
        sizes, names = (topology.world_size,), ("dp_shard",)
        if topology.parallel == "hsdp":
            # Ranks of a node are neighbours: the inner dimension shards, the outer one replicates.
            sizes, names = (topology.world_size // topology.shard_size, topology.shard_size), ("dp_replicate", *names)
        mesh = init_device_mesh(topology.device.type, sizes, mesh_dim_names=names)
        # Products take 16-bit weights off the wire; activations are autocast's business, as under DDP.
        policy = MixedPrecisionPolicy(
            param_dtype=AUTOCAST.get(topology.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        # The root holds embeddings, final norm and head; under DDP a lookup gives fp32, so these cross the wire in it.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if topology.world_size == 1:
        return model
    device_ids = [topology.device.index] if topology.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # DDP lays its buckets out anew after the first backward, and sums of more than two ranks round by their place in a
    # bucket: unless that is behind us, the first update after a resume differs from the one of a run not interrupted.
    token = torch.zeros(1, 1, dtype=torch.int64, device=topology.device)
    with torch.compiler.set_stance("force_eager"):
        wrapped(token, token).backward()
    model.zero_grad(set_to_none=True)
    return wrapped


def build(model: GPT, set_weights: Callable[[], None], topology: Topology) -> nn.Module:
    """From a model on the meta device to a wrapped one with weights: no rank ever holds what it doesn't keep."""
    if topology.parallel in ("fsdp", "hsdp"):
        wrapped = wrap(model, topology)
        model.to_empty(device=topology.device)
        set_weights()
        return wrapped
    model.to_empty(device=topology.device)
    set_weights()
    return wrap(model, topology)


@contextlib.contextmanager
def accumulate(model: nn.Module, last: bool, topology: Topology, grad_sync: str = "auto") -> Iterator[None]:
    """Around forward and backward of a micro-batch; `last` of the update. When gradients cross the ranks:

    | grad_sync | ddp        | fsdp            | hsdp                                                |
    |-----------|------------|-----------------|-----------------------------------------------------|
    | auto      | the last   | each            | each within a shard group, the last between groups  |
    | every     | each       | each            | each                                                |
    | last      | the last   | the last        | the last                                            |

    Until they do, ddp holds whole gradients in any case; `last` makes fsdp and hsdp hold them whole, in fp32.
    """
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if last or grad_sync == "every" else model.no_sync():
            yield
        return
    if topology.parallel in ("fsdp", "hsdp"):
        model.set_requires_gradient_sync(last or grad_sync != "last")
        if topology.parallel == "hsdp":
            model.set_requires_all_reduce(last or grad_sync == "every")
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

    A disk that refuses, memory that ends, or a collective that failed since another rank is gone or stuck: that rank's
    own message has the cause.
    """
    if isinstance(e, OSError) and e.strerror:
        failed = RunFailed(f"rank {topology.rank}: {e.filename or topology.device}: {e.strerror.lower()}")
    elif isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e):  # of a GPU, of a CPU
        failed = RunFailed(
            f"rank {topology.rank} on {host_name()}: out of memory ({str(e).strip().splitlines()[0]}); lower "
            "--local-bsz (a resume makes more micro-batches of the same update), use --act-ckpt block or --parallel "
            "fsdp, and go on with --resume auto"
        )
    elif isinstance(e, dist.DistError) or any(words in str(e) for words in _LOST):
        if topology.watch is None:
            return e
        failed = RunFailed(f"rank {topology.rank}: {topology.watch.account()}")
        failed.speaks = topology.watch.speaks()
        return failed
    else:
        return e
    failed.speaks = True
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
