"""The lines of --plan: what a run takes of parameters, FLOPs, memory, disk, wire, time and money. Imports no torch."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from fourscale import __version__, budget, costs, scaling
from fourscale.budget import CARDS, Plan, flops_per_token
from fourscale.cli import flag
from fourscale.config import TrainConfig
from fourscale.costs import Layout

MIB, GIB = 2**20, 2**30
HOFFMANN = "Hoffmann et al. 2022"
LINKS = ("link_gbyte_s", "node_gbit_s")
SHRINKS = ("weights", "gradients", "optimizer")  # with the ranks that share a copy


@dataclass(frozen=True)
class Clock:
    """How far a run has come: zeros, or a checkpoint's."""

    update: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Machine:
    """Where the run is to take place."""

    world: int
    node: int  # ranks of a node
    device_type: str
    dtype: str
    card: str | None  # of budget.CARDS
    peak: float | None  # FLOP/s of a device in `dtype`


@dataclass(frozen=True)
class Text:
    """The data, as far as they are here. parts: training tokens and share of the samples of each; none where they
    aren't."""

    vocab_size: int
    eot_id: int | None
    parts: dict[str, tuple[int, float]] = field(default_factory=dict)
    held_out: int | None = None


@dataclass(frozen=True)
class Measured:
    """What a trial run came to here."""

    updates: int
    ms: float  # an update
    eval_s: float | None  # an evaluation
    save_s: float | None  # a save that training waits for
    checkpoint: int  # bytes
    memory: int | None  # bytes, most on a rank
    before: int  # bytes of these that were there before a model was


@dataclass
class Facts:
    """All that the lines are made from. notes: what is assumed, in words."""

    plan: Plan
    machine: Machine
    text: Text
    done: Clock = Clock()
    measured: Measured | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def cfg(self) -> TrainConfig:
        return self.plan.cfg

    @property
    def tokens(self) -> int:
        """Supervised tokens that are still to come."""
        return self.plan.token_budget - self.done.tokens

    def layout(self, parallel: str) -> Layout:
        world = self.machine.world
        shards = {"ddp": 1, "fsdp": world}.get(parallel) or self.cfg.shard_size or self.machine.node
        return Layout(parallel, world, shards)

    def rate(self) -> tuple[float | None, str]:
        """(tokens per second over all ranks, where that comes from in words); None where nothing tells."""
        cfg, m = self.cfg, self.machine
        if self.measured is not None:
            rate = 1e3 * self.plan.tokens_per_update / self.measured.ms
            return rate, f"measured here over {self.measured.updates} updates"
        if cfg.expect_tokens_per_s is not None:
            return cfg.expect_tokens_per_s, "assumed by --expect-tokens-per-s"
        if m.peak is not None:
            rate = budget.tokens_per_s(cfg.expect_mfu, flops_per_token(cfg.model), m.peak, m.world)
            return rate, f"assumed by --expect-mfu {cfg.expect_mfu:g} of the peak"
        return None, ""


def lines(facts: Facts) -> list[str]:
    """The plan as text, line by line; the last one is the command that starts the run."""
    m, model = facts.machine, facts.cfg.model
    shape = f"{model.arch} {model.n_layers} layers x {model.d_model:,} wide, ctx {model.ctx:,}"
    out = [
        f"fourscale {__version__} plan | {shape} | {m.world:,} x {m.card or m.device_type}, {facts.cfg.parallel}, "
        f"{m.dtype}"
    ]
    for part in (_run, _flops, _memory, _disk, _wire, _time, _more_gpus, _scaling, _known):
        out += ["", *part(facts)]
    return [line.rstrip() for line in [*out, "", "Start it with", command(facts)]]


def _row(label: str, text: str) -> str:
    return f"  {label:<21}{text}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's' if what[-1] != 'h' else 'es'}"


