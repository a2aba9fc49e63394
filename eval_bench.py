"""lm-evaluation-harness tasks on a checkpoint, with the score of a guess beside each accuracy.

    python eval_bench.py --ckpt ./ckpt --tasks hellaswag
    python eval_bench.py --ckpt ./ckpt_hf --tasks hellaswag,arc_easy --limit 200       # any Hugging Face directory
    python eval_bench.py --ckpt ./ckpt --tasks hellaswag --offline-data hellaswag=tests/hellaswag/val_200.jsonl
    torchrun --nproc_per_node=8 eval_bench.py --ckpt ./ckpt --tasks mmlu --num-fewshot 5 --out ./scores

A checkpoint needs no export: its weights go into transformers' class in memory, and its scores are those of the export
to the last digit. Every rank holds the whole model and takes its share of the batches; scores don't depend on how many
ranks there are. Tasks, prompts, metrics and standard errors are the harness's own.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourscale.cli import InputError, door, is_rank_zero, parse
from fourscale.flags import BenchmarkConfig

if TYPE_CHECKING:
    from lm_eval.loggers import EvaluationTracker

    from fourscale.harness import Dealt, Tasks

GUESSED = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")  # metrics that a guess reaches by chance
SIGNIFICANCE = 0.05
FEW = 100  # documents


def quieten() -> None:
    """Leave one progress bar and errors of what the harness and its libraries print. Call it before they are imported.

    tqdm takes its defaults from the environment.
    """
    os.environ.setdefault("TQDM_DELAY", "1")
    os.environ.setdefault("TQDM_MININTERVAL", "0.2" if sys.stderr.isatty() else "10")  # a log file wants few lines
    if not is_rank_zero():
        os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or each process of a bootstrap warns
    import logging
    import warnings

    for name in ("lm_eval", "accelerate", "huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    import datasets
    from transformers.utils import logging as theirs

    datasets.disable_progress_bars()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    if not any((place / ".git").exists() for place in (Path.cwd(), *Path.cwd().parents)):
        from lm_eval import evaluator

        evaluator.get_git_commit_hash = lambda: None  # it asks git, which says "fatal" outside of a repository


def evaluate(cfg: BenchmarkConfig, tasks: Tasks, lm: Dealt, tracker: EvaluationTracker | None = None) -> Any:
    """The harness's own results of `tasks` (simple_evaluate's dict); on ranks but the first, None or without errors."""
    from lm_eval import simple_evaluate

    seeds = cfg.seeds()
    return simple_evaluate(
        model=lm,
        model_args={"pretrained": str(cfg.ckpt)},  # for the result file alone
        tasks=tasks.asked,
        num_fewshot=cfg.num_fewshot,
        batch_size=cfg.batch_size,
        device=str(lm.device),
        limit=cfg.limit,
        bootstrap_iters=100_000 if lm.topology.main else 0,  # the harness's own number
        log_samples=cfg.log_samples,
        evaluation_tracker=tracker,
        task_manager=tasks.manager,
        random_seed=seeds[0],
        numpy_random_seed=seeds[1],
        torch_random_seed=seeds[2],
        fewshot_random_seed=seeds[3],
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(results: dict[str, Any], tasks: Tasks, chances: dict[str, float | None]) -> list[dict[str, Any]]:
    """A row for each metric of each task and group, in the harness's order.

    task, num_fewshot, documents, metric, score, standard_error, chance, p (of the score or one less likely if every
    answer were a guess; None where there is no chance level, and for groups).
    """
    rows = []
    for name, table in results["results"].items():
        for key, score in table.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(score, int | float):
                continue
            error = table.get(f"{metric}_stderr,{filtered}")
            count = table["sample_len"]
            level = None
            if metric in GUESSED:
                level = chances[name] if name in chances else group_chance(results, tasks, name, key, chances)
            p = None if level is None or name not in chances else binomial_p(round(score * count), count, level)
            rows.append(
                {
                    "task": name,
                    "num_fewshot": results["n-shot"].get(name),
                    "documents": count,
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "score": score,
                    "standard_error": error if isinstance(error, int | float) and math.isfinite(error) else None,
                    "chance": level,
                    "p": p,
                }
            )
    return rows


def group_chance(
    results: dict[str, Any], tasks: Tasks, name: str, key: str, chances: dict[str, float | None]
) -> float | None:
    """A guess's score in a group, put together from its tasks as the harness does theirs; None where one has none."""
    group, metric = tasks.groups[name], key.partition(",")[0]
    inner = [task.task_name for task in group.get_all_tasks() if key in results["results"].get(task.task_name, {})]
    levels = [chances[task] for task in inner]
    if not levels or None in levels:
        return None
    rule = next((rule for rule in group.aggregate_metric_list or [] if rule.metric == metric), None)
    by_size = rule is None or rule.weight_by_size
    sizes = [results["results"][task]["sample_len"] if by_size else 1 for task in inner]
    return math.fsum(level * size for level, size in zip(levels, sizes, strict=True)) / sum(sizes)


def binomial_p(hits: int, count: int, chance: float) -> float:
    """Two-sided exact binomial p-value of `hits` right guesses in `count`.

    Where documents differ in their number of choices, `chance` is the mean and the test is on the safe side: the
    variance is then smaller (Hoeffding 1956, Ann. Math. Statist. 27, 713).
    """
    from scipy.stats import binomtest

    return float(binomtest(hits, count, chance).pvalue)


