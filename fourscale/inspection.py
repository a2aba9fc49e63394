"""What can be seen of a run before its first update: its data, one batch, and the model that it begins with.

Functions return findings, ("pass" | "FAIL" | "note", name, text), and are collective.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourscale import budget, checkpoint, corpus, optim, origins, parallel, schedule, trials
from fourscale.cli import InputError
from fourscale.config import TrainConfig
from fourscale.corpus import Corpus
from fourscale.model import GPT, IGNORE
from fourscale.order import Mixture, supervised, update_rows
from fourscale.parallel import Topology
from fourscale.pretrained import Pretrained
from fourscale.rundir import Checkpoint
from fourscale.shards import SPLITS
from fourscale.steps import Finding, size_text

R = TypeVar("R")

HASHED = 128 << 20  # bytes of shards that are hashed, the smallest first: under a second
SAMPLED = 64  # windows from all over the run, whose ids are looked at
ROUND_TRIP_IDS, SAME_IDS = 512, 0.95  # as check.py data has them
COLUMNS = 12  # tokens of a window that are shown
PROBE = 512  # tokens of the window that shows what a token sees
FIT_TOKENS = 32  # of a rank's tiny batch
FIT_UPDATES, FIT_S, FIT_LEAST = 120, 10.0, 10  # at most so many, or as many as fit into the seconds, but no fewer
FITTED = 0.25  # of the first loss: below it a batch is fitted
LEARNT = 0.05  # nats: a fall by less says nothing, and a loss below it leaves nothing to learn
LEAK = 1e-4  # of a logit, by a token that it must not depend on
EQUAL_LOSS = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}  # nats a token, between two ways to compute one loss


def agreed(topology: Topology, fn: Callable[[], R]) -> R:
    """What `fn`, which is not collective, returns on this rank; an InputError that any rank meets is raised on all."""
    result, fault = None, None
    try:
        result = fn()
    except InputError as e:
        fault = str(e)
    faults = topology.gather(fault)
    if met := [rank for rank, f in enumerate(faults) if f]:
        where = "" if len(met) == topology.world_size else f" (rank {met[0]})"
        raise InputError(f"{faults[met[0]]}{where}")
    return result


def verdict(name: str, problem: str | None, passed: str) -> Finding:
    return ("pass", name, passed) if problem is None else ("FAIL", name, problem)


@dataclass(frozen=True)
class Setting:
    """A run before its first update, as a rank sees it."""

    topology: Topology
    data: Corpus
    plan: budget.Plan
    order: Mixture
    before: Checkpoint | None  # what it goes on from or branches from
    source: Pretrained | None  # of --init-from

    @property
    def begun(self) -> int:
        """Updates made before."""
        return self.plan.origin.update

    def of_windows(self, global_bsz: int) -> Setting:
        """The same run with another batch, as long in updates."""
        plan, windows = self.plan, dataclasses.replace(self.plan.cfg, global_bsz=global_bsz, grad_accum=None)
        rows = self.topology.world_size * windows.local_bsz
        cfg = dataclasses.replace(windows, grad_accum=-(-global_bsz // rows))
        per_update = global_bsz * cfg.model.ctx
        budget = plan.origin.tokens + (plan.updates - plan.origin.update) * per_update
        return dataclasses.replace(
            self, plan=dataclasses.replace(plan, cfg=cfg, tokens_per_update=per_update, token_budget=budget)
        )

    def tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's windows of update i (zero-based), int64 [A, B, ctx + 1], and how many targets of each count."""
        cfg, topology = self.plan.cfg, self.topology
        rows = update_rows(cfg.global_bsz, topology.world_size, topology.rank, cfg.local_bsz, cfg.grad_accum)
        lengths = supervised(rows, self.plan.token_budget - self.plan.tokens(i), cfg.model.ctx, cfg.global_bsz)
        parts, starts = self.order.starts(self.plan.samples(i) + rows.ravel() % cfg.global_bsz)
        windows = self.data.windows(parts, starts, cfg.model.ctx + 1)
        return windows.reshape(*rows.shape, -1), lengths

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of update i for this rank, int64 [A, B, ctx] each: target t is token t + 1 of a window."""
        windows, lengths = self.tokens(i)
        targets = np.where(np.arange(windows.shape[-1] - 1) < lengths[..., None], windows[..., 1:], IGNORE)
        return torch.from_numpy(windows[..., :-1]).contiguous(), torch.from_numpy(targets)


def setting(flags: TrainConfig, topology: Topology) -> Setting:
    """Open what a run of these flags would begin from. Raises InputError as the run would."""
    start = trials.start_of(flags, topology)
    if start is not None:
        flags = dataclasses.replace(flags, branch_from=start, init_from=None)
    before, source = origins.branch_point(flags, topology), origins.start_point(flags, topology)
    resumed = before is not None and before.run_dir == flags.ckpt_dir.resolve()
    data = agreed(topology, lambda: corpus.of_flags(flags, before.run if resumed else None))
    origin = origins.origin_of(None, before)
    world, device, dtype = topology.world_size, topology.device.type, topology.dtype
    plan = budget.plan(flags, data.vocab_size, world, device, dtype, data.eot_id, origin)
    cfg = plan.cfg
    schedule.check_schedule(plan.updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
    return Setting(topology, data, plan, data.order(cfg.model.ctx, cfg.data_seed, cfg.sampling), before, source)


# ---- data ------------------------------------------------------------------------------------------------------------


def shards(run: Setting) -> list[Finding]:
    """Sizes (which opening has compared with the manifest) and the hashes of the smallest shards, on each node."""
    out: list[Finding] = []
    for part in run.data.parts:
        sizes = ", ".join(
            f"{split} {s.total:,} tokens in {len(s.shards)} shard{'' if len(s.shards) == 1 else 's'}"
            for split, s in zip(SPLITS, (part.train, part.val), strict=True)
        )
        known = "sizes are as the manifest has them" if part.manifest else "no manifest to compare them with"
        out.append(("pass" if part.manifest else "note", "shards", f"{part.name}: {sizes}; {known}"))
    listed = []
    for part in run.data.parts:
        for split, stream in zip(SPLITS, (part.train, part.val), strict=True):
            entries = part.manifest["splits"][split]["shards"] if part.manifest else []
            for shard, entry in zip(stream.shards, entries, strict=bool(entries)):
                listed.append((shard.tokens * stream.dtype.itemsize, shard.path, entry["sha256"]))
    listed.sort()
    size = read = 0
    fault = None
    for more, path, expected in listed:
        if size + more > HASHED:
            break
        size, read = size + more, read + 1
        try:
            if int(os.environ.get("LOCAL_RANK", "0")) == 0 and checkpoint.sha256_of(path) != expected:
                fault = f"{path}: its content has changed since it was written (sha256); restore it, or prepare it anew"
        except OSError as e:
            fault = f"{path}: {(e.strerror or str(e)).lower()}; restore it"
    if faults := [f for f in run.topology.gather(fault) if f]:
        return [*out, ("FAIL", "hashes", faults[0])]
    if listed:
        left = "" if read == len(listed) else "; the others are left out here: --verify-data first, or check.py data"
        status = "pass" if read else "note"
        out.append((status, "hashes", f"{read} of {len(listed)} shards ({size_text(size)}) have their sha256{left}"))
    return out


def masks(run: Setting) -> list[Finding]:
    """How many targets the first and the last update supervise, over all ranks, against the plan's arithmetic."""
    plan, cfg = run.plan, run.plan.cfg
    problems, told = [], []
    for name, i in (("first", run.begun), ("last", plan.updates - 1)):
        _, targets = agreed(run.topology, lambda i=i: run.batch(i))
        supervised_here, rows = int((targets != IGNORE).sum()), targets.shape[0] * targets.shape[1]
        count, rows = (int(n) for n in run.topology.all_sum([supervised_here, rows]))
        expected = plan.tokens(i + 1) - plan.tokens(i)
        told.append(f"{name} update {count:,} of {rows * cfg.model.ctx:,} targets")
        if count != expected:
            problems.append(
                f"the {name} update supervises {count:,} targets, by the plan {expected:,}; a bug: report it"
            )
    padding = rows - cfg.global_bsz
    told.append(f"{padding} rows of an update are padding" if padding else "no padding rows")
    return [verdict("masks", problems[0] if problems else None, ", ".join(told))]


