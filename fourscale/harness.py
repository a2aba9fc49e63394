"""What lm-evaluation-harness scores (Gao et al., github.com/EleutherAI/lm-evaluation-harness): a model and its tasks.

The harness builds every request on every rank; `Dealt` deals the batches it makes of them over the ranks and hands all
answers to all. So worked examples, batches and scores are those of one process, whatever the number of ranks.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import tokenizers
import torch
import transformers
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from fourscale import checkpoint, hf, hfdir, localrows, rundir
from fourscale.agreement import first_line
from fourscale.cli import InputError, RunFailed
from fourscale.parallel import Topology
from fourscale.pretrained import Pretrained, open_pretrained

LOCAL = ("json", "csv", "parquet", "text", "arrow")  # data_path of tasks that need no hub


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The model that is scored, as transformers computes it, in fp32."""

    model: Any  # transformers.PreTrainedModel on the rank's device
    tokenizer: Any  # transformers.PreTrainedTokenizerFast
    about: dict[str, Any]  # for the result file: ckpt, update, digest


def locate(path: Path) -> Path:
    """Where the model of `path` is now: the step_N of a run, or the directory of a hub id. Raises InputError."""
    if hfdir.is_model(path) and not rundir.step_dirs(path):
        return path
    if path.exists() or not hfdir.may_be_hub_id(str(path)):
        return rundir.open_checkpoint(path).dir
    try:
        return hfdir.download(str(path))[0]
    except InputError as e:
        raise InputError(f"--ckpt {e}") from None


def load(path: Path, device: torch.device) -> Subject:
    """The model at a path of `locate`, on `device`: a checkpoint's, or of any family that transformers can score.
    Raises InputError."""
    if hfdir.is_model(path):
        return _from_directory(path, device)
    found = open_pretrained(path)
    tokenizer = their_tokenizer(found)
    return Subject(their_model(found).to(device), tokenizer, found.about)


def their_model(found: Pretrained) -> Any:
    """transformers' model of a checkpoint, fp32 on the CPU: what export_hf.py writes, without the files.

    Each of our tensors is let go as its counterpart is made, so memory holds one copy of the model.
    """
    ours = found.model("cpu")
    state, theirs = dict(ours.named_parameters()), {}
    del ours
    for name in list(state):
        theirs |= hf.to_hf({name: state.pop(name).detach()}, found.cfg)
    table = hf.hf_config(found.cfg, found.tokenizer().eot_id) | (_imported(found).get("special_ids") or {})
    config = transformers.AutoConfig.for_model(**table)
    kind = getattr(transformers, hf.architecture(found.cfg))
    return kind.from_pretrained(None, config=config, state_dict=theirs, dtype=torch.float32).eval()


def their_tokenizer(found: Pretrained) -> Any:
    """transformers' tokenizer of a checkpoint, as export_hf.py writes it: it adds no token to a text, as training never
    did; one that was imported is left as it came."""
    ours = found.tokenizer()
    spec = json.loads(ours.data)
    if not _imported(found):
        spec |= dict.fromkeys(("post_processor", "truncation", "padding"))
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    names = hf.tokenizer_config(ours.eot_token, found.cfg.ctx)
    del names["tokenizer_class"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _imported(found: Pretrained) -> dict[str, Any]:
    return found.ckpt.run.get("imported") or {}


def _from_directory(path: Path, device: torch.device) -> Subject:
    digest = hashlib.sha256()
    for name in hfdir.weight_files(file.name for file in path.iterdir()):
        if not name.endswith(".json"):
            digest.update(f"{name} {checkpoint.sha256_of(path / name)}\n".encode())
    hub_id, revision = hfdir.cached_from(path.resolve())
    about = {"ckpt": hub_id or str(path), "update": None, "digest": digest.hexdigest()}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except Exception as e:  # whatever it is, it is the directory's
        raise InputError(f"--ckpt {path}: transformers can't load it ({first_line(e)})") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        known = len(tokenizer.encode("The 3 of us.", add_special_tokens=False))
    except Exception as e:
        raise InputError(f"--ckpt {path}: no tokenizer that transformers can load ({first_line(e)})") from None
    if not known or tokenizer.eos_token_id is None:  # transformers 5 makes an empty one where its files are missing
        lacks = "its tokenizer names no eos_token" if known else "no tokenizer, or an empty one"
        raise InputError(f"--ckpt {path}: {lacks}; put the model's tokenizer.json and tokenizer_config.json there")
    return Subject(model.eval().to(device), tokenizer, about | ({"revision": revision} if revision else {}))


def hub_answers(timeout_s: float = 5.0) -> bool:
    """True if the Hugging Face hub can be asked; where it can't, its libraries are told so, or they try for minutes."""
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=timeout_s)
            return True
        except Exception:  # the HTTP client has changed between versions, and its errors with it
            huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