def needed(count: int, chance: float) -> float | None:
    """The lowest score above chance that is distinguishable from it with `count` documents; None where none is."""
    low, high = math.ceil(count * chance), count + 1  # the p-value falls from the mean on
    while low < high:
        middle = (low + high) // 2
        if middle > count or binomial_p(middle, count, chance) <= SIGNIFICANCE:
            high = middle
        else:
            low = middle + 1
    return None if low > count else low / count


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each score that may be luck, and one for the tasks of few documents."""
    for row in rows:
        name, score, level, error = f"{row['task']} {row['metric']}", row["score"], row["chance"], row["standard_error"]
        if level is None:
            continue
        said = f"note: {name} {score:.4f} is not distinguishable from chance ({level:.4f})"
        if row["p"] is not None and row["p"] > SIGNIFICANCE:
            enough = needed(row["documents"], level)
            takes = "no score would be" if enough is None else f"it takes {enough:.4f}"
            yield f"{said}: exact binomial test, p = {row['p']:.2f}; with {row['documents']:,} documents {takes}"
        elif row["p"] is None and error is not None and abs(score - level) < 1.96 * error:
            yield f"{said}: within 1.96 standard errors of it"
    if few := {row["task"]: row["documents"] for row in rows if row["documents"] < FEW}:
        counts = ", ".join(f"{name} {count}" for name, count in few.items())
        yield f"note: few documents ({counts}): rough figures, and so are their standard errors"


def render(rows: list[dict[str, Any]]) -> str:
    """The figures as a table for a reader."""
    head = ("task", "shots", "documents", "metric", "score", "+-", "chance")
    lines = [head]
    for before, row in zip([None, *rows], rows, strict=False):
        new = before is None or before["task"] != row["task"]
        shots = "" if row["num_fewshot"] is None else str(row["num_fewshot"])
        first = (row["task"], shots, f"{row['documents']:,}") if new else ("", "", "")
        numbers = (row["score"], row["standard_error"], row["chance"])
        lines.append((*first, row["metric"], *("" if x is None else f"{x:.4f}" for x in numbers)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = {1, 2, 4, 5, 6}
    cells = (
        [text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in cells)


# ---- files -----------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any], samples: dict[str, Any] | None, cfg: BenchmarkConfig, tracker: Any) -> list[Path]:
    """The harness's results to --json, and below --out by its own tracker. Returns the files."""
    from lm_eval.utils import handle_non_serializable

    written = []
    if cfg.out is not None:
        cfg.out.mkdir(parents=True, exist_ok=True)
        before = set(cfg.out.rglob("*.json*"))
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in samples or {}:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        written = sorted(set(cfg.out.rglob("*.json*")) - before)
        if len(written) != 1 + len(samples or {}):  # the tracker logs what goes wrong, and goes on
            raise InputError(f"--out {cfg.out}: the harness could not write its results there; is there room?")
    if cfg.json is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        cfg.json.write_text(text + "\n", encoding="utf-8")
        written.append(cfg.json)
    return written


@door
def main() -> None:
    cfg = parse(BenchmarkConfig)
    cfg.check()
    try:
        quieten()
        from lm_eval.loggers import EvaluationTracker

        from fourscale import harness
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        if missing in ("lm_eval", "accelerate"):
            raise InputError(f"eval_bench.py needs {missing}; run: pip install 'lm-eval[hf]'") from None
        raise
    import torch

    from fourscale import parallel
    from fourscale.checkpoint import sha256_of

    topology = parallel.start("ddp", cfg.backend, cfg.device, cfg.dtype)
    say = (lambda line: print(line, flush=True)) if topology.main else (lambda line: None)
    local = cfg.local_data()
    names = list(dict.fromkeys(cfg.tasks.split(",")))
    # Rank 0 says which checkpoint is the latest: a run that goes on may publish another while ranks look.
    path = Path(topology.from_main(lambda: str(harness.locate(cfg.ckpt))))
    found: list[Tasks] = []

    def load_tasks() -> None:
        found.append(harness.load_tasks(names, cfg.include_path, local, cfg.num_fewshot, cfg.limit, say))

    topology.from_main(load_tasks)  # first: it downloads, and its error is the one line that must be out
    if not topology.main:
        load_tasks()
    (tasks,) = found
    subject = harness.load(path, topology.device)
    lm = harness.Dealt(subject, topology, cfg.batch_size)
    where = f"{topology.dtype} on {topology.world_size} x {topology.device.type}"
    say(f"{subject.about['ckpt']}: {', '.join(names)}; {where}")

    tracker = EvaluationTracker(output_path=None if cfg.out is None else str(cfg.out))
    results = evaluate(cfg, tasks, lm, tracker)
    if topology.main:
        chances = {name: harness.chance(task) for name, task in tasks.tasks.items()}
        rows = figures(results, tasks, chances)
        truncated = {name: len(documents) for name, documents in sorted(lm.truncated.items())}
        results["fourscale"] = subject.about | {
            "scores": rows,
            "truncated": truncated,
            "offline_data": {name: {"file": str(f), "sha256": sha256_of(f)} for name, f in local.items()},
            "dtype": topology.dtype,
            "world_size": topology.world_size,
            "torch": torch.__version__,
        }
        samples = results.pop("samples", None)
        say(render(rows))
        for line in verdicts(rows):
            say(line)
        for name, count in truncated.items():
            say(
                f"note: {name}: {count:,} of {results['results'][name]['sample_len']:,} documents are longer than the "
                f"context of {lm.max_length:,} tokens and lost their beginning"
            )
        for file in write(results, samples, cfg, tracker):
            say(f"wrote {file}")
    del lm, subject
    parallel.stop(topology)


if __name__ == "__main__":
    main()
