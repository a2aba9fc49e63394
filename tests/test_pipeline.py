"""The command lines that the README promises, as a user types them: in a fresh directory, one after the other."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

# A line as written, and what a CPU test puts in place of its size: the flags that follow win.
SMALL = (
    "--backend gloo --d-model 32 --n-layers 1 --n-heads 2 --local-bsz 2 --grad-accum 2 --ctx 64 --steps 6 --warmup 2"
)
LAPTOP = (
    "torchrun --nproc_per_node=1 train.py --data ./data --parallel ddp --backend gloo "
    "--ctx 256 --local-bsz 8 --grad-accum 1 --steps 2000 --warmup 100"
)
ONE_GPU = (
    "torchrun --nproc_per_node=1 train.py --data ./data --parallel ddp "
    "--ctx 1024 --local-bsz 8 --grad-accum 40 --steps 9000 --warmup 200 --lr 6e-4"
)
ONE_NODE = (
    "torchrun --nproc_per_node=8 train.py --data ./data --parallel fsdp "
    "--ctx 1024 --local-bsz 16 --grad-accum 4 --steps 40000 --warmup 1000 --lr 3e-4"
)
CLUSTER = (
    "torchrun --nnodes=2 --node_rank=$RANK --nproc_per_node=8 --rdzv_endpoint=$HEAD:29500 train.py --data ./data "
    "--parallel fsdp --ctx 4096 --local-bsz 4 --grad-accum 3 --steps 200000 --warmup 2000 --lr 1.5e-4"
)


def shrink(line: str, flags: str = SMALL) -> str:
    """The line with the values of `flags` in place of its own, and everything that it lacks added."""
    words, extra = shlex.split(line), shlex.split(flags)
    for flag, value in zip(extra[::2], extra[1::2], strict=True):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return " ".join(words)


def start(line: str, cwd: Path) -> subprocess.Popen[str]:
    words = [str(ROOT / w) if w.endswith(".py") else w for w in shlex.split(line)]
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*launcher, *words[1:]],
        cwd=cwd,
        env=environment(),
        stdout=pipe,
        stderr=pipe,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"exit {process.returncode}\n{out[-3000:]}\n{err[-3000:]}"
    return out


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory that is not the repository, with ./data made by prepare.py from a text file in it."""
    cwd = tmp_path_factory.mktemp("user")
    story = "Once upon a time there was a {} who lived in a {}. Every day it went to the {} to look for {}.\n\n"
    words = ("dog", "cat", "tree", "house", "river", "market", "bread", "stone", "bird", "song")
    picks = [[words[(i * k + k) % 10] for k in (1, 3, 7, 9)] for i in range(2_000)]
    (cwd / "stories.txt").write_text("".join(story.format(*p) for p in picks))
    finish(start("python prepare.py --dataset stories.txt --tokenizer bpe:300 --val-fraction 0.1 --out ./data", cwd))
    return cwd


@pytest.mark.parametrize("line", [LAPTOP, ONE_GPU], ids=["laptop", "one-gpu"])
def test_one_process(work, tmp_path, line):
    out = finish(start(shrink(line) + f" --ckpt_dir {tmp_path}/ckpt", work))
    assert "step 6 | saved" in out


def test_one_node(work, tmp_path):
    line = shrink(ONE_NODE).replace("--nproc_per_node=8", "--nproc_per_node=2 --standalone")
    out = finish(start(line + f" --ckpt-dir {tmp_path}/ckpt", work))
    assert "step 6 | saved" in out
    assert "8 windows an update = 2 ranks x 2 windows x 2 micro-batches" in out


def test_two_nodes(work, tmp_path):
    line = shrink(CLUSTER).replace("--nproc_per_node=8", "--nproc_per_node=1")
    line = line.replace("$HEAD:29500", f"127.0.0.1:{free_port()}") + f" --ckpt-dir {tmp_path}/ckpt"
    nodes = [start(line.replace("$RANK", str(n)), work) for n in range(2)]
    outs = [finish(n) for n in nodes]
    assert "= 2 ranks" in outs[0]
    assert "step" not in outs[1]  # rank 0 alone speaks
    assert json.loads((tmp_path / "ckpt" / "run.json").read_text())["attempts"][0]["world_size"] == 2


def test_from_a_checkpoint_to_figures_text_and_a_hugging_face_directory(work):
    finish(start(shrink(LAPTOP), work))  # into ./ckpt, as the lines after it expect
    said = finish(start("python eval_ppl.py --data ./data --ckpt ckpt/step_6 --ctx 64 --json ppl.json", work))
    assert "perplexity" in said
    assert "counting single tokens: " in said
    done = json.loads((work / "ckpt" / "DONE.json").read_text())
    figures = json.loads((work / "ppl.json").read_text())
    assert figures["nats_per_token"] == pytest.approx(done["val_loss"], abs=1e-6)  # the whole split, both of them
    line = 'python sample.py --ckpt ckpt/step_6 --prompt "Once upon a time" --temperature 0.8 --top_k 200'
    assert finish(start(line, work)).startswith("Once upon a time")
    finish(start("python export_hf.py --ckpt ckpt/step_6 --out ./ckpt_hf", work))
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "m, t = AutoModelForCausalLM.from_pretrained('ckpt_hf'), AutoTokenizer.from_pretrained('ckpt_hf')\n"
        "ids = t('Once upon a time', return_tensors='pt')\n"
        "print(t.decode(m.generate(**ids, max_new_tokens=5)[0]))"
    )
    hf = subprocess.run([sys.executable, "-c", load], cwd=work, env=environment(), capture_output=True, text=True)
    assert hf.stdout.startswith("Once upon a time"), hf.stderr[-2000:]
