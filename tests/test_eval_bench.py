"""Benchmarks: a checkpoint, its export and any number of ranks score alike, on the harness's own definitions."""

import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, environment, one_error, run

os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported

import transformers

import eval_bench
from fourscale import harness, localrows, rundir, tokenization
from fourscale.cli import InputError, RunFailed, parse
from fourscale.config import ModelConfig
from fourscale.flags import BenchmarkConfig
from fourscale.model import GPT
from fourscale.parallel import Topology

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other

HELLASWAG = ROOT / "tests" / "hellaswag" / "val_200.jsonl"
CPU = torch.device("cpu")
SAMPLES = ("--log-samples", "--out", "unused")
LONG = ("--ctx", 1024, "--global-bsz", 2, "--tokens", 20_000, "--warmup", 1)


class Rank(Topology):
    """One of several ranks, each a thread of this process: `gather` is theirs."""

    def gather(self, value):
        if self.world_size == 1:
            return [value]
        MEETING.values[self.rank] = value
        MEETING.wait()
        values = list(MEETING.values)
        MEETING.wait()
        return values


MEETING = threading.Barrier(1)


def rank_of(rank=0, world_size=1, dtype="fp32"):
    return Rank(rank, world_size, CPU, dtype, "ddp", 1, cpu_group=None, publish_group=None, save_group=None)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Rows of our own, in the columns of each data set.