def _run(facts: Facts) -> list[str]:
    plan, cfg, m = facts.plan, facts.cfg, facts.machine
    size = budget.count_parameters(cfg.model)
    ids = f"{cfg.model.vocab_size:,} ids (padded to {cfg.model.padded_vocab:,})"
    last = (plan.token_budget - plan.origin.tokens - 1) % plan.tokens_per_update + 1
    tail = "" if last == plan.tokens_per_update else f", the last of {last:,} tokens"
    batch = " x ".join(
        (_count(m.world, "rank"), _count(cfg.local_bsz, "window"), _count(cfg.grad_accum, "micro-batch"))
    )
    if empty := m.world * cfg.local_bsz * cfg.grad_accum - cfg.global_bsz:
        batch += f" (less {_count(empty, 'empty window')})"
    rates = f"warmup {cfg.warmup:,}, {cfg.schedule} from {cfg.lr:g}"
    if cfg.schedule != "constant":
        rates += f" to {cfg.min_lr:g}"
    ratio = plan.token_budget / size.total
    out = [
        "Run (exact)",
        _row("parameters", f"{size.total:,} = {size.decayed:,} decayed + {size.not_decayed:,} not"),
        _row("  embedding", f"{size.embedding:,} of them, for {ids}"),
        _row("an update", f"{plan.tokens_per_update:,} tokens = {batch} x {cfg.model.ctx:,}"),
        _row("updates", f"{plan.updates:,}{tail}; {rates}"),
        _row("tokens", f"{plan.token_budget:,} = {ratio:,.1f} a parameter (compute-optimal is about 20: {HOFFMANN})"),
    ]
    if facts.done.update:
        done = f"{facts.done.update:,} updates, {facts.done.tokens:,} tokens; FLOPs, time and money are the rest's"
        out.append(_row("done already", done))
    for name, (tokens, share) in facts.text.parts.items():
        epochs = share * plan.token_budget / tokens if tokens else 0
        mixed = f", {100 * share:.3g}% of the samples" if len(facts.text.parts) > 1 else ""
        out.append(_row("data", f"{name}: {tokens:,} training tokens{mixed}, read {epochs:,.2f} times"))
    return out


def _flops(facts: Facts) -> list[str]:
    cfg = facts.cfg
    n, exact = flops_per_token(cfg.model), budget.exact_flops(cfg.model)
    again = budget.with_recomputation(cfg.model, "block").total
    computed = "; this run computes these" if cfg.act_ckpt == "block" else ""

    def row(label: str, each: float, note: str = "") -> str:
        return f"  {label:<21}{each / 1e9:>14,.4g}{_power(each * facts.tokens):>14}  {note}"

    out = [
        f"{'Training FLOPs (exact)':<23}{'GFLOP a token':>14}{'the run':>14}",
        row("6 N D", n, "N all parameters, D tokens; MFU counts these"),
        row("exact count", exact.total, f"{exact.total / n:.2f} x 6 N D, the three below"),
        row("  blocks", exact.blocks),
        row(
            "  attention scores", exact.scores, "causal counted in full; a kernel that leaves out the masked does half"
        ),
        row("  head", exact.head, "over the padded vocabulary"),
        row("8 N D", n * 4 / 3, f"with --act-ckpt block, each forward twice{computed}; MFU stays on 6 N D"),
        row("  exact count", again, "a block's forward twice but for its last product, the head's once"),
    ]
    if cfg.optimizer == "muon":
        share = budget.muon_flops(cfg.model, cfg.muon_dtype) / facts.plan.tokens_per_update
        out.append(row("muon", share, f"orthogonalising, on top: {100 * share / n:.1f}% of 6 N D"))
    return out


def _columns(facts: Facts) -> list[Layout]:
    return [facts.layout(mode) for mode in ("ddp", "fsdp", "hsdp")]