# ---- answers, dealt over the ranks -----------------------------------------------------------------------------------


class Dealt(HFLM):
    """The harness's own model class on every rank: each rank computes its share of the batches, all get all answers.

    The batches are those of one process, so loglikelihoods are the same for any number of ranks (rolling ones, of
    perplexity tasks, up to the rounding of other batches; sampled text depends on the ranks, greedy text doesn't).
    `truncated`: per task, the ids of documents that lost their beginning because they are longer than the context.
    """

    def __init__(self, subject: Subject, topology: Topology, batch_size: int):
        super().__init__(
            pretrained=subject.model,
            tokenizer=subject.tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype="bfloat16" if topology.dtype == "bf16" else None,
            softmax_dtype="float32",
        )
        self.topology = topology
        self.truncated: dict[str, set[int]] = {}
        self._asked: Sequence[Any] = ()

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        try:
            return super().tok_encode(string, *args, **kwargs)
        except Exception as e:
            if type(e) is not Exception:  # tokenizers raises the bare one
                raise
            raise InputError(
                f"--tasks: the model's tokenizer can't encode {string[:40]!r} ({first_line(e)}); a char tokenizer "
                "knows no characters but those of its corpus: use a model with another"
            ) from None

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._asked = requests
        return super().loglikelihood(requests, disable_tqdm=True)  # of a bar for tokenizing

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if override_bs is not None:  # one batch of loglikelihood_rolling, which deals by itself
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        self._check_lengths(requests)
        # The harness computes requests with the same tokens but the last once: such a group stays on one rank. Groups
        # go into batches by the length of their longest member, the first of these.
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            groups.setdefault(tuple(context + continuation[:-1]), []).append(i)

        def place(group: list[int]) -> tuple[int, tuple[int, ...]]:
            first = max(group, key=lambda i: len(requests[i][2]))
            tokens = tuple(requests[first][1] + requests[first][2])
            return -len(tokens), tokens

        mine = self._share(sorted(groups.values(), key=place))
        quiet = not self.topology.main
        answers = super()._loglikelihood_tokens([requests[i] for i in mine], disable_tqdm=quiet)
        whole = self._all(mine, answers, len(requests))
        if not all(math.isfinite(nats) for nats, _ in whole):
            raise RunFailed("--ckpt: its loglikelihoods are not finite; the run diverged, use an earlier step")
        return whole

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        mine = list(range(self.topology.rank, len(requests), self.topology.world_size))
        quiet = not self.topology.main
        answers = super().loglikelihood_rolling([requests[i] for i in mine], disable_tqdm=quiet)
        return self._all(mine, answers, len(requests))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        kinds: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault(repr(request.args[1]), []).append(i)
        length = [len(self.tok_encode(request.args[0])) for request in requests]
        for i, request in enumerate(requests):
            new = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise InputError(
                    f"--tasks {request.task_name}: answers of up to {new} tokens don't fit into the model's context of "
                    f"{self.max_length}; use a model with a longer one"
                )
            if length[i] > self.max_length - new:
                self.truncated.setdefault(request.task_name, set()).add(request.doc_id)
        mine: list[int] = []
        for kind in kinds.values():
            mine += self._share([[i] for i in sorted(kind, key=lambda i: (-length[i], requests[i].args[0]))])
        mine.sort()
        answers = super().generate_until([requests[i] for i in mine], disable_tqdm=not self.topology.main)
        return self._all(mine, answers, len(requests))

    def _share(self, groups: list[list[int]]) -> list[int]:
        """This rank's requests: every world_size-th batch of groups, in the order that they were asked in."""
        size, topology = self.batch_size, self.topology
        batches = [groups[at : at + size] for at in range(0, len(groups), size)]
        return sorted(i for batch in batches[topology.rank :: topology.world_size] for group in batch for i in group)

    def _all(self, mine: list[int], answers: list[Any], count: int) -> list[Any]:
        out: list[Any] = [None] * count
        for pairs in self.topology.gather(list(zip(mine, answers, strict=True))):
            for i, answer in pairs:
                out[i] = answer
        return out

    def _check_lengths(self, requests: list[Any]) -> None:
        """Count documents that the context can't hold. Raises InputError where an answer alone is longer than it."""
        ctx, long, longest = self.max_length, set(), 0
        for asked, (_, context, continuation) in zip(self._asked, requests, strict=True):
            if len(continuation) > ctx:
                long.add((asked.task_name, asked.doc_id))
                longest = max(longest, len(continuation))
            elif len(context) + len(continuation) > ctx + 1:
                self.truncated.setdefault(asked.task_name, set()).add(asked.doc_id)
        if long:
            raise InputError(
                f"--tasks {min(long)[0]}: {len(long)} documents have answers longer than the model's context of {ctx} "
                f"tokens (up to {longest}), which the harness can't score; use a model with a longer one"
            )