ARC = [
    ("Which of these floats on water?", ["a stone", "a cork", "an anvil", "a coin"], "B"),
    ("What do plants need to grow?", ["light", "noise", "glass"], "A"),
    ("Which is the coldest?", ["ice", "steam", "fire", "lava", "tea"], "A"),
    ("Which animal lays eggs?", ["a cow", "a hen", "a dog", "a cat"], "B"),
    ("What pulls a dropped ball down?", ["wind", "light", "gravity", "sound"], "C"),
]
ROWS = {
    "arc_easy": [
        {"question": q, "choices": {"text": t, "label": list("ABCDE")[: len(t)]}, "answerKey": k} for q, t, k in ARC
    ],
    "lambada_openai": [
        {"text": "The dog ran after the ball and then it brought back the ball"},
        {"text": "She opened the door, looked out and shut the door"},
        {"text": "He counted one, two, three, four"},
    ],
    "boolq": [
        {"question": "is ice cold", "passage": "Ice is frozen water. It is cold.", "label": 1},
        {"question": "do stones float", "passage": "Stones sink in water.", "label": 0},
        {"question": "is grass green", "passage": "Grass is mostly green.", "label": 1},
    ],
    "winogrande": [
        {
            "sentence": "The cup is not in the box as the _ is too big.",
            "option1": "cup",
            "option2": "box",
            "answer": "1",
        },
        {"sentence": "Ann thanked Eva because _ had helped.", "option1": "Ann", "option2": "Eva", "answer": "2"},
    ],
    "wikitext": [
        {"page": " = A page = \n\n Words about a thing . It ends here . \n"},
        {"page": " = Two = \n\n Few . \n"},
    ],
    "gsm8k": [
        {"question": "Tom has 2 apples and gets 3. How many?", "answer": "2+3=5\n#### 5"},
        {"question": "4 and 4?", "answer": "8\n#### 8"},
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    work = tmp_path_factory.mktemp("rows")
    return {name: write(work / f"{name}.jsonl", rows) for name, rows in ROWS.items()} | {"hellaswag": HELLASWAG}


@pytest.fixture(scope="module")
def checkpoint(trained):
    return trained(*LONG)


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "ckpt_hf"
    run("export_hf.py", "--ckpt", checkpoint, "--out", out)
    return out


def config(*flags):
    cfg = parse(BenchmarkConfig, [str(flag) for flag in flags])
    cfg.check()
    return cfg


def flags_for(files, *names):
    local = [f"--offline-data={name}={files[name]}" for name in names]
    return ("--tasks", ",".join(names), *local)


def scored(cfg, path, topology=None):
    """(results, rows, lm) of a whole evaluation in this process."""
    said = []
    tasks = harness.load_tasks(
        cfg.tasks.split(","), cfg.include_path, cfg.local_data(), cfg.num_fewshot, cfg.limit, said.append
    )
    lm = harness.Dealt(harness.load(harness.locate(path), CPU), topology or rank_of(dtype=cfg.dtype), cfg.batch_size)
    results = eval_bench.evaluate(cfg, tasks, lm)
    chances = {name: harness.chance(task) for name, task in tasks.tasks.items()}
    return results, eval_bench.figures(results, tasks, chances), lm


def answers(results):
    """Every answer of the model: prompts and loglikelihoods or text, by task."""
    return {
        name: [(sample["arguments"], sample["resps"]) for sample in samples]
        for name, samples in results["samples"].items()
    }


# ---- the same score, whatever the way to it --------------------------------------------------------------------------


def test_a_checkpoint_and_its_export_score_alike_to_the_last_bit(checkpoint, exported, files):
    cfg = config(
        *flags_for(files, "hellaswag", "gsm8k"), "--limit", 6, "--num-fewshot", 0, "--out", "unused", "--log-samples"
    )
    ours, theirs = (scored(cfg, path)[0] for path in (checkpoint, exported))
    assert answers(ours) == answers(theirs)
    assert ours["results"] == theirs["results"]
    assert len(ours["samples"]["hellaswag"]) == 6 and ours["results"]["hellaswag"]["sample_len"] == 6


@pytest.mark.parametrize(
    "arch,changes",
    (
        ("gpt2", {}),
        ("gpt2", {"tie": False}),
        ("modern", {"n_kv_heads": 2, "rope_theta": 500_000.0}),
        ("modern", {"n_kv_heads": 2, "qk_norm": True, "d_head": 12}),
    ),
)
def test_transformers_model_in_memory_computes_what_ours_does(arch, changes):
    tokenizer = tokenization.build("byte", lambda: iter(()))
    shape = {"n_kv_heads": 4, "d_ff": 48, "ctx": 24, "vocab_size": tokenizer.vocab_size} | changes
    cfg = ModelConfig(arch, 32, 2, 4, **shape)
    model = GPT(cfg)
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    ids = torch.randint(257, (3, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model.eval()(ids)
    found = SimpleNamespace(
        model=lambda device: model, cfg=cfg, tokenizer=lambda: tokenizer, ckpt=SimpleNamespace(run={})
    )
    theirs = harness.their_model(found)
    assert not any(t.is_meta for t in (*theirs.parameters(), *theirs.buffers()))
    assert not theirs.training and theirs.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours[..., :257], atol=1e-5, rtol=1e-5)


def test_ranks_share_the_batches_and_every_answer_is_that_of_one(checkpoint, files):
    """loglikelihoods bit for bit, one-token answers with a context in common among them; text too."""
    global MEETING
    names = ("hellaswag", "arc_easy", "boolq", "gsm8k")
    cfg = config(*flags_for(files, *names), "--limit", 4, "--num-fewshot", 1, "--batch-size", 3)
    tasks = harness.load_tasks(names, (), cfg.local_data(), 1, 4, lambda line: None)
    subject = harness.load(harness.locate(checkpoint), CPU)
    tasks.tasks["gsm8k"].set_config("generation_kwargs", {"max_gen_toks": 8, "until": ["\n"]})
    eval_bench.evaluate(cfg, tasks, alone := harness.Dealt(subject, rank_of(), 3))
    for kind in ("loglikelihood", "generate_until"):
        asked = [i for task in tasks.tasks.values() for i in task.instances if i.request_type == kind]
        whole = getattr(alone, kind)(asked)
        for world_size in (2, 5):
            MEETING = threading.Barrier(world_size, timeout=60)
            MEETING.values = [None] * world_size
            ranks = [harness.Dealt(subject, rank_of(rank, world_size), 3) for rank in range(world_size)]
            with ThreadPoolExecutor(world_size) as threads:
                everywhere = list(threads.map(lambda lm: getattr(lm, kind)(asked), ranks))  # noqa: B023 (done by then)
            assert everywhere == [whole] * world_size
            shares = [len(pairs) for pairs in MEETING.values]
            assert sum(shares) == len(asked) and (kind != "loglikelihood" or max(shares) <= 2 * len(asked) / world_size)


@pytest.mark.slow
def test_torchrun_scores_as_one_process_does(checkpoint, files, tmp_path):
    """All kinds of requests, worked examples among them, which the harness itself draws anew on every rank."""
    names = ("hellaswag", "arc_easy", "lambada_openai", "winogrande", "wikitext", "gsm8k")
    flags = ("--ckpt", checkpoint, *flags_for(files, *names), "--limit", 5, "--num-fewshot", 1, "--batch-size", 3)
    one = run("eval_bench.py", *flags, "--backend", "gloo", "--json", tmp_path / "1.json")
    two = run("eval_bench.py", *flags, "--backend", "gloo", "--json", tmp_path / "2.json", nproc=2)
    assert two.stdout.replace("2 x cpu", "1 x cpu").replace("2.json", "1.json") == one.stdout
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    assert a["results"] == b["results"] and (a["fourscale"]["world_size"], b["fourscale"]["world_size"]) == (1, 2)


@pytest.mark.slow
def test_the_harness_own_command_line_gives_our_score(checkpoint, exported, tmp_path):
    """lm_eval on the export, by the task file that ships with the tests, against ours on the checkpoint."""
    flags = ("--tasks", "hellaswag_200", "--limit", "40")
    lm_eval = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={exported}"]
    lm_eval += [*flags, "--include_path", "tests/hellaswag", "--device", "cpu", "--batch_size", "8"]
    done = subprocess.run(
        [*lm_eval, "--output_path", str(tmp_path / "out")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["hellaswag_200"]
    for path in (checkpoint, exported):
        run(
            "eval_bench.py",
            "--ckpt",
            path,
            *flags,
            "--include-path",
            "tests/hellaswag",
            "--json",
            tmp_path / "a.json",
            cwd=ROOT,
        )
        ours = json.loads((tmp_path / "a.json").read_text())["results"]["hellaswag_200"]
        assert {k: v for k, v in ours.items() if "acc" in k} == {k: v for k, v in theirs.items() if "acc" in k}


def test_the_task_file_that_ships_is_the_harness_own_on_its_rows(checkpoint, files, monkeypatch):
    monkeypatch.chdir(ROOT)
    shipped = config(
        "--tasks", "hellaswag_200", "--include-path", "tests/hellaswag", "--limit", 5, "--log-samples", "--out=x"
    )
    own = config(*flags_for(files, "hellaswag"), "--limit", 5, *SAMPLES)
    (a,), (b,) = (answers(scored(cfg, checkpoint)[0]).values() for cfg in (shipped, own))
    assert a == b


def test_bf16_scores_by_products_in_bf16(checkpoint, files):
    results = {}
    for dtype in ("fp32", "bf16"):
        cfg = config(*flags_for(files, "hellaswag"), "--limit", 2, "--dtype", dtype, *SAMPLES)
        results[dtype], _, lm = scored(cfg, checkpoint)
        assert lm.model.dtype == torch.float32
    pairs = zip(*(answers(results[dtype])["hellaswag"] for dtype in ("fp32", "bf16")), strict=True)
    for (_, a), (_, b) in pairs:
        a, b = ([float(resp[0][0]) for resp in resps] for resps in (a, b))
        assert a != b and a == pytest.approx(b, rel=0.02)


# ---- the door --------------------------------------------------------------------------------------------------------


def test_the_door_prints_a_table_and_writes_what_was_scored(checkpoint, tmp_path):
    out, figures = tmp_path / "scores", tmp_path / "bench.json"
    flags = ("--tasks", "hellaswag", "--offline-data", f"hellaswag={HELLASWAG}", "--limit", 12)
    done = run("eval_bench.py", "--ckpt", checkpoint, *flags, "--json", figures, "--out", out, "--log-samples")
    table = json.loads(figures.read_text())
    step = rundir.open_checkpoint(checkpoint)
    about = table["fourscale"]
    assert about["digest"] == rundir.digest(step) and about["update"] == step.step["update"]
    assert about["offline_data"]["hellaswag"]["sha256"].startswith("6617edbf") and about["truncated"] == {}
    acc, norm = about["scores"]
    assert (acc["metric"], norm["metric"], acc["chance"], acc["documents"]) == ("acc", "acc_norm", 0.25, 12)
    assert acc["score"] == table["results"]["hellaswag"]["acc,none"]
    assert acc["standard_error"] == table["results"]["hellaswag"]["acc_stderr,none"]
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["task", "shots", "documents", "metric", "score", "+-", "chance"]
    assert lines[2].split() == [
        "hellaswag",
        "0",
        "12",
        "acc",
        *(f"{acc[k]:.4f}" for k in ("score", "standard_error")),
        "0.2500",
    ]
    assert lines[3].split()[0] == "acc_norm" and "few documents (hellaswag 12)" in done.stdout
    assert ("not distinguishable" in done.stdout) == (max(acc["p"], norm["p"]) > 0.05)
    assert "fatal" not in done.stderr and "Warning" not in done.stderr and "WARNING" not in done.stderr, done.stderr
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_hellaswag_*.jsonl")
    assert json.loads(results.read_text())["fourscale"]["digest"] == about["digest"]
    assert len(samples.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    "flags,said",
    (
        (("--limit", 0), "--limit 0: a whole number"),
        (("--limit", 1.5), "--limit 1.5: a whole number"),
        (("--batch-size", 0), "--batch-size 0: must be at least 1"),
        (("--seed", "1,2"), "--seed 1,2: write one number, or four"),
        (("--tasks", "hellaswag,"), "an empty name"),
        (("--offline-data", "hellaswag"), "--offline-data hellaswag: write TASK=FILE"),
        (("--offline-data", f"piqa={HELLASWAG}"), "piqa is not among --tasks hellaswag"),
        (("--offline-data", "hellaswag=none.jsonl"), "no such file"),
        (("--offline-data", f"hellaswag={__file__}"), "must end in .jsonl, .json or .parquet"),
        (("--include-path", "no/where"), "--include-path no/where: no such directory"),
        (("--log-samples",), "--log-samples: goes with --out"),
        (("--out", __file__), "a file; name a directory"),
        (("--json", "no/where/a.json"), "no such directory to write to"),
    ),
)
def test_usage_is_checked_before_anything_is_imported(flags, said):
    with pytest.raises(InputError) as e:
        config(*flags)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_seeds_are_the_harness_own():
    assert config().seeds() == [0, 1234, 1234, 1234] and config("--seed", 7).seeds() == [7] * 4


def test_help_and_usage_errors_need_no_torch_and_a_missing_harness_is_named():
    def ended(code):
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)

    late = "import sys, eval_bench\nsys.argv = ['eval_bench.py', '--help']\ntry: eval_bench.main()\n"
    done = ended(late + "except SystemExit as e: print(e.code, 'torch' in sys.modules, 'lm_eval' in sys.modules)")
    assert done.stdout.endswith("0 False False\n") and "--offline-data" in done.stdout
    done = ended("import sys; sys.argv = ['x']; sys.modules['lm_eval'] = None; import eval_bench; eval_bench.main()")
    assert done.returncode == 2 and "needs lm_eval; run: pip install 'lm-eval[hf]'" in one_error(done)


# ---- models ----------------------------------------------------------------------------------------------------------


def test_any_causal_model_of_transformers_with_a_tokenizer_will_do(exported, files, tmp_path):
    """A family that ours can't be (GPT-NeoX), and a directory without its tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    neox = transformers.GPTNeoXConfig(vocab_size=257, max_position_embeddings=512, **shape)
    transformers.GPTNeoXForCausalLM(neox).save_pretrained(tmp_path / "neox")
    with pytest.raises(InputError, match=r"neox: .*tokenizer"):
        harness.load(tmp_path / "neox", CPU)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "neox" / name).write_bytes((exported / name).read_bytes())
    _, rows, lm = scored(config(*flags_for(files, "boolq")), tmp_path / "neox")
    assert [row["documents"] for row in rows] == [3] and type(lm.model).__name__ == "GPTNeoXForCausalLM"
    (tmp_path / "neox" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="transformers can't load it"):
        harness.load(tmp_path / "neox", CPU)


def test_a_hub_id_without_a_network_and_a_mistyped_directory_are_one_line():
    for path in ("nobody/nothing", "./no/where"):
        with pytest.raises(InputError, match="no such directory") as e:
            harness.locate(Path(path))
        assert "\n" not in str(e.value)


def test_a_char_tokenizer_names_what_it_cannot_encode_and_a_broken_model_is_refused():
    tokenizer = tokenization.build("char", lambda: iter(["abc d"]))
    found = SimpleNamespace(tokenizer=lambda: tokenizer, ckpt=SimpleNamespace(run={}), cfg=SimpleNamespace(ctx=8))
    theirs = harness.their_tokenizer(found)
    small = transformers.GPT2Config(vocab_size=tokenizer.vocab_size, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    lm = harness.Dealt(harness.Subject(transformers.GPT2LMHeadModel(small), theirs, {}), rank_of(), 1)
    assert lm.tok_encode("abc d") == tokenizer.encode("abc d")
    with pytest.raises(InputError, match="can't encode 'abZ'"):
        lm.tok_encode("abZ")
    asked = [SimpleNamespace(args=("abc", " d"), task_name="t", doc_id=0)]
    assert lm.loglikelihood(asked)[0][0] < 0
    torch.nn.init.constant_(lm.model.transformer.ln_f.weight, float("nan"))
    with pytest.raises(RunFailed, match="not finite; the run diverged"):
        lm.loglikelihood(asked)


def test_documents_longer_than_the_context_are_counted_and_longer_answers_refused(trained, files, tmp_path):
    """32 tokens of context see 32 and predict the one after: a document of 33 bytes, its answer included, fits."""
    asked = "\nQuestion: q?\nAnswer: yes"
    rows = [{"passage": "p" * (size - len(asked)), "question": "q", "label": 0} for size in (33, 34, 27, 60)]
    here = files | {"boolq": write(tmp_path / "boolq.jsonl", rows)}
    _, rows, lm = scored(config(*flags_for(here, "boolq")), trained())
    assert lm.truncated == {"boolq": {1, 3}} and rows[0]["documents"] == 4
    with pytest.raises(InputError, match=r"hellaswag: \d+ documents have answers longer than .* context of 32 tokens"):
        scored(config(*flags_for(files, "hellaswag"), "--limit", 20), trained())
    with pytest.raises(InputError, match="gsm8k: answers of up to 256 tokens don't fit into the model's context of 32"):
        scored(config(*flags_for(files, "gsm8k"), "--num-fewshot", 0), trained())


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_of_every_shape_score_local_rows(checkpoint, files):
    names = tuple(ROWS)[:-1]
    _, rows, _ = scored(config(*flags_for(files, *names)), checkpoint)
    found = {(row["task"], row["metric"]): (row["documents"], row["chance"]) for row in rows}
    assert found[("arc_easy", "acc")] == (5, pytest.approx((3 / 4 + 1 / 3 + 1 / 5) / 5))
    assert found[("boolq", "acc")] == (3, 0.5) and found[("winogrande", "acc")] == (2, 0.5)
    assert found[("lambada_openai", "acc")] == (3, None) and found[("lambada_openai", "perplexity")] == (3, None)
    assert found[("wikitext", "bits_per_byte")] == (2, None)


def test_json_lists_and_parquet_are_the_same_rows(files, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = ROWS["boolq"]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.json").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    documents = []
    for path in (files["boolq"], *sorted(tmp_path.iterdir())):
        (task,) = harness.load_tasks(["boolq"], (), {"boolq": path}, None, None, print).tasks.values()
        documents.append([task.doc_to_text(doc) for doc in task.eval_docs])
    assert documents == [documents[0]] * 4 and len(documents[0]) == 3


@pytest.mark.parametrize("name", ("arc_easy", "boolq"))  # which score a test and a validation split
def test_worked_examples_never_show_the_question_that_is_asked(files, name):
    said = []
    tasks = harness.load_tasks([name], (), {name: files[name]}, 2, None, said.append)
    (task,) = tasks.tasks.values()
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    prompts = {i.doc_id: i.args[0] for i in task.instances}
    for doc_id, prompt in prompts.items():
        asked = task.doc_to_text(task.eval_docs[doc_id])
        assert prompt.count(asked) == 1 and prompt.endswith(asked) and prompt.count("Answer:") == 3
    assert said == [f"note: {name}: worked examples come from the same rows, never the one that is asked"]
    with pytest.raises(InputError, match=f"--num-fewshot {len(ROWS[name])}: {name} has {len(ROWS[name])} documents"):
        harness.load_tasks([name], (), {name: files[name]}, len(ROWS[name]), None, print)


def good(label="3", **more):
    row = json.loads(HELLASWAG.read_text().splitlines()[0])
    return {k: row[k] for k in ("activity_label", "ctx_a", "ctx_b", "endings")} | {"label": label} | more


@pytest.mark.parametrize(
    "lines,said",
    (
        ([], "rows.jsonl: no rows"),
        ([good(), "{broken"], "rows.jsonl:2: not valid JSON"),
        ([good(), "[1, 2]"], "rows.jsonl:2: '[1, 2]' is no JSON object"),
        ([good(), {"ctx_a": "x"}], "rows.jsonl:2: no field 'activity_label', which line 1 has"),
        ([good(), good(extra=1)], "rows.jsonl:2: a field 'extra', which line 1 has not"),
        ([good(), good(3)], "rows.jsonl:2: 'label' is a number, at"),
        ([{"text": "x"}], "rows.jsonl:1: hellaswag can't use it: KeyError: 'ctx_a'"),
        ([good(), good(""), good("x")], "rows.jsonl:2: hellaswag can't use it: ValueError"),
        ([good(), good(), good("4")], "rows.jsonl:3: the answer 4 is none of its 4 choices"),
        ([good(), good(endings=["a", "b"])], "rows.jsonl:2: the answer 3 is none of its 2 choices"),
    ),
)
def test_a_malformed_row_is_named_by_its_line(tmp_path, lines, said):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(InputError) as e:
        harness.load_tasks(["hellaswag"], (), {"hellaswag": path}, None, None, print)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_files_that_hold_no_rows_are_one_line(tmp_path):
    for name, content, said in (
        ("a.parquet", b"no", "not readable parquet"),
        ("a.json", b"[{}, ", "a.json:1: not valid JSON"),
        ("b.json", b"[1]", "b.json, row 1: '1' is no JSON object"),
        ("c.jsonl", b"\xff\xfe", "not UTF-8 at byte 0"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError) as e:
            localrows.read(tmp_path / name)
        assert said in str(e.value) and "\n" not in str(e.value)


def test_an_unknown_task_is_told_with_the_nearest_names():
    with pytest.raises(InputError, match=r"--tasks helaswag: the harness has no such task \(nearest: hellaswag"):
        harness.find(["helaswag"], (), print)


def test_tasks_are_found_by_name_tag_and_group_without_the_whole_index():
    for name, members in (
        ("boolq", {"boolq"}),
        ("ai2_arc", {"arc_easy", "arc_challenge"}),
        ("lambada", {"lambada_openai"}),
    ):
        manager = harness.find([name], (), pytest.fail)
        assert members <= set(manager.all_tasks) and len(manager.all_tasks) < 1000
    assert {"hellaswag", "mmlu_anatomy", "gsm8k", "winogrande"} <= set(
        harness.find(["openllm"], (), pytest.fail).all_tasks
    )


def test_a_task_file_may_be_named_itself(monkeypatch):
    monkeypatch.chdir(ROOT)
    tasks = harness.load_tasks(["tests/hellaswag/hellaswag_200.yaml"], (), {}, None, None, print)
    assert list(tasks.tasks) == ["hellaswag_200"] and len(tasks.tasks["hellaswag_200"].eval_docs) == 200


def test_a_task_of_our_own_wins_over_the_harness_own(tmp_path):
    text = (ROOT / "tests" / "hellaswag" / "hellaswag_200.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("hellaswag_200", "hellaswag"))
    manager = harness.find(["hellaswag", "arc_easy"], [str(tmp_path)], print)
    assert manager.task_index["hellaswag"].yaml_path == tmp_path / "own.yaml"


def test_a_task_that_needs_the_network_says_so_and_what_to_do(files):
    with pytest.raises(
        InputError, match=r"the Hugging Face hub can't be reached.* --offline-data hellaswag=FILE.jsonl"
    ):
        harness.load_tasks(["hellaswag"], (), {}, None, None, print)
    with pytest.raises(InputError, match=r"connect to the network$"):  # rows can't be given for several tasks at once
        harness.load_tasks(["ai2_arc"], (), {}, None, None, print)
    with pytest.raises(InputError, match="ai2_arc is several tasks"):
        harness.load_tasks(["ai2_arc"], (), {"ai2_arc": files["arc_easy"]}, None, None, print)


# ---- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hits,count,chance", ((5, 20, 0.25), (11, 20, 0.25), (70, 200, 0.25), (3, 7, 0.5), (0, 9, 0.4))
)
def test_p_is_the_share_of_outcomes_no_likelier_than_this_one(hits, count, chance):
    mass = [math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(count + 1)]
    expected = math.fsum(m for m in mass if m <= mass[hits] * (1 + 1e-9))
    assert eval_bench.binomial_p(hits, count, chance) == pytest.approx(expected)


def row_of(hits, count, chance=0.25, **more):
    p = eval_bench.binomial_p(hits, count, chance)
    row = {"task": "t", "num_fewshot": 0, "documents": count, "metric": "acc", "score": hits / count}
    return row | {"standard_error": 0.03, "chance": chance, "p": p} | more


def test_a_score_is_called_luck_exactly_where_it_may_be():
    at = eval_bench.needed(200, 0.25)
    assert list(eval_bench.verdicts([row_of(round(at * 200), 200)])) == []
    (line,) = eval_bench.verdicts([row_of(round(at * 200) - 1, 200)])
    assert (
        "not distinguishable from chance (0.2500): exact binomial test, p = 0.0" in line
        and f"it takes {at:.4f}" in line
    )
    assert list(eval_bench.verdicts([row_of(20, 200)])) == []  # far below is no luck either
    lines = list(eval_bench.verdicts([row_of(1, 2, 0.5)]))
    assert "with 2 documents no score would be" in lines[0] and lines[1].startswith("note: few documents (t 2)")
    group = row_of(60, 200, p=None)
    (line,) = eval_bench.verdicts([group])
    assert line.endswith("within 1.96 standard errors of it")
    assert list(eval_bench.verdicts([group | {"standard_error": 0.02}])) == []
    assert list(eval_bench.verdicts([row_of(50, 200, chance=0.25) | {"chance": None, "p": None}])) == []


@pytest.mark.parametrize("by_size,expected", ((True, (5 * 0.25667 + 3 * 0.5) / 8), (False, (0.25667 + 0.5) / 2)))
def test_a_group_has_the_chance_of_its_tasks_put_together_as_their_scores_are(
    checkpoint, files, tmp_path, by_size, expected
):
    for name in ("arc_easy", "boolq"):
        table = localrows.config_on(harness._config(harness.find([name], (), print), name), files[name])
        (tmp_path / f"{name}.yaml").write_text(json.dumps(table | {"task": f"our_{name}"}))
    metric = {"metric": "acc", "aggregation": "mean", "weight_by_size": by_size}
    group = {"group": "ours", "task": ["our_arc_easy", "our_boolq"], "aggregate_metric_list": [metric]}
    (tmp_path / "ours.yaml").write_text(json.dumps(group))
    _, rows, _ = scored(config("--tasks", "ours", "--include-path", tmp_path), checkpoint)
    (row,) = (row for row in rows if row["task"] == "ours")
    assert row["chance"] == pytest.approx(expected, abs=1e-4) and row["p"] is None and row["documents"] == 8
    assert {row["task"] for row in rows} == {"ours", "our_arc_easy", "our_boolq"}
