"""Hugging Face directories as they come: what is refused and how, their tokenizers, names of the hub."""

import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import ROOT, environment
from published import as_bin, change, given_back, overwrite, saved, taken_in
from tokenizers import models, pre_tokenizers, processors

import export_hf
import import_hf
from fourscale import hfdir, tokenization
from fourscale.cli import InputError
from fourscale.flags import ImportConfig
from fourscale.pretrained import open_pretrained

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"

HUGE = 10**400  # JSON has such integers, a float has not
CHANGES = (
    ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function gelu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
    ("gpt2", {"n_inner": 60}, "c_fc.weight is"),
    ("gpt2", {"n_head": 5}, "does not divide"),
    ("gpt2", {"n_embd": "32"}, "n_embd 32"),
    ("Llama-3.2-1B", {"attention_bias": True}, "attention_bias True"),
    ("Llama-3.2-1B", {"mlp_bias": True}, "mlp_bias True"),
    ("Llama-3.2-1B", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type yarn"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type dynamic"),
    ("Llama-3.2-1B", {"rope_scaling": {"type": "longrope"}}, "rope_type longrope"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks one of"),
    ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("Llama-3.2-1B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("Llama-3.2-1B", {"head_dim": 15}, "is (240, 64)|even head width|is .16, 64"),
    ("Llama-3.2-1B", {"model_type": "gemma3_text"}, "model_type 'gemma3_text'.*gpt2, llama, mistral, qwen3"),
    ("Llama-3.2-1B", {"tie_word_embeddings": False}, "has no lm_head.weight"),
    ("Llama-3.2-1B", {"num_hidden_layers": 3}, "has no model.layers.2"),
    ("Llama-3.2-1B", {"num_hidden_layers": 1}, "model.layers.1.* has no place in a LlamaForCausalLM"),
    ("Llama-3.2-1B", {"vocab_size": 319}, "by config.json .319, 64"),
    ("Qwen3-0.6B", {"use_sliding_window": True}, "use_sliding_window True"),
    ("Qwen3-0.6B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
    ("Qwen3-0.6B", {"model_type": "llama"}, "q_norm.weight has no place|k_norm.weight has no place"),
    ("mistral", {"sliding_window": 32}, "sliding_window 32"),
    *((name, {"is_causal": False}, "is_causal False") for name in ("gpt2", "Llama-3.2-1B", "Qwen3-0.6B")),
    ("gpt2", {"num_attention_heads": None}, "num_attention_heads None: not a value"),
    ("gpt2", {"hidden_size": 36}, "wte.weight is .* by config.json .101, 36"),
    # values of a kind that no key has
    ("Llama-3.2-1B", {"model_type": ["llama"]}, r"model_type \['llama'\]: not supported"),
    ("Llama-3.2-1B", {"hidden_act": "a\nb"}, "hidden_act .a.*nb.: not supported"),
    ("Llama-3.2-1B", {"layer_types": 3}, "layer_types 3: not a value"),
    ("Llama-3.2-1B", {"layer_types": [{}]}, "layer_types {}: not supported"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_type": ["x"]}}, r"rope_type \['x'\]: not supported"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_theta": HUGE}}, "rope_parameters .*: not a value"),
    ("Llama-3.2-1B", {"rope_parameters": {"rope_type": "linear", "factor": HUGE}}, "lacks one of factor"),
    ("Llama-3.2-1B", {"original_max_position_embeddings": None}, "lacks one of"),
    ("Llama-3.2-1B", {"rms_norm_eps": HUGE}, "rms_norm_eps 1000.*: not a value"),
    ("Llama-3.2-1B", {"vocab_size": HUGE}, "vocab_size 1000.*: not a value"),
    ("Llama-3.2-1B", {"hidden_size": 2**31}, "hidden_size 2147483648: not a value"),
    ("Llama-3.2-1B", {"max_position_embeddings": 10**25}, "max_position_embeddings 1000.*: not a value"),
    ("gpt2", {"n_embd": 2**30}, "asks for matrices larger than any can be"),
    ("gpt2", {"n_layer": 2**31 - 1}, "--n-layers 2147483647: must be at most 10,000"),
    ("gpt2", {"n_layer": 9_999}, "has 28 tensors for the 9999 layers"),
)


@pytest.mark.parametrize(("name", "changes", "words"), CHANGES, ids=[f"{n} {next(iter(c))}" for n, c, _ in CHANGES])
def test_what_would_be_computed_otherwise_is_refused_by_name(tmp_path, name, changes, words):
    source = saved(name, tmp_path / "x")
    change(source, **changes)
    with pytest.raises(InputError, match=words) as e:
        open_pretrained(source, "--model")
    assert str(e.value).startswith(f"--model {source}") and "\n" not in str(e.value)


def test_what_changes_nothing_is_let_be(tmp_path):
    source = saved("Llama-3.2-1B", tmp_path / "x")
    change(source, pretraining_tp=1, made_on="a Tuesday", attention_dropout=0.1, max_window_layers=3, num_labels=7)
    assert taken_in(source, tmp_path / "run").difference < 1e-4


def test_damaged_directories_are_told_in_one_line(tmp_path):
    def refused(words, error=InputError):
        with pytest.raises(error, match=words) as e:
            taken_in(source, tmp_path / "out")
        assert "\n" not in str(e.value) and str(source) in str(e.value)
        assert not list(tmp_path.glob("*out*"))
        shutil.rmtree(source)

    source = saved("gpt2", tmp_path / "a")
    overwrite(source / "model.safetensors", lambda w: w["transformer.h.1.mlp.c_fc.bias"][3].fill_(torch.nan))
    refused("transformer.h.1.mlp.c_fc.bias is not finite")

    source = saved("gpt2", tmp_path / "b")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1000])
    refused("model.safetensors: not a whole safetensors file")

    source = saved("gpt2", tmp_path / "c")
    (source / "model.safetensors").write_bytes(whole[:4])
    refused("model.safetensors: not a whole safetensors file")

    source = saved("gpt2", tmp_path / "d")
    (source / "model.safetensors").unlink()
    refused("holds no weights")

    source = saved("gpt2", tmp_path / "e")
    (source / "config.json").write_text("{", encoding="utf-8")
    refused("config.json: not valid JSON")

    source = saved("gpt2", tmp_path / "f")
    overwrite(source / "model.safetensors", lambda w: w.update({"transformer.h.0.adapter.weight": torch.ones(2)}))
    refused("transformer.h.0.adapter.weight has no place in a GPT2LMHeadModel")

    source = saved("gpt2", tmp_path / "g")
    overwrite(
        source / "model.safetensors", lambda w: w.update({"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)})
    )
    refused("only fp32, bf16 and fp16 weights")

    source = saved("gpt2", tmp_path / "h")
    as_bin(source)
    data = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    refused("pytorch_model.bin: not a whole file of tensors alone")

    source = saved("gpt2", tmp_path / "i", max_shard_size="10KB")
    next(source.glob("model-00002-*")).unlink()
    refused("is missing, a shard that model.safetensors.index.json names")

    source = saved("gpt2", tmp_path / "j")
    overwrite(
        source / "model.safetensors", lambda w: w.update({"transformer.ln_f.bias": torch.ones(32, dtype=torch.float64)})
    )
    refused("transformer.ln_f.bias is F64; only fp32, bf16 and fp16 weights")

    for where in ("a" * 5000, "..", "a\0b", "\ud800"):
        source = saved("gpt2", tmp_path / "k", max_shard_size="10KB")
        index = source / "model.safetensors.index.json"
        table = json.loads(index.read_text(encoding="utf-8"))
        table["weight_map"]["transformer.ln_f.bias"] = where
        index.write_text(json.dumps(table), encoding="utf-8")
        refused("is missing, a shard that model.safetensors.index.json names")

    source = tmp_path / "l"
    source.mkdir()
    refused("no complete checkpoint", InputError)


@pytest.mark.parametrize(
    ("name", "make", "words"),
    (
        ("transformer.ln_f.bias", lambda t: t.double(), r"ln_f.bias is torch.float64; only fp32, bf16 and fp16"),
        (
            "transformer.ln_f.bias",
            lambda t: t.to("meta"),
            r"transformer.ln_f.bias without its numbers \(a meta tensor\)",
        ),
        ("transformer.wpe.weight", lambda t: t.to_sparse(), "transformer.wpe.weight in the layout torch.sparse_coo"),
        (
            "transformer.wpe.weight",
            lambda t: t.to_sparse_csr(),
            "transformer.wpe.weight in the layout torch.sparse_csr",
        ),
        (0, lambda t: torch.ones(2), "something other than named tensors"),
    ),
    ids=("fp64", "meta", "sparse", "sparse CSR", "a number for a name"),
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_pickle_of_other_tensors_is_refused_by_name(tmp_path, name, make, words):
    source = saved("gpt2", tmp_path / "x")
    as_bin(source)
    weights = torch.load(source / "pytorch_model.bin")
    torch.save(weights | {name: make(weights.get(name))}, source / "pytorch_model.bin")
    with pytest.raises(InputError, match=words) as e:
        open_pretrained(source)
    assert "\n" not in str(e.value) and "pytorch_model.bin" in str(e.value)


def test_no_code_of_a_pickle_is_run(tmp_path):
    source = saved("gpt2", tmp_path / "x")
    as_bin(source)
    torch.save({"transformer.wte.weight": Evil(tmp_path / "ran")}, source / "pytorch_model.bin")
    with pytest.raises(InputError, match="do not trust it"):
        open_pretrained(source)
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def llama_tokenizer(directory):
    """A small byte-level BPE that begins each text with a token of its own, as Llama 3's does."""
    words = json.loads(tokenization.build("byte", lambda: iter(())).data)["model"]["vocab"]
    words.pop("<|endoftext|>")
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    begin = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    backend.save(str(directory / "tokenizer.json"))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "chat_template": "{{ x }}"}
    table |= {"eos_token": "<|end_of_text|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(table), encoding="utf-8")
    return begin


def test_the_tokenizer_comes_along_and_what_it_adds_is_told(tmp_path):
    source = saved("Llama-3.2-1B", tmp_path / "x")
    begin = llama_tokenizer(source)
    before = (source / "tokenizer.json").read_bytes()
    place = open_pretrained(source)
    notes = "\n".join(import_hf.notes_of(place, place.tokenizer()))
    assert "its tokenizer puts <|begin_of_text|> before each text" in notes
    assert "320 rows for 258 ids" in notes and "chat template" in notes
    taken_in(source, tmp_path / "run")
    run_dir = open_pretrained(tmp_path / "run")
    assert run_dir.ckpt.run["imported"]["adds"] == "<|begin_of_text|> before"
    assert run_dir.tokenizer_entry == place.tokenizer_entry and run_dir.tokenizer().eot_token == "<|end_of_text|>"
    given_back(tmp_path / "run", tmp_path / "y")
    assert (tmp_path / "y" / "tokenizer.json").read_bytes() == before  # nobody trained without the token: it stays
    theirs = export_hf.load_tokenizer_as_user(tmp_path / "y")
    assert theirs("!")["input_ids"] == [begin, *place.tokenizer().encode("!")]
    assert "puts <|begin_of_text|> before a text" in (tmp_path / "y" / "README.md").read_text(encoding="utf-8")


def test_openais_vocabulary_files_become_the_gpt2_tokenizer(tmp_path):
    """vocab.json and merges.txt without a tokenizer.json, as GPT-2 came out."""
    gpt2 = tokenization.build("gpt2", lambda: iter(()))
    spec = json.loads(gpt2.data)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in spec["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = hfdir.tokenizer_of(tmp_path, {})
    assert tokenization.difference(found, gpt2) is None and found.sha256 == gpt2.sha256
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}), encoding="utf-8")
    with pytest.raises(InputError, match="no vocabulary of GPT-2's kind"):
        hfdir.tokenizer_of(tmp_path, {})


def test_the_end_of_a_text_is_found_in_the_config_too(tmp_path):
    ends = llama_tokenizer(tmp_path) + 1
    (tmp_path / "tokenizer_config.json").unlink()
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8").replace("<|end_of_text|>", "<|fin|>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="which token ends a document"):
        hfdir.tokenizer_of(tmp_path, {})
    assert hfdir.tokenizer_of(tmp_path, {"eos_token_id": ends}).eot_token == "<|fin|>"
    assert hfdir.tokenizer_of(tmp_path, {"eos_token_id": [ends, 3]}).eot_id == ends


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    (
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [9, 7, 9]}, (7, 9)),
        (None, {"eos_token_id": None}, ()),
        (None, {}, ()),
        ({"eos_token_id": [128009, 128001, 128008]}, {"eos_token_id": 128001}, (128001, 128008, 128009)),
        ({"eos_token_id": 0}, {"eos_token_id": 128001}, (0,)),
        ({"eos_token_id": []}, {"eos_token_id": 7}, ()),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({"temperature": 0.6}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": "</s>"}, {"eos_token_id": 7}, r"generation_config.json: eos_token_id </s>: neither an id"),
        (
            {"eos_token_id": [7, True]},
            {"eos_token_id": 7},
            r"generation_config.json: eos_token_id \[7, True\]: neither",
        ),
        ({"eos_token_id": -1}, {"eos_token_id": 7}, "generation_config.json: eos_token_id -1: neither"),
        (None, {"eos_token_id": 7.0}, "/config.json: eos_token_id 7.0: neither"),
        ("{", {"eos_token_id": 7}, "generation_config.json: not valid JSON"),
        ([7], {"eos_token_id": 7}, "generation_config.json: holds no JSON object"),
    ),
)
def test_every_id_that_ends_a_text_is_known(tmp_path, generation, config, ids):
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    if isinstance(ids, tuple):
        assert hfdir.stop_ids(tmp_path, config) == ids
        return
    with pytest.raises(InputError, match=ids) as e:
        hfdir.stop_ids(tmp_path, config)
    assert "\n" not in str(e.value) and str(e.value).startswith(str(tmp_path))


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path):
    source = saved("gpt2", tmp_path / "x")
    tokenization.build("byte", lambda: iter(())).save(source)
    with pytest.raises(InputError, match="its tokenizer has 257 ids, the model rows for 101"):
        import_hf.tokenizer_of(open_pretrained(source))