# ---- the tasks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tasks:
    """Tasks with their documents, ready to be scored."""

    manager: TaskManager
    tasks: dict[str, Task]  # every single one, by name
    groups: dict[str, Group]

    @property
    def asked(self) -> list[Task | Group]:
        """Those that no other holds: what simple_evaluate is given."""
        inner = {name for group in self.groups.values() for name in group.child_names}
        inner |= {task.task_name for group in self.groups.values() for task in group.get_all_tasks()}
        held = [*self.groups.items(), *self.tasks.items()]
        return [one for name, one in held if name not in inner]


def load_tasks(
    names: Sequence[str],
    include: Sequence[str],
    local: dict[str, Path],
    num_fewshot: int | None,
    limit: float | None,
    say: Callable[[str], None],
) -> Tasks:
    """Find the tasks and load their documents; of those in `local` (name -> file), from there. Raises InputError.

    num_fewshot and limit as simple_evaluate takes them; documents themselves are only looked at in local files.
    """
    manager = find(names, include, say)
    if any(_needs_hub(manager, name) for name in names if name not in local):
        hub_answers()
    specs: list[Any] = []
    for name in names:
        spec: Any = name
        if name in local:
            spec = localrows.config_on(_config(manager, name), local[name])
        try:
            loaded = manager.load([spec])
        except Exception as e:  # of the task's own code, of datasets, of the network
            if name in local:
                raise InputError(localrows.fault(spec, local[name], e)) from None
            raise InputError(_unloadable(manager, name, e)) from None
        for task in loaded["tasks"].values():
            shots = _check_fewshot(task, name, num_fewshot, name in local, say)
            if name in local:
                localrows.check_documents(task, local[name], None if shots else get_sample_size(task, limit))
        groups = loaded.get("groups", {})
        specs += Tasks(manager, loaded["tasks"], groups).asked
    try:
        loaded = manager.load(specs)
    except ValueError as e:  # one task asked for twice, itself or by its group
        raise InputError(f"--tasks {','.join(names)}: {first_line(e)}") from None
    return Tasks(manager, loaded["tasks"], loaded.get("groups", {}))


def find(names: Sequence[str], include: Sequence[str], say: Callable[[str], None]) -> TaskManager:
    """The harness's manager of tasks, with an index of the folders that `names` and what they refer to stand in.

    Its own index of all 14,000 task files takes half a minute; a look for a name takes a second. Raises InputError for
    a name that is none, with those nearest to it.
    """
    asked = {name for name in names if not Path(name).is_file()}
    manager = TaskManager(include_path=list(include), include_defaults=False)
    missing = _missing(manager, asked)
    if not missing:
        return manager
    spec = importlib.util.find_spec("lm_eval.tasks")
    root = Path(spec.submodule_search_locations[0])
    places = _named(root)
    folders: set[str] = set()
    while missing:
        new = {folder for name in missing for folder in places.get(name, ())} - folders
        if not new:
            break
        folders |= new
        # The harness lets a later folder win, and within one the first file by name.
        paths = [root / folder for folder in sorted(folders, reverse=True)]
        manager = TaskManager(include_path=[*paths, *include], include_defaults=False)
        missing = _missing(manager, asked)
    if missing and all(_mentioned(root, name) for name in missing):
        say("note: building the harness's index of all tasks, about half a minute")
        manager = TaskManager(include_path=list(include))
        missing = [name for name in _missing(manager, asked) if name in asked]
    if missing:
        known = {*places, *manager.all_tasks}
        near = difflib.get_close_matches(missing[0], known, n=4) or sorted(n for n in known if missing[0] in n)[:4]
        hint = f"nearest: {', '.join(near)}" if near else "see lm_eval ls tasks"
        raise InputError(f"--tasks {missing[0]}: the harness has no such task ({hint}); own ones need --include-path")
    return manager


# A line that gives a task, group or tag its name, or lists one: 'task: piqa', '  - arc_easy', '- task: mmlu'.
NAMING = re.compile(
    r"""^[ \t]*(?:-[ \t]*)?["']?(?:(?:task|group|tag)["']?[ \t]*:[ \t]*["']?)?"""
    r"""([^\s"'#:,\[\]{}]+)["']?[ \t]*(?:\#.*)?$""",
    re.MULTILINE,
)