def ids(run: Setting) -> list[Finding]:
    """Ids of windows from all over the run; one outside the vocabulary is named with its shard and place."""
    first, end = run.plan.samples(run.begun), run.plan.samples(run.plan.updates)
    at = np.unique(np.linspace(first, end - 1, SAMPLED).astype(np.int64))
    windows = agreed(run.topology, lambda: run.data.windows(*run.order.starts(at), run.plan.cfg.model.ctx + 1))
    first_ids, _ = agreed(run.topology, lambda: run.tokens(run.begun))
    low, high = min(windows.min(), first_ids.min()), max(windows.max(), first_ids.max())
    distinct = len(np.unique(windows))
    out: list[Finding] = [
        ("pass", "ids", f"{low} .. {high:,} in {len(windows)} windows, below the vocabulary of {run.data.vocab_size:,}")
    ]
    if distinct == 1:
        out.append(
            ("FAIL", "ids", f"all ids of {len(windows)} windows are {low}: constant data; check.py data finds out")
        )
    return out


def text(run: Setting) -> list[Finding]:
    """A window of the first update as text, inputs above targets; and whether text comes back through the tokenizer."""
    windows, _ = agreed(run.topology, lambda: run.tokens(run.begun))
    inputs, targets = agreed(run.topology, lambda: run.batch(run.begun))
    tokenizer = run.data.tokenizer
    n = min(COLUMNS, inputs.shape[-1])
    starts = range(0, inputs.shape[-1] - n + 1, n)
    at = max(starts, key=lambda k: len(inputs[0, 0, k : k + n].unique()))  # spaces show no shift
    upper, lower = inputs[0, 0, at : at + n].tolist(), targets[0, 0, at : at + n].tolist()

    def piece(i: int) -> str:
        return "-" if i == IGNORE else str(i) if tokenizer is None else repr(tokenizer.decode([i]))

    def line(of: list[int]) -> str:
        return " ".join(
            piece(i).rjust(max(len(piece(a)), len(piece(b)))) for i, a, b in zip(of, upper, lower, strict=True)
        )

    where = f"update {run.begun + 1}, first window, tokens {at:,} .. {at + n - 1:,} of {inputs.shape[-1]:,}"
    out: list[Finding] = [
        ("note", "batch", where + ("" if tokenizer else "; ids, since the data name no tokenizer")),
        ("note", "inputs", line(upper)),
        ("note", "targets", line(lower)),
    ]
    if tokenizer is None:
        return [*out, ("note", "tokenizer", "none, so no text to read; --tokenizer names the one that made the ids")]
    out.append(("note", "text", repr(tokenizer.decode(windows[0, 0, :160]))))
    problems, same, total = _round_trip(windows.reshape(-1, windows.shape[-1])[:4, :ROUND_TRIP_IDS], tokenizer)
    if not problems and same < SAME_IDS * total:
        problems = [
            f"only {same / total:.1%} of the ids come back when their text is encoded again; another tokenizer than "
            f"this one ({tokenizer.kind}) made them: name that one"
        ]
    passed = f"{tokenizer.kind}: text decodes, encodes and decodes to itself, {same:,} of {total:,} ids come back"
    return [*out, verdict("tokenizer", problems[0] if problems else None, passed)]