def _table(heading: str, names: dict[str, str], each: Sequence[object], unit: int, facts: Facts) -> list[str]:
    """Rows of numbers under ddp, fsdp and hsdp, the run's own marked; rows of zeros are left out."""
    layouts = _columns(facts)
    titles = [layout.parallel + ("*" if layout.parallel == facts.cfg.parallel else "") for layout in layouts]
    out = [f"{heading:<34}" + "".join(f"{title:>11}     " for title in titles)]
    for name, label in names.items():
        values = [getattr(e, name) for e in each]
        if any(values):
            parts = [layout.shards if name in SHRINKS else 1 for layout in layouts]
            cells = zip(values, parts, strict=True)
            told = (f"{v / unit if v else 0:>11,.{3 if v else 0}f}{f' /{k}' if k > 1 else '':<5}" for v, k in cells)
            out.append(f"  {label:<32}" + "".join(told))
    return out


def _unit(sizes: Sequence[int]) -> tuple[str, int]:
    return ("GiB", GIB) if max(sizes) >= GIB else ("MiB", MIB)


def _memory(facts: Facts) -> list[str]:
    cfg, m, layouts = facts.cfg, facts.machine, _columns(facts)
    each = {layout.parallel: costs.memory(cfg, layout, m.device_type) for layout in layouts}
    own = each[cfg.parallel]
    name, unit = _unit([e.peak for e in each.values()])
    labels = {
        "weights": "weights, fp32",
        "gradients": "gradients, fp32",
        "optimizer": f"optimizer, {cfg.optimizer}",
        "accumulated": "gradients of micro-batches",
        "copies": f"~ {m.dtype} copies of weights",
        "gathered": "~ whole weights in use",
        "activations": "~ activations",
        "logits": "~ logits",
        "peak": "~ peak, of what comes together",
    }
    out = _table(f"Memory a rank ({name}, ~ estimated)", labels, list(each.values()), unit, facts)
    shared = {layout.parallel: layout.shards for layout in layouts}
    if m.world > 1:
        groups = f"{shared['fsdp']:,} under fsdp, {shared['hsdp']:,} under hsdp"
        out.append(f"  /n: shrinks with the n ranks that share a copy ({groups}); the other rows don't")
    told = []
    for act in ("none", "selective", "block"):
        changed = costs.memory(dataclasses.replace(cfg, act_ckpt=act), facts.layout(cfg.parallel), m.device_type)
        told.append(f"{act} {changed.activations / unit:,.3f} (peak {changed.peak / unit:,.3f})")
    out.append(f"  activations by --act-ckpt, {cfg.parallel}: {', '.join(told)}")
    if m.card is not None:
        out.append(f"  {m.card}: {_fit(own.peak, CARDS[m.card].memory)}")
    out.append("  beside these: CUDA and NCCL, about 1 GiB a GPU; host memory for a copy of a checkpoint being written")
    if (seen := facts.measured) is not None and seen.memory:
        if m.device_type == "cuda":
            out.append(
                f"  measured here: {_bytes(seen.memory)} at most; the estimate is {_off(own.peak, seen.memory)} off"
            )
        else:
            grown = f"from {_bytes(seen.before)} to {_bytes(seen.memory)}"
            out.append(f"  measured here: this process grew {grown}, libraries that it loaded meanwhile among it")
    return out


def _off(estimate: int, found: int) -> str:
    return f"{100 * (estimate / found - 1):+.0f}%"


def _fit(peak: int, sizes: tuple[int, ...]) -> str:
    """Whether a peak fits a card, with a tenth of it left for what isn't counted."""
    share = f"the peak is {100 * peak / 1e9 / sizes[-1]:,.0f}% of {sizes[-1]} GB"
    if peak > 0.9e9 * sizes[-1]:
        return f"{share}: TOO MUCH; lower --local-bsz, use --act-ckpt, or --parallel fsdp on more ranks"
    return f"{share}" + (f", too much for one of {sizes[0]} GB" if peak > 0.9e9 * sizes[0] else "")