@functools.cache
def _named(root: Path) -> dict[str, set[str]]:
    """What may be the name of a task, group or tag -> the folders of `root` whose files write it."""
    places: dict[str, set[str]] = {}
    for path in _definitions(root):
        folder = path.relative_to(root).parts[0]
        for name in NAMING.findall(path.read_text(encoding="utf-8", errors="replace")):
            places.setdefault(name, set()).add(folder)
    return places


def _definitions(root: Path) -> Iterator[Path]:
    """YAML files, and those without a suffix (`_template_yaml`) that they include."""
    return (path for path in root.rglob("*") if path.suffix in (".yaml", "") and path.is_file())


def _mentioned(root: Path, name: str) -> bool:
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return any(word.search(path.read_text(encoding="utf-8", errors="replace")) for path in _definitions(root))


def _missing(manager: TaskManager, names: set[str]) -> list[str]:
    """Those of `names`, and of what their groups refer to, that the index lacks."""
    missing, seen, todo = [], set(), sorted(names)
    while todo:
        name = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        entry = manager.task_index.get(name)
        if entry is None:
            missing.append(name)
            continue
        for child in _children(entry):
            if isinstance(child, str):
                todo.append(child)
            elif "group" in child and "task" in child:  # a group of its own, defined within
                todo += [c for c in child["task"] if isinstance(c, str)]
            elif "dataset_path" not in child:  # otherwise a task of its own
                todo.append(child.get("task") or child["group"])
    return missing


def _children(entry: Any) -> list[Any]:
    task = (entry.cfg or {}).get("task")
    return task if isinstance(task, list) else []


def _config(manager: TaskManager, name: str) -> dict[str, Any]:
    """A single task's YAML with its functions. Raises InputError for a group, a tag or a task in Python."""
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None or entry.kind.name != "TASK":
        what = "a file" if entry is None else {"PY_TASK": "a task in Python"}.get(entry.kind.name, "several tasks")
        raise InputError(f"--offline-data {name}=...: {name} is {what}; name a single task that a YAML file defines")
    return load_yaml(entry.yaml_path)


def _needs_hub(manager: TaskManager, name: str) -> bool:
    entry = manager.task_index.get(name)
    path = (entry.cfg or {}).get("dataset_path") if entry is not None else None
    return not (path in LOCAL or (path is not None and Path(path).exists()))


def _unloadable(manager: TaskManager, name: str, e: Exception) -> str:
    entry = manager.task_index.get(name)
    source = (entry.cfg or {}).get("dataset_path") if entry is not None else None
    hub = (datasets.exceptions.DatasetsError, huggingface_hub.errors.OfflineModeIsEnabled, OSError)
    if isinstance(e, hub) and datasets.config.HF_HUB_OFFLINE and source not in LOCAL:
        single = entry is not None and entry.kind.name == "TASK"
        way = f", or give the rows as --offline-data {name}=FILE.jsonl" if single else ""
        return (
            f"--tasks {name}: {source or 'a data set of it'} is not in this machine's cache and the Hugging Face hub "
            f"can't be reached; connect to the network{way}"
        )
    return f"--tasks {name}: the harness can't load it: {localrows.described(e)}"


def _check_fewshot(task: Task, name: str, asked: int | None, local: bool, say: Callable[[str], None]) -> int:
    """The number of worked examples. Raises InputError where the task has too few documents to choose them from."""
    own = task.get_config("num_fewshot")
    if asked is not None and own == 0 and asked:
        say(f"note: {task.task_name} is defined without worked examples: --num-fewshot {asked} does not apply to it")
    count = own if asked is None or own == 0 else asked
    if not count:
        return 0
    pool = len(task.sampler.df) if hasattr(task, "sampler") else None
    same = local and not task.fewshot_cfg.samples
    if pool is not None and pool < count + same:
        more = f"give more rows as --offline-data {name}=FILE, or " if local else ""
        own_number = " (its own)" if count == own else ""
        raise InputError(
            f"--num-fewshot {count}{own_number}: {task.task_name} has {pool} documents to choose worked examples from; "
            f"{more}ask for fewer"
        )
    if same and task.OUTPUT_TYPE != "loglikelihood_rolling":  # which has no place for them
        say(f"note: {task.task_name}: worked examples come from the same rows, never the one that is asked")
    return count


def chance(task: Task) -> float | None:
    """Expected accuracy of a guess: the mean over scored documents of right choices / choices; None where the metric
    isn't the harness's own choice of one answer. The requests must have been built."""
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice" or task.config.process_results:
        return None
    shares = []
    for doc in {instance.doc_id: instance.doc for instance in task.instances}.values():
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        right = len(set(gold)) if isinstance(gold, list) else 1
        shares.append(right / len(task.doc_to_choice(doc)))
    return sum(shares) / len(shares)
