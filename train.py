"""Train a language model: one script on a laptop, one GPU, a node and a cluster.

    python train.py --data ./data                                             # one process, sized to the device
    torchrun --nproc_per_node=2 train.py --data ./data --backend gloo --steps 500
    torchrun --nproc_per_node=8 train.py --data ./data --parallel fsdp --ctx 1024 --local-bsz 16 --grad-accum 4
    torchrun --nproc_per_node=8 train.py --data ./data --parallel fsdp --resume auto      # goes on, on any ranks
    torchrun --nproc_per_node=8 train.py --branch-from ckpt/step_9000 --ckpt-dir ./anneal --schedule wsd --steps 12000
    python train.py --init-from openai-community/gpt2 --data ./data --ckpt-dir ./tuned --lr 3e-5    # weights alone
    python train.py --data ./web:0.7 --data ./code:0.3                        # two data sets, mixed by share of samples
    python train.py --config launch/gpt2-124m.toml --plan --gpu H100          # what it takes, before it is started
    torchrun --nproc_per_node=2 train.py --data ./data --preflight            # seconds that may save days

Read it from top to bottom: flags, group, data, contract, model, the loop, the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fourscale import __version__
from fourscale.cli import InputError, RunFailed, door, importing
from fourscale.config import TrainConfig, layered

if TYPE_CHECKING:
    from fourscale.parallel import StopRequest, Topology
    from fourscale.publish import RunDir


@door
def main() -> None:
    # ---- 1. flags: usage errors end here, before torch is imported -------------------------------------------------
    flags = layered(TrainConfig())
    if flags.plan and flags.measure is None:
        from fourscale import planning

        return planning.show(flags)
    with importing():
        import torch._dynamo  # noqa: F401 (the first optimizer imports it anyway)

        from fourscale import origins, parallel

    flags = origins.recall(flags)
    topology = parallel.start(
        flags.parallel,
        flags.backend,
        flags.device,
        flags.dtype,
        flags.shard_size,
        flags.timeout,
        flags.expect_world_size,
    )
    try:
        code = pretrain(flags, topology)
    except (RuntimeError, OSError) as e:
        raise parallel.explained(topology, e) from None
    parallel.stop(topology)
    sys.exit(code)


def pretrain(flags: TrainConfig, topology: Topology) -> int:
    """Claim the run directory and train in it, or try out what was asked on a copy; the exit code."""
    from fourscale import cli, lrfind, nodes, parallel, planning, preflight, publish

    if flags.plan:
        return planning.measured(flags, topology, train)
    if flags.preflight:
        return preflight.check(flags, topology, train)
    if flags.lr_find:
        return lrfind.sweep(flags, topology, train)
    say = cli.say if topology.main else lambda line: None
    stop_request = parallel.StopRequest()
    finished = flags.ckpt_dir / "DONE.json"
    if flags.resume != "never" and topology.from_main(finished.is_file):
        say(
            f"{finished}: this run is finished; nothing to do, and the other flags were not looked at "
            "(--branch-from goes on from it in another --ckpt-dir)"
        )
        return 0
    run_dir = publish.RunDir(flags.ckpt_dir, topology)
    try:
        code = train(flags, topology, run_dir, stop_request, say)
    except InputError:
        run_dir.abandon()
        raise
    run_dir.close()
    # Exit code 0 would end the job on nodes that stay while another one was asked to leave.
    return 1 if nodes.goes_on(stop_request.name is not None, topology.gather) else code


def train(
    flags: TrainConfig, topology: Topology, run_dir: RunDir, stop_request: StopRequest, say: Callable[[str], None]
) -> int:
    import torch

    from fourscale import (
        budget,
        checkpoint,
        corpus,
        heldout,
        metrics,
        optim,
        origins,
        parallel,
        plots,
        profiling,
        rundir,
        samples,
        saving,
        schedule,
        target,
        telemetry,
        trackers,
    )
    from fourscale.model import GPT, IGNORE
    from fourscale.order import supervised, update_rows

    # ---- 2. where to go on from ------------------------------------------------------------------------------------
    ckpt = run_dir.resume_point(flags.resume, flags.resume_step)
    parent = None if ckpt else origins.branch_point(flags, topology)  # of a branch's first start
    before = ckpt or parent  # where weights, optimizer and clock come from
    source = None if ckpt else origins.start_point(flags, topology)  # where weights alone come from

    # ---- 3. data ---------------------------------------------------------------------------------------------------
    data = corpus.of_flags(flags, ckpt.run if ckpt else None)

    # ---- 4. the plan and the contract: what this run is, for good --------------------------------------------------
    device_type = topology.device.type
    origin = origins.origin_of(ckpt, parent)
    plan = budget.plan(flags, data.vocab_size, topology.world_size, device_type, topology.dtype, data.eot_id, origin)
    cfg, ctx, world, updates = plan.cfg, plan.cfg.model.ctx, topology.world_size, plan.updates
    schedule.check_schedule(updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
    order = data.order(ctx, cfg.data_seed, cfg.sampling)
    sampler = samples.Sampler(run_dir, data.tokenizer, cfg.sample_tokens if cfg.eval_every else 0, cfg.sample_prompt)
    attempt = origins.attempt_entry(run_dir.attempt, plan, data, topology, before.step["update"] if before else 0)
    run = {
        "format": rundir.FORMAT,
        "model": dataclasses.asdict(cfg.model),
        "tokenizer": data.tokenizer.entry() if data.tokenizer else None,
        "data": data.contract(),
        "training": plan.training_table(),
        "baselines": data.baselines(),
        "config": rundir.as_table(dataclasses.replace(cfg, **data.absolute)),
        "attempts": [*(ckpt.run["attempts"] if ckpt else []), attempt],
    }
    changed = rundir.reconcile(run_dir.path, ckpt, run) if ckpt else []
    if ckpt is not None:
        run |= {k: ckpt.run[k] for k in ("origin", "init") if k in ckpt.run}
    if parent is not None:
        run["origin"] = origins.origin_entry(parent, run)
    if source is not None:
        run["init"] = topology.from_main(lambda: origins.init_entry(source, cfg, data.tokenizer))
    begun = run["origin"] if parent else run["init"] if source else {}
    verification = corpus.Verification(data, cfg.verify_data, topology, lambda: stop_request.name is not None)
    run_dir.write_contract(run, None if ckpt else data.tokenizer)
    epochs_told = data.told(order.epochs(plan.token_budget / ctx))
    say(f"fourscale {__version__} | {rundir.headline(plan, attempt, flags.model, epochs_told)} | {run_dir.path}")
    for note in [*data.notes, *changed, *begun.get("differences", [])]:
        say(f"note: {note}")
    if ckpt is None and topology.main and (run_dir.path / "metrics.jsonl").is_file():
        say("note: an earlier attempt ended here before its first checkpoint; this one begins anew")
    if changed and topology.main:
        run_dir.event("changed", update=before.step["update"], what=changed)

    # ---- 5. model and optimizer, with weights from the seed or a checkpoint ----------------------------------------
    with torch.device("meta"):
        raw = GPT(cfg.model, cfg.act_ckpt)
    compiled, told = parallel.compile_blocks(raw, topology, cfg.local_bsz) if cfg.compile else (False, None)

    def set_weights() -> None:
        if source is None:
            return raw.init_weights(cfg.seed)
        source.fill(dict(raw.named_parameters()), topology.publish_group)
        say(f"weights of {source.path}")

    parallel.return_large_blocks(topology, 4 * cfg.local_bsz * ctx * cfg.model.d_model)
    model = parallel.build(raw, set_weights, topology)
    if compiled:
        told += f", the rest in {parallel.warm_up(model, topology, cfg.local_bsz, ctx):.1f} s, apart from ms/step"
    if told:
        say(told)
    optimizers = optim.build(raw, cfg.optimizer, cfg.weight_decay, cfg.beta1, cfg.beta2, cfg.muon_dtype)
    meter = telemetry.Meter(
        run_dir.path,
        topology,
        updates,
        budget.flops_per_token(cfg.model),
        budget.peak_flops(attempt["device"], cfg.dtype, cfg.peak_tflops),
        run_dir.event,
        run_dir.assert_writer,
        budget.price_of(cfg.price).per_hour if cfg.price else None,
    )

    def tensors() -> dict[str, torch.Tensor]:
        return checkpoint.model_tensors(raw) | checkpoint.optimizer_tensors(raw, optimizers)

    done, tokens_seen, history = origin.update, origin.tokens, {}
    if before is not None:
        checkpoint.load(before.dir, tensors(), topology.publish_group)
        history = before.step
        done, tokens_seen, meter.skipped = history["update"], history["tokens"], history["skipped"]
        meter.skipped_in_a_row = history.get("skipped_in_a_row", 0)
        say(f"{'resumed' if ckpt else 'branched'} from {before.dir.name}: {tokens_seen:,} tokens seen")
    guard = optim.Guard(topology.device, cfg.skip_spikes, history.get("guard"))
    scaler = optim.gradient_scaler(topology.dtype, topology.device, world, history.get("scaler"))
    meter.spent = topology.from_main(lambda: telemetry.spent_before(run_dir.path, meter.price))
    for stem in ("metrics", "samples"):
        topology.from_main(lambda stem=stem: metrics.rewind(run_dir.path, done, stem))
    aim = target.Target(run_dir.path, topology, cfg.target_loss, cfg.stop_when)
    saver = saving.Saver(run_dir, cfg.keep, cfg.keep_every, cfg.async_ckpt, cfg.max_save_failures)
    for note in saver.check_space(tensors()):
        say(f"note: {note}")

    # ---- 6. the loop: accumulate, one denominator, backward, clip, guard, step -------------------------------------
    my_rows = update_rows(cfg.global_bsz, world, topology.rank, cfg.local_bsz, cfg.grad_accum)  # [A, B]
    eval_starts = [heldout.eval_starts(p.val.total, ctx, int(cfg.eval_tokens * p.weight)) for p in data.parts]
    positions = torch.arange(ctx)

    def load(i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs and targets of update i for this rank, int64 [A, B, ctx] each, and how many targets are supervised."""
        rows = my_rows.ravel()
        lengths = torch.from_numpy(supervised(rows, plan.token_budget - plan.tokens(i), ctx, cfg.global_bsz))
        parts, starts = order.starts(plan.samples(i) + rows % cfg.global_bsz)
        tokens = torch.from_numpy(data.windows(parts, starts, ctx + 1)).view(*my_rows.shape, ctx + 1)
        mask = positions >= lengths.view(*my_rows.shape, 1)  # padding rows, and what lies beyond the token budget
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].masked_fill(mask, IGNORE)
        if topology.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs, targets, int(lengths.sum())

    def asked_to_stop() -> bool:
        return stop_request.name is not None

    @contextlib.contextmanager
    def damage_on_record() -> Iterator[None]:
        """The data turned out to be damaged: what this attempt has saved is not gone on from."""
        try:
            yield
        except InputError as e:
            attempt["damaged_data"] = str(e)
            run_dir.amend(run)
            raise

    def evaluate() -> dict[str, Any] | None:
        scores = {}
        with meter.off_the_clock("eval"):
            for part, starts in zip(data.parts, eval_starts, strict=True):
                score = heldout.score(
                    model, part.val, ctx, starts, cfg.local_bsz, topology, asked_to_stop=asked_to_stop
                )
                if score is None:
                    return say(f"step {done} | the held-out loss was left off: a rank is asked to stop")
                scores[part.name] = score
            score, losses = heldout.pooled(scores.values()), {name: s.loss for name, s in scores.items()}
            each = "".join(f" | {name} {loss:.4f}" for name, loss in losses.items()) if data.mixed else ""
            say(f"step {done} | val loss {score.loss:.4f} | val ppl {score.perplexity:.2f}{each}")
            sampler.write(done, raw)
        return telemetry.held_out_fields(score.loss, losses)

    def save() -> None:
        with meter.off_the_clock("save"):
            meter.flush(aloud=False, durable=True)
            step = {"update": done, "tokens": tokens_seen, "samples_seen": plan.samples(done)}
            step |= {"applied": done - meter.skipped, "skipped": meter.skipped, "val_loss": None}
            step |= {"skipped_in_a_row": meter.skipped_in_a_row, "guard": guard.mean()}
            step |= {"scaler": optim.scaler_state(scaler, world)}
            saver.begin(tensors(), step | (held_out or {}))

    held_out = {k: ckpt.step[k] for k in ("val_loss", "val_losses") if k in ckpt.step} if ckpt else {}
    held_out = held_out if held_out.get("val_loss") is not None else None
    stop_at = min(updates, cfg.stop_after or updates)
    stopped_by = f"--stop-after {stop_at}" if stop_at < updates else None
    if ckpt and done < stop_at and (why := aim.look(done)):  # started again after it had stopped by itself
        stop_at, stopped_by = done, why
    quiet_every = min(cfg.log_every, cfg.skip_limit)  # the host hears of dropped updates at least this often
    saved_at = time.monotonic()
    loader = ThreadPoolExecutor(max_workers=1)  # the next update is read while this one is computed
    upcoming = loader.submit(load, done) if done < stop_at else None
    following = trackers.Trackers(cfg.tracker if topology.main else (), run_dir, done, resumed=ckpt is not None)
    profiling.attach(cfg, stop_at - done, meter, model, optimizers, topology, run_dir.path)
    meter.begin(done, tokens_seen, cfg.progress)
    while done < stop_at:
        waited = time.monotonic()
        meter.phase("data wait")  # for --profile, as others below
        inputs, targets, count = upcoming.result()
        data_ms = 1e3 * (time.monotonic() - waited)
        meter.phase("rest")
        upcoming = loader.submit(load, done + 1) if done + 1 < stop_at else None

        # One small message an update: supervised tokens of all ranks; is anyone asked to stop; are anyone's data wrong;
        # on how many ranks is the save in flight written; is the next one due by rank 0's clock.
        late = topology.main and cfg.ckpt_minutes and time.monotonic() - saved_at >= 60 * cfg.ckpt_minutes
        message = [count, asked_to_stop(), verification.failed, saver.ready, bool(late)]
        count, asked, damaged, ready, late = (int(x) for x in topology.all_sum(message))
        if damaged:
            with damage_on_record():
                verification.refuse()
        if saver.in_flight and ready == world:
            with meter.off_the_clock("save"):
                saver.finish()
        if asked:
            stopped_by = stop_request.name or "a signal to another rank"
            break

        began = time.monotonic() - data_ms / 1e3
        lr = schedule.learning_rate(done, updates, cfg.warmup, cfg.lr, cfg.min_lr, cfg.schedule, cfg.decay_fraction)
        optim.set_lr(optimizers, lr)
        instants = [meter.instant("rest")]  # on the device's clock: nothing waits for it
        model.zero_grad(set_to_none=True)
        own_loss = torch.zeros((), device=topology.device)
        for m in range(cfg.grad_accum):
            if cfg.model.dropout > 0:
                parallel.seed_dropout(topology, cfg.seed, done, m)
            x = inputs[m].to(topology.device, non_blocking=True)  # [B, T]
            y = targets[m].to(topology.device, non_blocking=True)
            with parallel.accumulate(model, m == cfg.grad_accum - 1, topology, cfg.grad_sync):
                with topology.autocast():
                    loss_sum = model(x, y)  # [], nats: over all supervised tokens
                if m == cfg.grad_accum - 1:  # under DDP, nothing was waited for so far: what slow ranks differ by
                    own_ms = 1e3 * (time.monotonic() - began)
                # DDP and FSDP average over ranks: times world_size, over the global count, is the mean over all tokens.
                scaler.scale(loss_sum * (world / count)).backward()
            own_loss += loss_sum.detach()
        instants.append(meter.instant("clip"))
        optim.unscale(scaler, optimizers)
        norm = parallel.clip_gradients(model, cfg.clip)
        loss = topology.sum_on_device(own_loss.clone()) / count
        skipped = guard.judge(loss, norm)  # on the device, the same on all ranks
        optim.step(optimizers, skipped)
        scaler.update()
        instants.append(meter.instant("rest"))
        ids = (plan.samples(done), plan.samples(done + 1))
        tokens_seen += count
        done += 1
        epochs = data.by_name(order.epochs(plan.samples(done)))
        meter.add(
            telemetry.Pending(
                done, tokens_seen, count, lr, epochs, ids, data_ms, own_ms, loss, own_loss, norm, skipped, instants
            )
        )

        due = cfg.eval_every and (done == updates or done % cfg.eval_every == 0)
        held_out = evaluate() if due else None
        aloud = due or done == stop_at or done % cfg.log_every == 0 or done == 1
        if aloud or done % quiet_every == 0:
            meter.flush(held_out, aloud=bool(aloud))
        if done == 1 and (fault := telemetry.first_loss_fault(meter.newest_loss, cfg.model.vocab_size, bool(source))):
            say(f"note: step 1: {fault}")
        val_loss = (held_out or {}).get("val_loss")
        best = cfg.save_best and val_loss is not None and (saver.best is None or val_loss < saver.best[1])
        if cfg.ckpt_minutes or 0 < cfg.ckpt_every < stop_at:
            saver.reserve(tensors)
        if (cfg.ckpt_every and done % cfg.ckpt_every == 0) or late or best:
            save()
            saved_at = time.monotonic()
        if held_out:
            with meter.off_the_clock("eval"):
                why = aim.look(done)
            if why:
                stopped_by = why
                break
        if meter.longest_streak >= cfg.skip_limit:
            raise RunFailed(
                f"step {done}: {meter.longest_streak} updates in a row were dropped (--skip-limit), see "
                f"{run_dir.path / 'events.jsonl'}; what is saved is sound: lower --lr or look at the data"
            )

    # ---- 7. the end: a checkpoint, a receipt, the curve -----------------------------------------------------------
    loader.shutdown(cancel_futures=True)
    meter.end()
    with damage_on_record():
        verified = verification.close(patient=done == stop_at)
    saver.finish()
    unscored = done == updates and cfg.eval_every and held_out is None
    if unscored and not topology.all_sum([asked_to_stop()])[0]:  # a run that was stopped in its last evaluation
        held_out = evaluate()
        unscored = held_out is None
    if done > origin.update:
        meter.flush()
        if topology.main and meter.unwritten:
            say(f"note: {meter.unwritten} rows found no room in {run_dir.path / 'metrics.jsonl'}")
        if saver.saved != done:
            save()
        saver.finish(final=True)
    topology.from_main(lambda: plots.plot_loss(run_dir.path))
    receipt = {"update": done, "updates": updates, "tokens": tokens_seen, "skipped": meter.skipped, "val_loss": None}
    receipt |= (held_out or {}) | verified
    complete = done == updates and not unscored
    if complete:
        receipt["digest"] = topology.from_main(
            lambda: rundir.digest(rundir.open_checkpoint(run_dir.path / f"step_{done}"))
        )
        run_dir.receipt("DONE.json", receipt)
    else:
        stopped_by = stopped_by or stop_request.name or "a signal to another rank"
        run_dir.receipt("STOPPED.json", receipt | {"by": stopped_by})
    following.close()
    if saver.saved is None:
        say(f"stopped by {stopped_by} before the first update: there is nothing to save")
        return 130
    what = f"finished {updates:,} updates" if complete else f"stopped by {stopped_by} after {done:,} updates"
    say(f"{what}, {tokens_seen:,} tokens | {run_dir.path / 'loss.png'}")
    return 0


if __name__ == "__main__":
    main()