def _disk(facts: Facts) -> list[str]:
    cfg = facts.cfg
    rate, _ = facts.rate()
    d = costs.disk(facts.plan, 60 * costs.hours(facts.tokens, rate) if rate else None)
    rule = "all kept (--keep N removes older ones)"
    if cfg.keep is not None:
        also = f" and --keep-every {cfg.keep_every:,}" if cfg.keep_every else ""
        rule = f"{d.kept:,} kept by --keep {cfg.keep}{also}{', the best among them' if cfg.eval_every else ''}"
    most = "at most " if cfg.save_best else ""
    every = f"every {cfg.ckpt_every:,} updates and at the end" if cfg.ckpt_every else "at the end"
    real = f"; measured here {_bytes(facts.measured.checkpoint)}" if facts.measured else ""
    place = next(p for p in [cfg.ckpt_dir.resolve(), *cfg.ckpt_dir.resolve().parents] if p.is_dir())
    free = shutil.disk_usage(place).free
    short = "" if d.most_bytes + d.metrics < free else ": TOO LITTLE for this run"
    parts = f"weights {_bytes(d.weights)} + optimizer {_bytes(d.optimizer)}"
    at_once = f", {_bytes(d.most_bytes)} while one is written" if d.most_bytes > d.kept_bytes else ""
    out = [
        "Disk (exact, but for the files' own headers)",
        _row("a checkpoint", f"{_bytes(d.checkpoint)} = {parts}{real}"),
        _row("over the run", f"{most}{d.saved:,} saved, {every}; {rule}"),
        _row("total", f"{most}{_bytes(d.kept_bytes)}{at_once}; metrics.jsonl {_bytes(d.metrics)}"),
        _row("free here", f"{_bytes(free)} for {cfg.ckpt_dir}{short}"),
    ]
    if cfg.ckpt_minutes and not rate:
        out.append(_row("not counted", f"saves of --ckpt-minutes {cfg.ckpt_minutes:g}, since the hours aren't known"))
    return out


def _wire(facts: Facts) -> list[str]:
    cfg, layouts = facts.cfg, _columns(facts)
    if facts.machine.world == 1:
        return ["Wire: one rank, nothing crosses it"]
    each = [costs.wire(cfg, layout) for layout in layouts]
    name, unit = _unit([w.total for w in each])
    labels = {
        "gather": "weights, within a copy",
        "scatter": "gradients, within a copy",
        "reduce": "gradients, between copies",
        "muon": "muon's matrices",
        "total": "all",
    }
    out = _table(f"Wire, sent by a rank an update ({name})", labels, each, unit, facts)
    out += _between_nodes(facts, labels)
    if facts.machine.device_type == "cpu" and any(w.scatter for w in each):
        out.append("  on CPUs gloo scatters gradients by an all-reduce: the second rows count twice there")
    sent = {
        sync: costs.wire(dataclasses.replace(cfg, grad_sync=sync), facts.layout(cfg.parallel)).total
        for sync in ("auto", "every", "last")
    }
    if cfg.grad_accum > 1:
        told = ", ".join(f"{sync} {size / unit:,.3f}" for sync, size in sent.items())
        out.append(f"  {cfg.parallel}, {cfg.grad_accum:,} micro-batches, by --grad-sync: {told}")
    rate, _ = facts.rate()
    if rate:
        seconds = facts.plan.tokens_per_update / rate
        needs = f"{sent[cfg.grad_sync] / seconds / 1e9:,.2f} GB/s a rank"
        out.append(f"  {cfg.parallel}: {needs} hide all of it behind an update's {seconds:,.4g} s")
    return out


