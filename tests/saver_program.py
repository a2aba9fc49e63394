"""Ranks that save, without a training loop: test_publish.py and test_checkpoint.py start it, plain or by torchrun.

    saver_program.py CASE DIRECTORY [JSON OPTIONS]

A case is a function below. What it prints as `result: JSON` on rank 0 is what the test looks at.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fourscale import checkpoint, lock, optim, parallel, publish, saving
from fourscale.cli import InputError, door
from fourscale.config import ModelConfig
from fourscale.model import GPT
from fourscale.parallel import Topology
from fourscale.rundir import digest, open_checkpoint, step_dirs

CONFIG = {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 128, "ctx": 16, "vocab_size": 65}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(CONFIG | changes))


def run_table(cfg: ModelConfig) -> dict[str, Any]:
    """A run.json that a checkpoint can be opened with."""
    training = {"updates": 100, "token_budget": 100, "global_bsz": 1, "warmup": 0, "lr": 1e-3, "min_lr": 0.0}
    training |= {"schedule": "cosine", "optimizer": "adamw", "dtype": "fp32", "sampling": "epoch"}
    training |= {"seed": 0, "data_seed": 0, "eval_tokens": 0}
    attempt = {"attempt": "0badcafe", "from_update": 0, "world_size": 1, "local_bsz": 1, "grad_accum": 1}
    attempt |= {"device": "cpu", "compile": False}
    table = {"format": 1, "tokenizer": None, "data": {"train_digest": "", "val_digest": ""}, "config": {}}
    return table | {"model": dataclasses.asdict(cfg), "training": training, "attempts": [attempt]}


def state(topology: Topology, seed: int, cfg: ModelConfig | None = None) -> dict[str, Tensor]:
    """Weights and optimizer state that follow from the seed, however they are sharded."""
    with torch.device("meta"):
        model = GPT(cfg or config())
    wrapped = parallel.build(model, lambda: model.init_weights(seed), topology)
    optimizers = optim.build(model, "adamw", 0.1, 0.9, 0.95)
    tensors = checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizers)
    fill(tensors, seed)
    state.alive = wrapped  # the hooks of DDP and FSDP live as long as the tensors
    return tensors


def fill(tensors: dict[str, Tensor], seed: int) -> None:
    """Overwrite the tensors, in place, with numbers that follow from names and seed."""
    for i, t in enumerate(tensors.values()):
        full = torch.randn(t.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
        if isinstance(t, DTensor):
            t.to_local().copy_(distribute_tensor(full, t.device_mesh, t.placements, src_data_rank=None).to_local())
        else:
            t.copy_(full)


def few() -> dict[str, Tensor]:
    return {f"model.{name}": torch.zeros(5, 3) for name in "abc"}


def opened(path: Path, topology: Topology, **saver: Any) -> tuple[publish.RunDir, saving.Saver]:
    run_dir = publish.RunDir(path, topology)
    table = run_table(config())
    table["attempts"][0]["attempt"] = run_dir.attempt
    run_dir.write_contract(table, None)
    options = {"keep": None, "keep_every": None, "async_ckpt": "off", "max_failures": 2} | saver
    return run_dir, saving.Saver(run_dir, **options)


def shards(topology: Topology, kind: str) -> Topology:
    size = {"ddp": 1, "fsdp": topology.world_size, "hsdp": max(1, topology.world_size // 2)}[kind]
    return dataclasses.replace(topology, parallel=kind, shard_size=size)


def tell(topology: Topology, result: Any) -> None:
    if topology.main:
        print("result:", json.dumps(result), flush=True)


# ---- cases -----------------------------------------------------------------------------------------------------------


def modes(path: Path, topology: Topology, kinds: list[str], modes: list[str]) -> None:
    """DIR/KIND-MODE: two saves in a row; what is overwritten after `begin` returns belongs to the second."""
    out = {}
    for kind in kinds:
        t = shards(topology, kind)
        tensors = state(t, seed=1)
        mine = checkpoint.share(tensors, t.rank, t.world_size)
        sizes = t.gather((checkpoint.local_bytes(mine), checkpoint.local_bytes(tensors)))
        for mode in modes:
            run_dir, saver = opened(path / f"{kind}-{mode}", t, async_ckpt=mode)
            assert saver.check_space(tensors) == []
            fill(tensors, 1)
            saver.begin(tensors, {"update": 1, "tokens": 10, "samples_seen": 1, "skipped": 0, "val_loss": 2.5})
            assert saver.in_flight == (mode == "on")
            fill(tensors, 2)  # training goes on
            saver.begin(tensors, {"update": 2, "tokens": 20, "samples_seen": 2, "skipped": 0, "val_loss": 3.5})
            fill(tensors, 3)
            while saver.in_flight and not saver.ready:
                time.sleep(0.01)
            saver.finish(final=True)
            assert not saver.in_flight and not saver.ready
            assert saver.saved == 2 and saver.best == (1, 2.5)
            saver.begin(tensors, {"update": 2})  # published already: left alone
            saver.finish(final=True)
            run_dir.close()
            if t.main:
                out[f"{kind}-{mode}"] = [digest(open_checkpoint(p)) for p in step_dirs(run_dir.path)]
        out[f"{kind} bytes"] = sizes
    tell(topology, out)


def load(path: Path, topology: Topology, sources: list[str], kinds: list[str]) -> None:
    """The second checkpoint of each of `sources`, loaded as each kind, is the state that its seed gives."""
    for kind in kinds:
        t = shards(topology, kind)
        tensors = state(t, seed=2)
        expected = {name: x.clone() for name, x in tensors.items()}
        for source in sources:
            fill(tensors, 9)
            ckpt = open_checkpoint(path / source / "step_2")
            assert checkpoint.damage(ckpt.dir, ckpt.step["files"]) is None
            checkpoint.load(ckpt.dir, tensors, t.publish_group)
            for name, x in tensors.items():
                a, b = (y.to_local() if isinstance(y, DTensor) else y for y in (x, expected[name]))
                assert torch.equal(a, b), (source, kind, name)
    tell(topology, "equal")


def failing_rank(path: Path, topology: Topology, rank: int, async_ckpt: str, where: str) -> None:
    """Three saves; in the second, `rank` fails at `where`. Then one whose failure ends the run."""
    saver = opened(path, topology, async_ckpt=async_ckpt, max_failures=1)[1]
    tensors = state(topology, 1)
    module, name = {"write": (torch, "save"), "hash": (checkpoint, "sha256_of"), "stage": (saver._stager, "stage")}[
        where
    ]
    real = getattr(module, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory") if where == "stage" else OSError(28, "No space left on device", "a file")

    for update in (1, 2, 3, 4, 5):
        if topology.rank == rank and update in (2, 4, 5):
            setattr(module, name, fails)
        try:
            saver.begin(tensors, {"update": update, "val_loss": None})
            saver.finish()
        finally:
            setattr(module, name, real)
        if topology.main:
            print(update, saver.saved, sorted(p.name for p in path.glob("step_*")), flush=True)


def full_disk(path: Path, topology: Topology, async_ckpt: str) -> None:
    """Save on a small disk until it is full, make room, go on, and fill it again until the run ends."""
    saver = opened(path, topology, async_ckpt=async_ckpt, max_failures=1)[1]
    tensors, update = state(topology, 1), 0
    notes = saver.check_space(tensors)
    for _ in range(2):
        while saver._failures == 0:
            update += 1
            saver.begin(tensors, {"update": update, "tokens": 1, "samples_seen": 1, "skipped": 0, "val_loss": None})
            saver.finish()
        topology.barrier()
        steps = step_dirs(path)
        assert len(steps) == 2 and not list(path.glob("*.tmp-*")), list(path.iterdir())
        for step in map(open_checkpoint, steps):
            assert checkpoint.damage(step.dir, step.step["files"]) is None
        topology.barrier()
        topology.from_main(lambda steps=steps: shutil.rmtree(steps[0]))  # somebody makes room
        update += 1
        saver.begin(tensors, {"update": update, "tokens": 1, "samples_seen": 1, "skipped": 0, "val_loss": None})
        saver.finish()
        assert saver.saved == update
    tell(topology, {"notes": notes, "events": [json.loads(x) for x in (path / "events.jsonl").open()]})
    for _ in range(3):
        update += 1
        saver.begin(tensors, {"update": update, "val_loss": None})
        saver.finish()


def vanishing(path: Path, topology: Topology) -> None:
    """The directory is away during the second save and back for the third."""
    _, saver = opened(path, topology, async_ckpt="on")
    tensors = state(topology, 1)
    away = path.with_name("away")
    for update in (1, 2, 3):
        if update == 2:
            topology.from_main(lambda: os.rename(path, away))
        saver.begin(tensors, {"update": update, "val_loss": None})
        saver.finish()
        if update == 2:
            topology.from_main(lambda: os.rename(away, path))
    tell(topology, sorted(p.name for p in path.glob("step_*")))


def unshared(path: Path, topology: Topology) -> None:
    publish.SHARED_WAIT_S = 1
    publish.RunDir(path / f"node{topology.rank}", topology)


def damaged(path: Path, topology: Topology, step: int | None) -> None:
    """Two ranks resume; each says what it got."""
    try:
        found = publish.RunDir(path, topology).resume_point("auto", step)
        sys.stdout.write(f"{topology.rank} resumes from {found.dir.name}\n")
    except InputError as e:
        sys.stdout.write(f"{topology.rank} refused {e}\n")
        time.sleep(1)
        raise


def hold(path: Path, topology: Topology, update: int, stop: str = "", seconds: float = 60) -> None:
    """A writer that publishes one checkpoint and lives on, writing an event each 0.2 s.

    `stop`: it stops itself before the next save, or while that is in flight.
    """
    lock.BEAT_S, lock.HOLDER_SILENT_S, lock.TAKE_OVER_S = 0.5, 2.0, 3.0
    run_dir, saver = opened(path, topology, async_ckpt="on")
    saver.begin(state(topology, update), {"update": update, "val_loss": None})
    saver.finish()
    if stop == "in flight":
        saver.begin(state(topology, update), {"update": update + 100, "val_loss": None})
    print("ready", os.getpid(), flush=True)
    if stop:
        os.kill(os.getpid(), signal.SIGSTOP)
        saver.begin(state(topology, update), {"update": update + 100, "val_loss": None})
        saver.finish()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        run_dir.event("alive")
        time.sleep(0.2)
    run_dir.close()


def killed(path: Path, topology: None, async_ckpt: str, every: int) -> None:
    """Die at each `every`-th file operation of a run that saves thrice and keeps one: what is left must be sound.

    A fork is a run: the parent has imported all and started nothing.
    """
    import torch._dynamo  # noqa: F401 (once, not in each child)

    lock.BEAT_S = 1000.0
    k, found = 0, []
    while True:
        k += every
        work = path / f"{async_ckpt}{k}"
        if died := _forked(lambda work=work, k=k: _dying_run(work, async_ckpt, k)):
            assert died == -signal.SIGKILL, died
        names = sorted(p.name for p in work.iterdir()) if work.is_dir() else []
        found.append(names)
        assert _forked(lambda work=work: _inspect(work, async_ckpt)) == 0, (k, names)
        if not died:
            break
    left = sum(any(".tmp-" in n for n in names) for names in found)
    print("result:", json.dumps({"operations": k, "with leftovers": left}), flush=True)


def _forked(work: Any) -> int:
    """The exit code of a child that does `work`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _dying_run(work: Path, async_ckpt: str, k: int) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    topology = parallel.start(device="cpu")
    tensors = few()
    count = 0

    def operation(what: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        writes = what == "open" and isinstance(args[1], str) and args[1] not in ("r", "rb")
        if (writes or what in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")) and str(work) in str(args[0]):
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)

    real = os.fsync

    def fsync(fd: int) -> None:
        operation("os.mkdir", (str(work),))
        real(fd)

    os.fsync = fsync
    sys.addaudithook(operation)
    run_dir, saver = opened(work, topology, async_ckpt=async_ckpt, keep=1)
    for update, loss in ((1, 3.0), (2, 4.0), (3, 2.0)):
        fill(tensors, update)
        saver.begin(tensors, {"update": update, "tokens": 1, "samples_seen": 1, "skipped": 0, "val_loss": loss})
        saver.finish(final=True)
    run_dir.close()


def _inspect(work: Path, async_ckpt: str) -> None:
    """Every complete checkpoint is whole and right, and a next run needs nobody to clean up."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    topology = parallel.start(device="cpu")
    tensors = few()
    before = [p.name for p in step_dirs(work)]
    assert before in ([], ["step_1"], ["step_1", "step_2"], ["step_1", "step_2", "step_3"], ["step_3"]) or before in (
        ["step_1", "step_3"],
        ["step_2", "step_3"],
    ), before
    for name in before:
        ckpt = open_checkpoint(work / name)
        assert checkpoint.damage(ckpt.dir, ckpt.step["files"]) is None
        checkpoint.load(ckpt.dir, tensors, topology.publish_group)
        expected = {n: t.clone() for n, t in tensors.items()}
        fill(tensors, int(name[5:]))
        assert all(torch.equal(tensors[n], expected[n]) for n in tensors)
    run_dir = publish.RunDir(work, topology)
    run_dir.resume_point("auto")
    run_dir.write_contract(run_table(config()), None)
    saver = saving.Saver(run_dir, 1, None, async_ckpt, 0)
    assert saver.saved == (int(before[-1][5:]) if before else None)
    saver.begin(tensors, {"update": 4, "tokens": 1, "samples_seen": 1, "skipped": 0, "val_loss": 9.0})
    saver.finish(final=True)
    run_dir.close()
    names = {p.name for p in work.iterdir()}
    best = (work / "best").read_text().strip()
    kept = {p.name for p in step_dirs(work)}
    assert kept == {"step_4", best} and (work / "latest").read_text() == "step_4\n", names
    losses = {"step_1": 3.0, "step_2": 4.0, "step_3": 2.0, "step_4": 9.0}
    assert best == min([*before, "step_4"], key=losses.get), (before, best)
    assert names <= {".lock", "run.json", "latest", "best", "events.jsonl", *kept}, names


@door
def main() -> None:
    case, path = sys.argv[1], Path(sys.argv[2])
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    if case == "killed":
        return killed(path, None, **options)
    topology = parallel.start(device="cpu")
    globals()[case](path, topology, **options)
    state.alive = None
    parallel.stop(topology)


if __name__ == "__main__":
    main()