def test_no_tokenizer_is_told(tmp_path):
    source = saved("gpt2", tmp_path / "x")
    assert "without a tokenizer" in import_hf.notes_of(open_pretrained(source), None)[0]
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    assert "only a sentencepiece model" in import_hf.notes_of(open_pretrained(source), None)[0]
    with pytest.raises(InputError, match="only a sentencepiece model"):
        open_pretrained(source).tokenizer()


# ---- names ---------------------------------------------------------------------------------------------------------


def test_hub_names_and_paths_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("gpt2", "openai-community/gpt2", "Qwen/Qwen3-0.6B"):
        assert hfdir.may_be_hub_id(name), name
    for name in ("./gpt2", "/models/gpt2", "a/b/c", "runs/gpt2", "ckpt", "ckpt/step_9000", "other/step_5", "x/best"):
        assert not hfdir.may_be_hub_id(name), name
    with pytest.raises(InputError, match=r"--ckpt ckpt/step_9000: no such directory; train\.py"):
        open_pretrained("ckpt/step_9000")
    sha = "0123456789abcdef" * 2 + "01234567"
    place = tmp_path / "models--owner--name" / "snapshots" / sha
    assert hfdir.cached_from(place) == ("owner/name", sha) and hfdir.cached_from(tmp_path) == (None, None)


