"""Train a language model: one script on a laptop, one GPU, a node and a cluster.

    python train.py --data ./data                                             # one process, sized to the device
    torchrun --nproc_per_node=2 train.py --data ./data --backend gloo --steps 500
    torchrun --nproc_per_node=8 train.py --data ./data --parallel fsdp --ctx 1024 --local-bsz 16 --grad-accum 4
    torchrun --nproc_per_node=8 train.py --data ./data --parallel fsdp --resume auto      # goes on, on any ranks
    python train.py --data ./web:0.7 --data ./code:0.3                        # two data sets, mixed by share of samples

Read it from top to bottom: flags, group, data, contract, model, the loop, the end.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fourscale import __version__, code_version
from fourscale.cli import InputError, RunFailed, door, from_toml, parse
from fourscale.config import TrainConfig

if TYPE_CHECKING:
    from fourscale.parallel import Topology

SKIPPED_LIMIT = 10  # non-finite updates in a row after which a run is beyond help


@door
def main() -> None:
    # ---- 1. flags: usage errors end here, before torch is imported -------------------------------------------------
    flags = parse(TrainConfig)
    if flags.config is not None:
        flags = parse(TrainConfig, default=from_toml(TrainConfig, flags.config, TrainConfig()))
    from fourscale import parallel, rundir

    flags = rundir.recall(flags)
    topology = parallel.start(flags.parallel, flags.backend, flags.device, flags.dtype)
    try:
        pretrain(flags, topology)
    except (RuntimeError, OSError) as e:
        raise parallel.explained(topology, e) from None
    parallel.stop(topology)


def pretrain(flags: TrainConfig, topology: Topology) -> None:
    import torch

    from fourscale import budget, checkpoint, cli, corpus, heldout, optim, parallel, publish, rundir, telemetry
    from fourscale.model import GPT, IGNORE
    from fourscale.order import supervised, update_rows

    # ---- 2. the run directory, and where to go on from -------------------------------------------------------------
    say = cli.say if topology.main else lambda line: None
    stop_request = parallel.StopRequest()
    finished = flags.ckpt_dir / "DONE.json"
    if flags.resume != "never" and topology.from_main(finished.is_file):
        return say(f"{finished}: this run is finished; nothing to do (the other flags were not looked at)")
    run_dir = publish.RunDir(flags.ckpt_dir, topology)
    ckpt = run_dir.resume_point(flags.resume)

    # ---- 3. data ---------------------------------------------------------------------------------------------------
    data = corpus.of_flags(flags, ckpt.run if ckpt else None)

    # ---- 4. the plan and the contract: what this run is, for good --------------------------------------------------
    device_type = topology.device.type
    plan = budget.plan(flags, data.vocab_size, topology.world_size, device_type, topology.dtype, data.eot_id)
    cfg, ctx, world, updates = plan.cfg, plan.cfg.model.ctx, topology.world_size, plan.updates
    optim.check_schedule(updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
    order = data.order(ctx, cfg.data_seed, cfg.sampling)
    attempt = {
        "attempt": run_dir.attempt,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_update": ckpt.step["update"] if ckpt else 0,
        "code": code_version(),
        "torch": torch.__version__,
        "data": data.absolute["data"],
        "device": parallel.device_name(topology.device),
        **{k: getattr(cfg, k) for k in ("parallel", "local_bsz", "grad_accum", "compile")},
        "world_size": world,
    }
    run = {
        "format": rundir.FORMAT,
        "model": dataclasses.asdict(cfg.model),
        "tokenizer": data.tokenizer.entry() if data.tokenizer else None,
        "data": data.contract(),
        "training": plan.training_table(),
        "config": rundir.as_table(dataclasses.replace(cfg, **data.absolute)),
        "attempts": [*(ckpt.run["attempts"] if ckpt else []), attempt],
    }
    if ckpt is not None:
        rundir.refuse_differences(run_dir.path, ckpt.run, run)
        before = ckpt.run["attempts"][-1]
        if cfg.model.dropout > 0 and any(before[k] != attempt[k] for k in ("world_size", "local_bsz")):
            raise InputError(
                f"--dropout {cfg.model.dropout}: masks belong to ranks and micro-batches; resume as before, on "
                f"{before['world_size']} ranks with --local-bsz {before['local_bsz']}"
            )
    verification = corpus.Verification(data, cfg.verify_data, topology, lambda: stop_request.name is not None)
    run_dir.write_contract(run, None if ckpt else data.tokenizer)
    size, empty = budget.count_parameters(cfg.model), world * cfg.local_bsz * cfg.grad_accum - cfg.global_bsz
    say(
        f"fourscale {__version__} | {cfg.model.arch} {cfg.model.n_layers} layers x {cfg.model.d_model} wide, "
        f"{size.total:,} parameters{'' if flags.model.d_model else f' (sized to {device_type})'} | "
        f"{world} x {attempt['device']}, {cfg.parallel}, {cfg.dtype}\n"
        f"update = {cfg.global_bsz} windows x {ctx} = {plan.tokens_per_update:,} tokens, by {world} ranks x "
        f"{cfg.local_bsz} windows x {cfg.grad_accum} micro-batches{f' ({empty} of weight 0)' if empty else ''} | "
        f"{updates:,} updates, {plan.token_budget:,} tokens{data.told(order.epochs(plan.token_budget / ctx))} "
        f"| {run_dir.path}"
    )
    for note in data.notes:
        say(f"note: {note}")

    # ---- 5. model and optimizer, with weights from the seed or the checkpoint --------------------------------------
    with torch.device("meta"):
        raw = GPT(cfg.model)
    model = parallel.build(raw, lambda: raw.init_weights(cfg.seed), topology, cfg.compile)
    optimizers = optim.build(raw, cfg.optimizer, cfg.weight_decay, cfg.beta1, cfg.beta2)
    done, tokens_seen = 0, 0
    meter = telemetry.Meter(
        run_dir.path,
        topology,
        updates,
        budget.flops_per_token(cfg.model),
        budget.peak_flops(attempt["device"], cfg.dtype),
    )

    def tensors() -> dict[str, torch.Tensor]:
        return checkpoint.model_tensors(raw) | checkpoint.optimizer_tensors(raw, optimizers)

    if ckpt is not None:
        checkpoint.load(ckpt.dir, tensors(), topology.cpu_group)
        done, tokens_seen, meter.skipped = ckpt.step["update"], ckpt.step["tokens"], ckpt.step["skipped"]
        say(f"resumed from {ckpt.dir.name}: {tokens_seen:,} tokens seen")
    topology.from_main(lambda: telemetry.rewind(run_dir.path, done))

    # ---- 6. the loop: accumulate, one denominator, backward, clip, guard, step -------------------------------------
    my_rows = update_rows(cfg.global_bsz, world, topology.rank, cfg.local_bsz, cfg.grad_accum)  # [A, B]
    eval_starts = [heldout.eval_starts(p.val.total, ctx, int(cfg.eval_tokens * p.weight)) for p in data.parts]
    positions = torch.arange(ctx)

    def load(i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs and targets of update i for this rank, int64 [A, B, ctx] each, and how many targets are supervised."""
        rows = my_rows.ravel()
        lengths = torch.from_numpy(
            supervised(rows, plan.token_budget - i * plan.tokens_per_update, ctx, cfg.global_bsz)
        )
        parts, starts = order.starts(i * cfg.global_bsz + rows % cfg.global_bsz)
        tokens = torch.from_numpy(data.windows(parts, starts, ctx + 1)).view(*my_rows.shape, ctx + 1)
        mask = positions >= lengths.view(*my_rows.shape, 1)  # padding rows, and what lies beyond the token budget
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].masked_fill(mask, IGNORE)
        if topology.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs, targets, int(lengths.sum())

    def evaluate() -> dict[str, Any]:
        with meter.off_the_clock():
            scores = {
                part.name: heldout.score(model, part.val, ctx, starts, cfg.local_bsz, topology)
                for part, starts in zip(data.parts, eval_starts, strict=True)
            }
            score, losses = heldout.pooled(scores.values()), {name: s.loss for name, s in scores.items()}
            each = "".join(f" | {name} {loss:.4f}" for name, loss in losses.items()) if data.mixed else ""
            say(f"step {done} | val loss {score.loss:.4f} | val ppl {score.perplexity:.2f}{each}")
        return telemetry.held_out_fields(score.loss, losses)

    def save() -> None:
        with meter.off_the_clock():
            meter.flush(aloud=False)
            step = {"update": done, "tokens": tokens_seen, "samples_seen": done * cfg.global_bsz}
            step |= {"applied": done - meter.skipped, "skipped": meter.skipped, "val_loss": None}
            if run_dir.publish(tensors(), step | (held_out or {}), cfg.keep, cfg.keep_every):
                say(f"step {done} | saved {run_dir.path / f'step_{done}'}")

    held_out = {k: ckpt.step[k] for k in ("val_loss", "val_losses") if k in ckpt.step} if ckpt else None
    stop_at = min(updates, cfg.stop_after or updates)
    stopped_by = f"--stop-after {stop_at}" if stop_at < updates else None
    loader = ThreadPoolExecutor(max_workers=1)  # the next update is read while this one is computed
    upcoming = loader.submit(load, done) if done < stop_at else None
    meter.restart_clock()
    while done < stop_at:
        waited = time.monotonic()
        inputs, targets, count = upcoming.result()
        data_ms = 1e3 * (time.monotonic() - waited)
        upcoming = loader.submit(load, done + 1) if done + 1 < stop_at else None

        # One small message an update: supervised tokens of all ranks; is anyone asked to stop; are anyone's data wrong.
        message = [count, stop_request.name is not None, verification.failed]
        count, asked, damaged = (int(x) for x in topology.all_sum(message))
        if damaged:
            verification.refuse()
        if asked:
            stopped_by = stop_request.name or "a signal to another rank"
            break

        lr = optim.learning_rate(done, updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
        optim.set_lr(optimizers, lr)
        model.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=topology.device)
        for m in range(cfg.grad_accum):
            if cfg.model.dropout > 0:
                parallel.seed_dropout(topology, cfg.seed, done, m)
            x = inputs[m].to(topology.device, non_blocking=True)  # [B, T]
            y = targets[m].to(topology.device, non_blocking=True)
            with parallel.accumulate(model, last=m == cfg.grad_accum - 1):
                with topology.autocast():
                    window_sums = model(x, y)  # [B], nats
                # DDP and FSDP average over ranks: times world_size, over the global count, is the mean over all tokens.
                (window_sums.sum() * (world / count)).backward()
            loss_sum += window_sums.detach().sum()
        norm = parallel.clip_gradients(model, cfg.clip)
        skipped = optim.step_if_finite(optimizers, norm)
        tokens_seen += count
        done += 1
        epochs = data.by_name(order.epochs(done * cfg.global_bsz))
        meter.add(telemetry.Pending(done, tokens_seen, count, lr, epochs, data_ms, loss_sum, norm, skipped))

        due = cfg.eval_every and (done == updates or done % cfg.eval_every == 0)
        held_out = evaluate() if due else None
        if due or done == stop_at or done % cfg.log_every == 0 or done == 1:
            meter.flush(held_out)
            if meter.skipped_in_a_row >= SKIPPED_LIMIT:
                raise RunFailed(
                    f"step {done}: the gradient was not finite for {meter.skipped_in_a_row} updates in a row; "
                    "what is saved is finite: lower --lr, lengthen --warmup or look at the data"
                )
        if cfg.ckpt_every and done % cfg.ckpt_every == 0:
            save()

    # ---- 7. the end: a checkpoint, a receipt, the curve -----------------------------------------------------------
    loader.shutdown(cancel_futures=True)
    verified = verification.close(patient=done == stop_at)
    if done:
        meter.flush()
        save()
    topology.from_main(lambda: telemetry.plot_loss(run_dir.path))
    receipt = {"update": done, "updates": updates, "tokens": tokens_seen, "skipped": meter.skipped, "val_loss": None}
    receipt |= (held_out or {}) | verified
    if done == updates:
        final = rundir.open_checkpoint(run_dir.path / f"step_{done}")
        receipt["digest"] = rundir.digest(final)
        run_dir.receipt("DONE.json", receipt)
    else:
        run_dir.receipt("STOPPED.json", receipt | {"by": stopped_by})
    what = f"finished {updates:,} updates" if done == updates else f"stopped by {stopped_by} after {done:,} updates"
    say(f"{what}, {tokens_seen:,} tokens | {run_dir.path / 'loss.png'}")


if __name__ == "__main__":
    main()
