"""sample.py: prompts from everywhere, text as it is made and up to a stop text, JSON rows, and a conversation."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import command, environment, one_error, run

import sample
from fourscale import rundir, tokenization
from fourscale.cli import InputError, RunFailed
from fourscale.flags import SampleConfig
from fourscale.generate import Text, sample_generator
from sample import SEPARATOR, Sample, Writer, encode_prompt, grow, parse_prompts, read_prompts

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other


def tokenizer_of(spec):
    return tokenization.build(spec, lambda: iter(["na\u00efve caf\u00e9 \u6771\u4eac \U0001f40d\n"]))


BYTES = tokenizer_of("byte")

# ---- text ------------------------------------------------------------------------------------------------------------


def written(tokenizer, before, tokens, stops=()):
    """(pieces, stopped) of a Writer."""
    writer = Writer(tokenizer, before, stops)
    pieces = [writer.add(token) for token in tokens]
    return [*pieces, writer.end()], writer.stopped


@pytest.mark.parametrize("spec", ("byte", "char", "bpe:260"))
def test_streamed_pieces_are_whole_characters_and_add_up(spec):
    tokenizer = tokenizer_of(spec)
    text = "caf\u00e9 \u6771\u4eac \U0001f40d na\u00efve\n"
    pieces, _ = written(tokenizer, tokenizer.encode("na\u00efve "), tokenizer.encode(text))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5  # it does come in pieces


def test_bytes_that_are_no_character_are_shown_as_such():
    broken = [0xE6, 0x9D, ord("a"), 0xFF, ord("b"), 0xC3]  # cut short, invalid, cut short at the end
    pieces, _ = written(BYTES, [], broken)
    assert "".join(pieces) == "\ufffda\ufffdb\ufffd"
    assert written(BYTES, BYTES.encode("x"), []) == ([""], False)


def test_a_tokenizer_that_decodes_by_neighbours_keeps_its_spaces(tmp_path):
    """Metaspace, as in Llama 2: the space before a word is dropped at the beginning of what is decoded."""
    import tokenizers as hf

    vocab = {token: i for i, token in enumerate(["</s>", "<unk>", "\u2581a", "\u2581b", "c", "\u2581"])}
    made = hf.Tokenizer(hf.models.BPE(vocab, [], unk_token="<unk>"))
    made.decoder, made.pre_tokenizer = hf.decoders.Metaspace(), hf.pre_tokenizers.Metaspace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenization.build(str(tmp_path / "tokenizer.json"), lambda: iter(()))
    tokens = [2, 3, 4, 2, 2, 3]
    assert tokenizer.decode(tokens) == "a bc a a b"
    for cut in range(6):
        pieces, _ = written(tokenizer, tokens[:cut], tokens[cut:])
        assert tokenizer.decode(tokens[:cut]) + "".join(pieces) == "a bc a a b"


@pytest.mark.parametrize(
    ("stops", "expected"),
    (
        (["cd"], "ab"),
        (["bcdx", "cd"], "ab"),
        (["de", "abc"], ""),
        (["abcdefg", "bc"], "a"),  # what is complete first, as if characters came one by one
        (["efgh"], "abcd"),
        (["efghx", "h"], "abcdefg"),
        (["ghx", "x"], "abcdefgh"),
        (["b" * 9], "abcdefgh"),
    ),
    ids=str,
)
def test_a_stop_text_ends_it_however_the_pieces_fall(stops, expected):
    text = "abcdefgh"
    ids = [*text.encode()]
    assert "".join(written(BYTES, [], ids, stops)[0]) == expected
    assert written(BYTES, [], ids, stops)[1] == (expected != text)
    for size in (2, 3, 8):  # several characters a token
        writer = Writer(BYTES, [], stops)
        parts = [writer._before_stop(text[i : i + size]) for i in range(0, 8, size)] + [writer.end()]
        assert "".join(parts) == expected
    after, _ = written(BYTES, [*b"abcd"], [*b"efgh"], stops)  # the prompt's text stops nothing
    assert "".join(after) == {"abcdefg": "efg", "abcd": ""}.get(expected, "efgh")


def test_what_may_become_a_stop_text_waits_and_nothing_else_does():
    writer = Writer(BYTES, [], ["\n\nEND", "xy"])
    shown = [writer.add(token) for token in b"a\n\nb\n\nENx\n\n\n\nEND!"]
    assert "".join(shown) == "a\n\nb\n\nENx\n\n" and writer.stopped and writer.end() == ""
    assert shown[:4] == ["a", "", "", "\n\nb"]
    snake = Writer(BYTES, [], ["\U0001f40d!"])
    assert [snake.add(token) for token in "\U0001f40d?".encode()] == ["", "", "", "", "\U0001f40d?"]


def test_a_stop_text_in_bytes_that_come_last():
    pieces, stopped = written(BYTES, [], [ord("a"), 0xE6], ["\ufffd"])
    assert ("".join(pieces), stopped) == ("a", True)


def grown(tokens, finish, stops=()):
    """The sample that some drawn tokens make; finish as `generate` sets it with the last."""
    text = Text([1], sample_generator(0, [1], 0))

    def steps():
        for i, token in enumerate(tokens):
            text.ids.append(token)
            text.finish = finish if i == len(tokens) - 1 else None
            yield text
            if text.finish is not None:
                return

    made = Sample("p", 0, text, Writer(BYTES, [], stops))
    return made, [piece for _, piece in grow([made], steps())]


def test_the_text_of_a_sample_leaves_out_what_ended_it():
    eot = BYTES.eot_id
    made, _ = grown([*b"ab", eot], "eot")
    assert (made.text, made.tokens.finish, made.tokens.new) == ("ab", "eot", [97, 98, eot])
    made, _ = grown([*b"abx"], "length", ["xy"])
    assert (made.text, made.tokens.finish) == ("abx", "length")  # begun, never completed
    made, pieces = grown([*b"abxyz"], "length", ["xy"])
    assert (made.text, made.tokens.finish, made.tokens.new) == ("ab", "stop", [*b"abxy"])
    assert pieces == ["a", "b", "", ""]
    made, _ = grown([97, 0xC3], "length")
    assert made.text == "a\ufffd"
    made, _ = grown([97, eot, 98], "length")  # --ignore-eot
    assert made.text == "a<|endoftext|>b"


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_of_a_file():
    assert parse_prompts("f", "one\r\n\n  two \n\u2028three\n") == [
        ("f line 1", "one"),
        ("f line 3", "  two "),
        ("f line 4", "\u2028three"),
    ]
    rows = '\n{"prompt": "a\\nb", "id": 1}\r\n\n{"prompt": ""}'
    assert parse_prompts("f", rows) == [("f line 2", "a\nb"), ("f line 4", "")]
    assert parse_prompts("f", '[1]\n{"prompt": "x"}') == [("f line 1", "[1]"), ("f line 2", '{"prompt": "x"}')]
    for content, words in (
        ("", "^f: no prompts in it"),
        (" \n\n", "^f: no prompts in it"),
        ('{"text": "a"}', '^f line 1: .* no text in a field "prompt"'),
        ('{"prompt": "a"}\nb', '^f line 2: .* no text in a field "prompt"'),
        ('{"prompt": "a"}\n{"prompt": 3}', '^f line 2: .* no text in a field "prompt"'),
    ):
        with pytest.raises(InputError, match=words):
            parse_prompts("f", content)


def feed(monkeypatch, text):
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_prompts_from_flags_files_and_standard_input(tmp_path, monkeypatch):
    (tmp_path / "p").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\nx\n")
    name = str(tmp_path / "p")
    assert [text for _, text in read_prompts(SampleConfig())] == [""]
    assert [text for _, text in read_prompts(SampleConfig(prompt=("a", ""), prompts_file=name))] == [
        *("a", "", "caf\u00e9", "x")
    ]
    feed(monkeypatch, "two\nlines\n\n")
    assert read_prompts(SampleConfig(prompt=("-",))) == [("--prompt", "two\nlines\n")]
    feed(monkeypatch, "two\nlines\n\n")
    assert [text for _, text in read_prompts(SampleConfig(prompts_file="-"))] == ["two", "lines"]
    feed(monkeypatch, b"a\nb\xff")
    with pytest.raises(InputError, match=r"^--prompts-file -: line 2 is not valid UTF-8"):
        read_prompts(SampleConfig(prompts_file="-"))
    with pytest.raises(InputError, match=r"^--prompts-file .*none: no such file or directory"):
        read_prompts(SampleConfig(prompts_file=str(tmp_path / "none")))


def test_a_prompt_of_unknown_characters_is_refused_and_an_empty_one_begins_a_document():
    with pytest.raises(InputError, match=r"^--prompts-file f line 3: character 'o'"):
        encode_prompt(tokenizer_of("char"), "fox", "--prompts-file f line 3")
    assert encode_prompt(BYTES, "") == [BYTES.eot_id] and encode_prompt(BYTES, "a") == [97]
    bare = tokenizer_of("byte")
    bare.eot_id = None
    assert encode_prompt(bare, "a") == [97]
    with pytest.raises(InputError, match=r"^--prompt: empty, and the tokenizer has no end-of-text token"):
        encode_prompt(bare, "")


# ---- the door --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ckpt(trained):
    return trained("--eval-tokens", 1_000_000)


@pytest.fixture
def door(ckpt, monkeypatch, capsys):
    """sample.py in this process: (flags, standard input) -> (stdout, stderr). Errors are raised."""

    def call(*args, stdin=""):
        feed(monkeypatch, stdin)
        monkeypatch.setattr(sys, "argv", ["sample.py", "--ckpt", str(ckpt), *map(str, args)])
        sample.main.__wrapped__()
        return tuple(capsys.readouterr())

    return call


def test_several_texts_are_the_single_ones_in_order(door, tmp_path):
    flags = ("--max-new-tokens", 40, "--top_k", 50)
    one, said = door("--prompt", "def caf\u00e9", *flags)
    assert one.startswith("def caf\u00e9") and one.endswith("\n") and len(one.encode()) > 40 and said == ""
    three, _ = door("--prompt", "def caf\u00e9", *flags, "--num-samples", 3, "--batch-size", 2)
    parts = three.split(SEPARATOR + "\n")
    assert parts[0] == one and len(set(parts[:3])) == 3 and parts[3] == ""
    more, _ = door("--prompt", "import", "--prompt", "-", *flags, "--num-samples", 3, stdin="def caf\u00e9\n")
    assert more.split(SEPARATOR + "\n")[3:] == parts
    assert door("--prompt", "def caf\u00e9", *flags, "--seed", 1)[0] != one


def test_rows_of_json(door, ckpt, tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = ("--max-new-tokens", 30, "--num-samples", 2, "--temperature", 1, "--stop", "e", "--stop", " ")
    shown, _ = door("--prompt", "def ", "--prompt", "", *flags, "--json", out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["prompt"], row["sample"], row["seed"]) for row in rows] == [
        *(("def ", 0, 0), ("def ", 1, 0), ("", 0, 0), ("", 1, 0))
    ]
    assert shown == "".join(f"{row['prompt']}{row['text']}\n{SEPARATOR}\n" for row in rows)
    step = rundir.open_checkpoint(ckpt)
    for row in rows:
        assert row["finish"] in ("stop", "length", "eot") and "e" not in row["text"] and " " not in row["text"]
        assert len(row["tokens"]) <= 30
        if row["finish"] == "stop":
            assert BYTES.decode(row["tokens"])[:-1] == row["text"]
        assert (row["ckpt"], row["update"], row["digest"]) == (str(step.dir), step.step["update"], rundir.digest(step))
    assert "stop" in {row["finish"] for row in rows}
    alone, _ = door("--prompts-file", "-", *flags, "--json", "-", stdin='{"prompt": "def "}\n{"prompt": ""}\n')
    assert alone == out.read_text(encoding="utf-8")  # from a file of prompts, and nothing but rows
    single, _ = door("--prompt", "x", "--max-new-tokens", 3, "--json", out, "--greedy")
    row = json.loads(out.read_text(encoding="utf-8"))
    assert single == f"x{row['text']}\n" and row["finish"] == "length" and len(row["tokens"]) == 3


def test_options_reach_the_text(door):
    def text(*flags):
        return door("--prompt", "def f", "--max-new-tokens", 24, *flags)[0]

    greedy = text("--greedy")
    assert greedy == text("--temperature", 0) == text("--top-k", 1) == text("--min-p", 1) == text("--top-p", 1e-6)
    assert greedy != text("--greedy", "--repetition-penalty", 5)
    assert len({greedy, text(), text("--temperature", 3), text("--top-p", 0.5, "--temperature", 2)}) == 4
    assert text("--dtype", "bf16").startswith("def f")
    assert text("--greedy", "--stop", greedy[9:12]) == greedy[: greedy.index(greedy[9:12], 5)] + "\n"


def test_past_end_of_text(door, ckpt):
    flags = ("--max-new-tokens", 300, "--temperature", 4, "--num-samples", 4, "--json", "-")
    rows = [json.loads(line) for line in door(*flags)[0].splitlines()]
    ended = [row for row in rows if row["finish"] == "eot"]
    assert ended and all(row["tokens"][-1] == BYTES.eot_id and "<|endoftext|>" not in row["text"] for row in ended)
    on = [json.loads(line) for line in door(*flags, "--ignore-eot")[0].splitlines()]
    assert {row["finish"] for row in on} == {"length"}
    for row, longer in zip(rows, on, strict=True):
        assert longer["tokens"][: len(row["tokens"])] == row["tokens"] and len(longer["tokens"]) == 300
    assert "<|endoftext|>" in "".join(row["text"] for row in on)


def test_long_prompts_are_said(door):
    shown, said = door("--prompt", "x" * 40, "--max-new-tokens", 2)
    assert shown.startswith("x" * 40)
    assert said == "note: --prompt has 40 tokens; the model's context is 32: it begins with the last 24\n"
    _, said = door("--prompts-file", "-", "--max-new-tokens", 2, stdin="x\n" + "y" * 33 + "\n" + "z" * 90)
    assert "note: --prompts-file - line 3 has 90 tokens (and 1 shorter ones more than 32); " in said


def test_a_damaged_model_is_said(door, monkeypatch):
    from fourscale.pretrained import Pretrained

    whole = Pretrained.model

    def damaged(self, device="cpu"):
        model = whole(self, device)
        torch.nn.init.constant_(model.norm.weight, float("nan"))
        return model

    monkeypatch.setattr(Pretrained, "model", damaged)
    with pytest.raises(RunFailed, match=r"not finite .* use an earlier step"):
        door("--prompt", "x")


def test_a_conversation(door):
    """Each line is answered; one given again has the next sample; an unknown line is no end; an empty one is."""
    singles = [
        door("--prompt", "def ", "--num-samples", 2, "--max-new-tokens", 9)[0].split(SEPARATOR + "\n")[k]
        for k in (0, 1)
    ]
    shown, said = door("--interactive", "--max-new-tokens", 9, stdin="def \nx\ndef \n\nnever read\n")
    first, _, third, nothing = shown.split(SEPARATOR + "\n")
    assert (first, third, nothing) == (*singles, "")
    assert said == "note: type a prompt; Ctrl-C stops a text, an empty line or Ctrl-D ends\n"
    assert door("--interactive", "--max-new-tokens", 9, stdin="def ")[0] == f"{singles[0]}{SEPARATOR}\n"  # Ctrl-D
    assert door("--interactive", stdin="")[0] == ""


def test_nothing_on_standard_input_is_no_prompt(door):
    with pytest.raises(InputError, match="--prompt -: nothing came on standard input"):
        door("--prompt", "-", stdin="")


def test_greedy_samples_are_said_to_be_the_same(door):
    assert "greedy: the 2 samples" in door("--greedy", "--num-samples", 2, "--max-new-tokens", 2, "--prompt", "x")[1]


def test_a_hugging_face_directory_is_sampled_from_as_it_is(door, ckpt, tmp_path):
    """The same text as transformers', from a directory that knows nothing of us."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=257, intermediate_size=48, initializer_range=0.2, **shape)).eval()
    theirs.save_pretrained(tmp_path)
    BYTES.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    flags = ("--ckpt", tmp_path, "--prompt", "def ", "--greedy", "--ignore-eot", "--max-new-tokens", 20, "--json", "-")
    row = json.loads(door(*flags)[0])
    idx = torch.tensor([[*b"def "]])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(idx)}
    ids = AutoModelForCausalLM.from_pretrained(tmp_path).generate(idx, max_new_tokens=20, **options)
    assert row["tokens"] == ids[0, 4:].tolist() and row["text"] == BYTES.decode(row["tokens"])
    assert (row["ckpt"], row["update"]) == (str(tmp_path), None) and len(row["digest"]) == 64

    # Chat models name several ids that end a text.
    stops = [256, ids[0, 8].item()]
    table = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(table | {"eos_token_id": stops}))
    row = json.loads(door(*flags[:5], *flags[6:])[0])
    options |= {"eos_token_id": stops, "max_new_tokens": 20}
    assert row["tokens"] == AutoModelForCausalLM.from_pretrained(tmp_path).generate(idx, **options)[0, 4:].tolist()
    assert row["finish"] == "eot" and len(row["tokens"]) <= 5 and row["tokens"][-1] in stops


def test_ctrl_c_stops_a_text_and_not_the_conversation(ckpt):
    flags = ("--ckpt", ckpt, "--interactive", "--max-new-tokens", 10**6, "--ignore-eot")
    with subprocess.Popen(
        command("sample.py", *flags),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in a background job
    ) as process:
        process.stdin.write(b"def \n")
        process.stdin.flush()
        head = process.stdout.read(40)  # it is shown as it is made
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.stdin.write(b"class \n")
        process.stdin.flush()
        seen, deadline = head, time.monotonic() + 60
        while b"\nclass " not in seen and time.monotonic() < deadline:
            seen += os.read(process.stdout.fileno(), 1 << 16)
        assert b"\nclass " in seen or process.kill()
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"\n")
        process.stdin.flush()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0 and head.startswith(b"def ") and b"Traceback" not in err


def test_the_command_line(ckpt):
    done = run("sample.py", "--ckpt", ckpt, "--prompt", "def caf\u00e9", "--max_new_tokens", 5, "--json", "-")
    assert json.loads(done.stdout)["prompt"] == "def caf\u00e9" and done.stderr == ""
    assert one_error(run("sample.py", "--ckpt", ckpt, "--top-p", 2, code=2)).startswith("error: --top-p 2.0: ")