def test_only_needed_files_are_asked_of_the_hub():
    published = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.safetensors"]
    published += ["64-8bits.tflite", "original/consolidated.00.pth", "README.md", "merges.txt"]
    assert hfdir.weight_files(published) == ["model.safetensors"]
    assert hfdir.weight_files(["pytorch_model.bin", "training_args.bin"]) == ["pytorch_model.bin"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert hfdir.weight_files([*shards, "consolidated.safetensors"]) == shards


def test_without_a_network_a_hub_name_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    with pytest.raises(
        InputError, match=r"--model nobody/nothing: no such directory here \(train.py .*\), and no hub to ask"
    ):
        open_pretrained("nobody/nothing", "--model")
    assert time.monotonic() - began < 10


def test_flags_are_checked_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match="--model: name a"):
        ImportConfig().check()
    with pytest.raises(InputError, match=r"--revision main: .* is a directory"):
        ImportConfig(model=str(tmp_path), revision="main").check()
    ImportConfig(model="owner/name", revision="main").check()


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as one model needs: its facts, its files with their hashes, and a 404 for all else."""

    def __init__(self, folder, asked, *args):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(path)
        files = [p for p in sorted(self.folder.rglob("*")) if p.is_file()]
        names = [str(p.relative_to(self.folder)) for p in files]
        head, data, code = {"Content-Type": "application/json"}, b"", 200
        if path.startswith("/api/models/owner/name/tree/"):
            oids = [hashlib.sha1(p.read_bytes()).hexdigest() for p in files]
            table = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": oid}
                for n, p, oid in zip(names, files, oids, strict=True)
            ]
            data = json.dumps(table).encode()
        elif path.startswith("/api/models/owner/name"):
            data = json.dumps(
                {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            ).encode()
        elif path.startswith("/owner/name/resolve/") and path.split("/", 5)[5] in names:
            data = (self.folder / path.split("/", 5)[5]).read_bytes()
            head = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            code, head = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(code)
        for name, value in (head | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


READ = """
import sys
from fourscale.cli import InputError
from fourscale.pretrained import open_pretrained