def _between_nodes(facts: Facts, labels: dict[str, str]) -> list[str]:
    """What crosses between nodes; nothing where there is one."""
    cfg, node, layouts = facts.cfg, facts.machine.node, _columns(facts)
    if facts.machine.world <= node:
        return []
    each = [costs.wire(cfg, layout, node) for layout in layouts]
    name, unit = _unit([w.total for w in each])
    ranks = f"{node:,} rank{'' if node == 1 else 's'}"
    out = _table(f"Sent by a node of {ranks} to others ({name})", labels, each, unit, facts)
    told = (f"{layout.parallel} {8 * w.total / 1e10:,.3g}" for layout, w in zip(layouts, each, strict=True))
    out.append(f"  seconds an update at 10 Gbit/s a node: {', '.join(told)}")
    if layouts[-1].copies > 1 and layouts[-1].shards > 1:
        out.append(f"  hsdp: {layouts[-1].copies:,} copies, each of {layouts[-1].shards:,} ranks")
    return out


def _time(facts: Facts) -> list[str]:
    cfg, m, plan, seen = facts.cfg, facts.machine, facts.plan, facts.measured
    rate, source = facts.rate()
    out = ["Time and money", _row("peak", _peak(facts))]
    if rate is None:
        way = "--expect-tokens-per-s, a peak, or --measure 20 where the run is to be"
        return [*out, _row("hours", f"unknown; what gives them: {way}")]
    share = ""
    if m.peak is not None:
        used = budget.mfu(rate, flops_per_token(cfg.model), m.peak, m.world)
        share = f", MFU {100 * used:.1f}%" + (": MORE THAN THERE IS" if used > 1 else "")
    out.append(_row("rate", f"{rate:,.0f} tok/s over all ranks{share} ({source})"))
    out.append(_row("an update", f"{plan.tokens_per_update / rate:,.4g} s"))
    parts, notes = {"training": costs.hours(facts.tokens, rate)}, {}
    if cfg.eval_every:
        losses = 1 + len(costs.multiples(cfg.eval_every, facts.done.update, plan.updates - 1))
        scored = min(cfg.eval_tokens, facts.text.held_out or cfg.eval_tokens)
        timed = seen.eval_s if seen else None
        # A forward is a third of what a token costs in training.
        parts["held-out losses"] = losses * (timed / 3600 if timed else costs.hours(scored / 3, rate))
        how = f"{timed:,.3g} s each, measured" if timed else "a third of training's work a token"
        notes["held-out losses"] = f"  ({losses:,} of {scored:,} tokens, {how})"
    if seen and seen.save_s:
        saves = 1 + len(costs.multiples(cfg.ckpt_every, facts.done.update, plan.updates - 1))
        parts["saves"] = saves * seen.save_s / 3600
        notes["saves"] = f"  ({saves:,}, {seen.save_s:,.3g} s each, measured; --async-ckpt hides most of it)"
    price = budget.price_of(cfg.price) if cfg.price is not None else None
    if len(parts) > 1:
        parts["together"] = sum(parts.values())
    for name, hours in parts.items():
        line = f"{hours:,.3f} h" + (f" ({3600 * hours:,.0f} s)" if hours < 0.1 else "")
        if m.world > 1:
            line += f" = {hours * m.world:,.3f} device-hours"
        if price is not None:
            line += f" = {costs.money(hours * m.world, price.per_hour):,.2f}"
        out.append(_row(name, line + notes.get(name, "")))
    if price is None:
        return [*out, _row("money", "no --price, such as 2.50@2026-11-30 a device-hour")]
    days = max(0, (datetime.date.today() - price.date).days)
    return [*out, _row("price", f"{price.per_hour:,.2f} a device-hour on {price.date}, {_count(days, 'day')} ago")]


def _peak(facts: Facts) -> str:
    cfg, m = facts.cfg, facts.machine
    if m.peak is not None:
        whence = "--peak-tflops" if cfg.peak_tflops is not None else f"{m.card}'s data sheet, dense"
        return f"{m.peak / 1e12:,.1f} TFLOP/s a device in {m.dtype} ({whence})"
    if m.card is None:
        return f"unknown for {m.device_type} in {m.dtype}; --gpu NAME or --peak-tflops tells it"
    other = " (it has no units for it: --dtype fp16)" if m.dtype == "bf16" else ""
    return f"unknown for {m.card} in {m.dtype}{other}; --peak-tflops tells it"