def _round_trip(windows: np.ndarray, tokenizer: Any) -> tuple[list[str], int, int]:
    """(problems, ids that come back, ids) of windows [N, T]. End-of-text is left out, which no text encodes to."""
    problems, same, total = [], 0, 0
    for window in windows:
        ends = np.flatnonzero(window == tokenizer.eot_id)
        try:
            for piece in np.split(window, np.unique(np.concatenate([ends, ends + 1]))):
                if len(piece) == 0 or piece[0] == tokenizer.eot_id:
                    continue
                decoded = tokenizer.decode(piece)
                again = tokenizer.encode(decoded)
                if tokenizer.decode(again) != decoded:
                    raise InputError("decoded, encoded and decoded again is other text: prepare the data anew")
                same += (Counter(piece.tolist()) & Counter(again)).total()
                total += len(piece)
        except InputError as e:
            problems.append(str(e))
    return problems, same, max(total, 1)


# ---- the model -------------------------------------------------------------------------------------------------------


class Probe:
    """The run's model with its first weights, and an optimizer, on all ranks."""

    def __init__(self, run: Setting) -> None:
        self.run, self.cfg, self.topology = run, run.plan.cfg, run.topology
        with torch.device("meta"):
            self.raw = GPT(self.cfg.model, self.cfg.act_ckpt)
        self.model: nn.Module = parallel.build(self.raw, self._set_weights, self.topology)
        if run.before is not None:
            checkpoint.load(run.before.dir, checkpoint.model_tensors(self.raw), self.topology.publish_group)
        cfg = self.cfg
        self.optimizers = optim.build(self.raw, cfg.optimizer, cfg.weight_decay, cfg.beta1, cfg.beta2, cfg.muon_dtype)
        self.model.train(cfg.model.dropout == 0)  # its noise would hide what is looked for

    def _set_weights(self) -> None:
        if self.run.source is None:
            return self.raw.init_weights(self.cfg.seed)
        self.run.source.fill(dict(self.raw.named_parameters()), self.topology.publish_group)

    @torch.no_grad()
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """As GPT.forward, without gradients, under the run's autocast."""
        was_training = self.model.training
        self.model.eval()
        with self.topology.autocast():
            device = self.topology.device
            out = self.model(idx.to(device), None if targets is None else targets.to(device))
        self.model.train(was_training)
        if hasattr(self.model, "reshard"):  # FSDP leaves the root gathered after a forward without backward
            self.model.reshard()
        return out

    def update_seconds(self) -> float:
        """About how long an update takes, by the second forward of a micro-batch; a backward takes two of them."""
        inputs, targets = self.run.batch(self.run.begun)
        for _ in range(2):
            began = time.monotonic()
            float(self.forward(inputs[0], targets[0]).sum())
            seconds = time.monotonic() - began
        return 3 * self._worst(seconds) * len(inputs)

    def first_loss(self) -> float:
        """Nats a token over the whole first update."""
        inputs, targets = self.run.batch(self.run.begun)
        nats = sum(float(self.forward(x, y).sum()) for x, y in zip(inputs, targets, strict=True))
        total, count = self.topology.all_sum([nats, int((targets != IGNORE).sum())])
        return total / max(count, 1)

    def parameters(self) -> list[Finding]:
        """Exact counts against the arithmetic of --plan, and which of them the optimizers decay."""
        expected = budget.count_parameters(self.cfg.model)
        names = {id(p): name for name, p in self.raw.named_parameters()}
        sizes = {name: p.numel() for name, p in self.raw.named_parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        held = Counter(names.get(id(p), "a stranger") for group in groups for p in group["params"])
        problems = []
        if sum(sizes.values()) != expected.total:
            problems.append(f"the model has {sum(sizes.values()):,} parameters, by its shape {expected.total:,}")
        if odd := [name for name in {*sizes, *held} if held[name] != 1]:
            problems.append(f"{sorted(odd)[0]} is {held[odd[0]]} times in the optimizers, not once")
        decayed = [p for group in groups if group["weight_decay"] > 0 for p in group["params"]]
        wrong = [names[id(p)] for p in decayed if p.dim() < 2]
        if self.cfg.weight_decay > 0:
            ids_decayed = {id(p) for p in decayed}
            wrong += [name for name, p in self.raw.named_parameters() if p.dim() > 1 and id(p) not in ids_decayed]
        if wrong:
            problems.append(f"weight decay: {wrong[0]} and {len(wrong)} in all are on the wrong side of it")
        if problems:
            return [("FAIL", "parameters", f"{p}; a bug: report it") for p in problems]
        how = f"{expected.decayed:,} in matrices" + (
            f" decayed by {self.cfg.weight_decay:g}" if decayed else ", not decayed (--weight-decay 0)"
        )
        told = f"{expected.total:,} exactly: {how}, {expected.not_decayed:,} in vectors not decayed"
        return [("pass", "parameters", f"{told}; {expected.embedding:,} in embeddings")]

    def next_tokens(self) -> list[Finding]:
        """The loss is that of the next tokens, reckoned from logits anew; and no token sees a later one, nor with a
        document mask another document."""
        windows = torch.from_numpy(self.run.tokens(self.run.begun)[0])[0, :1, : PROBE + 1]
        inputs, following = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        logits = self.forward(inputs)  # [1, T, V]

        def reckoned(targets: Tensor) -> float:
            return -logits.log_softmax(-1).gather(-1, targets.to(logits.device)[..., None]).mean().item()

        said, ours = self.forward(inputs, following).sum().item() / following.numel(), reckoned(following)
        tolerance, problem = EQUAL_LOSS[self.topology.dtype], None
        if not self._worst(abs(said - ours)) <= tolerance:
            unshifted = abs(said - reckoned(inputs)) <= tolerance
            like = ": it is that of the inputs themselves, the targets are not shifted" if unshifted else ""
            problem = (
                f"the model's loss of a window is {said:.4f}, that of its next tokens by the logits {ours:.4f}{like}; "
                "look at GPT.forward"
            )
        passed = f"the loss is that of the next tokens, reckoned anew from logits: {ours:.4f} nats a token"
        out = [verdict("shift", problem, passed)]
        vocab, half = self.cfg.model.vocab_size, inputs.shape[1] // 2
        later = inputs.clone()
        later[:, half:] = (later[:, half:] + 1) % vocab
        change = self._worst((self.forward(later)[:, :half] - logits[:, :half]).abs().max().item()) if half else 0.0
        problem = f"logits change by {change:.2g} with the tokens after them; look at the attention's mask"
        out.append(verdict("causal", None if change <= LEAK else problem, "no logit depends on a later token"))
        if self.cfg.model.doc_mask and half:
            own, other = inputs.clone(), inputs.clone()
            own[:, half] = other[:, half] = self.cfg.model.eot_id
            other[:, :half] = (other[:, :half] + 1) % vocab
            change = self._worst((self.forward(own)[:, half:] - self.forward(other)[:, half:]).abs().max().item())
            problem = f"logits change by {change:.2g} with the document before; look at --doc-mask and --eot-id"
            passed = "no logit depends on another document of its window"
            out.append(verdict("documents", None if change <= LEAK else problem, passed))
        return out

    def _worst(self, value: float) -> float:
        return max(self.topology.gather(value if math.isfinite(value) else math.inf))

    # ---- a tiny batch ------------------------------------------------------------------------------------------------

    def fit(self) -> list[Finding]:
        """A few tokens learnt by heart, against a control that isn't updated and against shuffled targets; afterwards,
        whether the ranks still have the same weights."""
        idx, targets = self._few_tokens()
        shuffled = targets[:, torch.randperm(targets.shape[1], generator=torch.Generator().manual_seed(0))]
        lr = min(3e-3, max(1e-4, 0.3 / self.cfg.model.d_model))
        start = self.checksum()
        scaler = optim.gradient_scaler(self.topology.dtype, self.topology.device, self.topology.world_size)
        control = [self._update(idx, targets, 0.0, scaler) for _ in range(3)]
        moved = any(self.topology.gather(self.checksum() != start))
        at_first = self._mean(idx, shuffled)
        began, losses = time.monotonic(), []
        while True:
            losses.append(self._update(idx, targets, lr, scaler))
            late = self.topology.all_sum([time.monotonic() - began > FIT_S])[0] and len(losses) >= FIT_LEAST
            if late or len(losses) == FIT_UPDATES or losses[-1] < FITTED * losses[0]:
                break
        fitted, scrambled = self._mean(idx, targets), self._mean(idx, shuffled)
        fall, fall_shuffled = losses[0] - fitted, at_first - scrambled
        what = f"{targets.numel() * self.topology.world_size} tokens"
        course = f"{losses[0]:.3f} -> {fitted:.3f} in {len(losses)} updates at {lr:g}"
        problem = None
        if moved or not max(control) - min(control) <= EQUAL_LOSS[self.topology.dtype]:
            problem = (
                f"with the rate at 0 losses were {', '.join(f'{x:.4f}' for x in control)}"
                f"{' and weights moved' if moved else ''}; look at the optimizer and at what else writes weights"
            )
        out = [verdict("control", problem, f"with the rate at 0 weights stay, and the loss at {control[-1]:.4f}")]
        problem = None
        if not fitted < max(0.9 * losses[0], LEARNT):
            problem = f"{what} are not learnt: {course}; look at gradients, the optimizer and --dtype"
        elif targets.unique().numel() > 3 and fall > LEARNT and fall_shuffled > 0.8 * fall:
            problem = (
                f"the loss with shuffled targets fell by {fall_shuffled:.3f}, with the right ones by {fall:.3f}: it "
                "does not depend on targets; look at GPT.forward and at how batches are made"
            )
        out.append(verdict("fit", problem, f"{what}: {course}; targets shuffled {at_first:.3f} -> {scrambled:.3f}"))
        return [*out, self._ranks(len(losses))]

    def _few_tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, int64 [1, n] each: of the first update's windows, the piece of most different ids."""
        windows = torch.from_numpy(self.run.tokens(self.run.begun)[0]).flatten(0, 1)
        n = min(FIT_TOKENS + 1, windows.shape[1])
        pieces = windows.unfold(1, n, n).flatten(0, 1)[:256]  # [pieces, n]
        most = max(range(len(pieces)), key=lambda k: len(pieces[k].unique()))
        return pieces[most : most + 1, :-1].contiguous(), pieces[most : most + 1, 1:].contiguous()

    def _update(self, idx: Tensor, targets: Tensor, lr: float, scaler: torch.amp.GradScaler) -> float:
        topology, world = self.topology, self.topology.world_size
        x, y = idx.to(topology.device), targets.to(topology.device)
        optim.set_lr(self.optimizers, lr)
        self.model.zero_grad(set_to_none=True)
        with parallel.accumulate(self.model, True, topology, self.cfg.grad_sync):
            with topology.autocast():
                nats = self.model(x, y)
            scaler.scale(nats * (1 / y.numel())).backward()  # each rank has as many: a mean of means is the mean
        optim.unscale(scaler, self.optimizers)
        norm = parallel.clip_gradients(self.model, 1.0)
        optim.step(self.optimizers, (~torch.isfinite(norm)).float())
        scaler.update()
        return float(topology.sum_on_device(nats.detach().clone())) / (y.numel() * world)

    def _mean(self, idx: Tensor, targets: Tensor) -> float:
        nats, count = self.topology.all_sum([float(self.forward(idx, targets).sum()), targets.numel()])
        return nats / count

    def checksum(self) -> str:
        """Hex, of the bits of all weights that this rank holds; on their device, so that large models will do."""
        out = hashlib.sha256()
        for name, p in self.raw.named_parameters():
            part = p.to_local() if isinstance(p, DTensor) else p
            out.update(f"{name} {int(part.detach().contiguous().view(torch.int32).sum(dtype=torch.int64))}\n".encode())
        return out.hexdigest()[:16]

    def _ranks(self, updates: int) -> Finding:
        """Equality of weights between ranks that hold the same ones."""
        topology, size = self.topology, self.topology.shard_size
        if topology.world_size == 1:
            return "note", "ranks", "one rank: nothing to compare"
        if size == topology.world_size:
            held = int(topology.all_sum([sum(p.to_local().numel() for p in self.raw.parameters())])[0])
            whole = sum(p.numel() for p in self.raw.parameters())
            problem = (
                None if held == whole else f"the ranks' parts are {held:,} weights, not {whole:,}; a bug: report it"
            )
            return verdict(
                "ranks", problem, f"each of {whole:,} weights is on one of {size} ranks: no copies to compare"
            )
        sums = topology.gather(self.checksum())
        problem = None
        for rank, own in enumerate(sums):  # ranks at the same place of their shard groups hold the same part
            if own != sums[rank % size] and problem is None:
                problem = (
                    f"after {updates} updates rank {rank} has other weights than rank {rank % size} ({own}, not "
                    f"{sums[rank % size]}): they don't apply the same gradients; look at the network and at --grad-sync"
                )
        whose = f"{topology.world_size} ranks" if size == 1 else f"{topology.world_size // size} copies of {size} ranks"
        return verdict("ranks", problem, f"{whose} have equal weights after {updates} updates (checksum {sums[0]})")