for name in sys.argv[1:]:
    try:
        found = open_pretrained(name, "--model")
        again = open_pretrained(str(found.path))
        print(found.about == again.about, found.about["ckpt"], found.about["revision"], found.cfg.n_layers)
    except InputError as e:
        print(e)
"""


def test_a_hub_name_is_downloaded_once_and_then_known_without_a_network(tmp_path):
    folder, asked = saved("Qwen3-0.6B", tmp_path / "x"), []
    (folder / "onnx").mkdir()
    for name in ("onnx/model.safetensors", "tf_model.h5", "pytorch_model.bin"):
        (folder / name).write_bytes(b"not asked for")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, folder, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}

    def read(*names, offline):
        command = [sys.executable, "-c", READ, *names]
        env = environment(**place, HF_HUB_OFFLINE=offline)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    try:
        found, missing = read("owner/name", "owner/other", offline="0")
    finally:
        server.shutdown()
    assert found == f"True owner/name {COMMIT} 2"
    assert missing.startswith("--model owner/other: no such directory here, and no such model on the hub")
    taken = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert taken == {"config.json", "generation_config.json", "model.safetensors"}
    assert not any("onnx" in path for path in asked)
    assert read("owner/name", offline="1") == [found]
    assert not Path(tmp_path / "owner").exists()