def _more_gpus(facts: Facts) -> list[str]:
    """What a model of the links says of the run on more GPUs."""
    cfg, m, (rate, source) = facts.cfg, facts.machine, facts.rate()
    if m.device_type != "cuda" or rate is None:
        return ["On more GPUs: unknown for this device; --gpu NAME or --expect-tokens-per-s with --device cuda tells"]
    links = scaling.Links(cfg.link_gbyte_s, cfg.node_gbit_s, m.node if m.world > 1 else scaling.Links.node)
    each = rate * flops_per_token(cfg.model) / m.world
    memory = CARDS[m.card].memory[-1] if m.card is not None else None
    out = [f"On more GPUs (modelled: speed over as many times one GPU's, %; {source})"]
    return out + scaling.table({f"{m.world:,} now": cfg}, links, each, memory)


def _scaling(facts: Facts) -> list[str]:
    """The run at three and ten times the model, where tokens grow with it."""
    plan, (rate, _) = facts.plan, facts.rate()
    tokens = plan.token_budget - plan.origin.tokens
    out = [f"A larger model, its tokens grown alike (compute-optimal: {HOFFMANN})"]
    for factor in (1, 3, 10):
        updates, _ = budget.updates_for(factor * tokens, plan.tokens_per_update)
        line = f"{factor * tokens:>18,} tokens, {updates:>10,} updates, {factor**2:>3} x the compute"
        if rate:
            line += f", {factor**2 * costs.hours(tokens, rate):,.3f} h at the same FLOP/s"
        out.append(_row(f"{factor:>2} x parameters", line))
    return out


def _known(facts: Facts) -> list[str]:
    """What is exact, estimated, assumed and measured, in words."""
    out = ["What this rests on"]
    exact = "parameters, tokens, updates, FLOPs; weights, gradients, optimizer, checkpoints; wire, where rings are used"
    out.append(_row("exact", exact))
    out.append(_row("estimated", "the rows with ~, the peak came within 4% of what small models allocated on a CPU"))
    rate, source = facts.rate()
    if (seen := facts.measured) is not None:
        which = "the first update, start-up and all" if facts.cfg.measure == 1 else "the median after the first"
        names = {"eval_s": "a held-out loss", "save_s": "a save", "memory": "peak memory"}
        also = "".join(f", {words}" for name, words in names.items() if getattr(seen, name))
        out.append(_row("measured", f"the rate ({seen.updates:,} updates here: {which}), a checkpoint's size{also}"))
    elif rate:
        out.append(_row("assumed", f"the rate, {source.removeprefix('assumed ')}; --measure 20 measures it"))
    return out + [_row("assumed", note) for note in facts.notes]


def _bytes(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.2f} MiB"


def _power(x: float) -> str:
    return f"{x:.3e}".replace("e+", "e")


def command(facts: Facts) -> str:
    """The command line that starts the run: this one, without what only plans."""
    cfg, m = facts.cfg, facts.machine
    valued = {flag(name) for name in ("measure", "gpu", "expect_mfu", "expect_tokens_per_s", *LINKS)}
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in valued:
            if "=" not in word:
                next(words, None)
        elif name != "--plan":
            kept.append(word)
    if cfg.resume == "never" and not any(word.partition("=")[0] == "--resume" for word in kept):
        kept += ["--resume", "auto"]  # then it is the command of every restart too
    if cfg.config is not None and "--plan" not in sys.argv:
        kept.append("--no-plan")  # the recipe says it
    launch = "python"
    if m.world > 1:
        nodes = m.world // m.node
        several = f"--nnodes={nodes} --node_rank=$RANK " if nodes > 1 else ""
        where = " --rdzv_endpoint=$HEAD:29500" if nodes > 1 else ""
        launch = f"torchrun {several}--nproc_per_node={m.node}{where}"
    return " ".join([launch, "train.py", shlex.join(kept)]).rstrip()
