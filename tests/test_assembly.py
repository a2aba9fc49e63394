"""Shares, duplicates, limits and resuming of what prepare.py writes, on sources made here."""

import json
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourscale import assembly, encoding, shards, tokenization
from fourscale.assembly import Assembly
from fourscale.cli import InputError
from fourscale.documents import BadRow, Document
from fourscale.sources import Chunk, Source

BYTE = tokenization.build("byte", lambda: iter(()))
QUARTER = 1 << 62  # a threshold that holds out a quarter of the texts


def source(texts, per_chunk=5, groups=None):
    """Documents (a BadRow where the text is None) in chunks of `per_chunk`."""
    items = [
        BadRow(f"row {i}: no text") if text is None else Document(text, f"row {i}", groups and groups[i])
        for i, text in enumerate(texts)
    ]

    def chunks(cursor):
        for first in range(cursor or 0, len(items), per_chunk):
            part = items[first : first + per_chunk]
            yield Chunk(len(part), first + len(part), iter, (part,))

    return Source(chunks, {"name": "made here"}, len(items))


def words(count, seed=0, longest=12):
    rng = random.Random(seed)
    return [f"{seed}:{i} " + "ab " * rng.randint(0, longest) for i in range(count)]


def assemble(work, sources, weights=None, threshold=QUARTER, skip_bad=False, shard_tokens=100, stop_after=None, **kw):
    """Run to the end, or to the commit number `stop_after`: what was made, or the state that was saved."""
    Path(work).mkdir(exist_ok=True)
    saved = []

    class Stopped(Exception):
        pass

    def save(state):
        saved.append(json.loads(json.dumps(state)))
        if len(saved) == stop_after:
            raise Stopped

    made = Assembly(work, sources, weights or [None] * len(sources), BYTE, shard_tokens, save=save, **kw)
    with encoding.pool(0, work, BYTE, {}, threshold, skip_bad) as submit:
        try:
            made.run(submit, kw.get("ahead", 0))
        except Stopped:
            return saved[-1]
    return made


def contents(made):
    """Documents of each side, as texts, and the bytes of every file under its final name."""
    texts, (entries, moves) = {}, made.entries()
    files = {final: (made.work / name).read_bytes() for name, final in moves}
    for split, part in entries.items():
        ids = np.frombuffer(b"".join(files[shard["file"]] for shard in part["shards"]), "<u2").tolist()
        texts[split] = b"".join(b"\n" if i == BYTE.eot_id else bytes([i]) for i in ids).decode().split("\n")[:-1]
    return texts, files, entries


def side(text):
    return "val" if encoding.text_hash(text) < QUARTER else "train"


# ---- one source


def test_every_document_is_on_its_side_in_order(tmp_path):
    texts = words(60)
    found, _, entries = contents(assemble(tmp_path / "a", [source(texts)]))
    for split in shards.SPLITS:
        assert found[split] == [text for text in texts if side(text) == split] and found[split]
        assert entries[split]["documents"] == len(found[split])
        assert entries[split]["text_bytes"] == sum(len(text) for text in found[split])


def test_rows_add_up(tmp_path):
    texts = [*words(30), "", None, *words(10), "", None, None]
    made = assemble(tmp_path / "a", [source(texts, 7)], skip_bad=True, dedup=True)
    taken = made.taken()[0]
    assert (taken.rows, taken.documents, taken.empty, taken.bad) == (45, 30, 2, 3)
    assert taken.duplicates == taken.dropped == 10
    assert taken.rows == taken.documents + taken.empty + taken.bad + taken.dropped + taken.crossing
    assert taken.bad_rows == ["row 31: no text", "row 43: no text", "row 44: no text"]
    with pytest.raises(InputError, match="row 31: no text"):
        assemble(tmp_path / "b", [source(texts, 7)])


def test_duplicates_are_counted_and_dropped_on_request(tmp_path):
    texts = words(40)
    spaced = [text.replace(" ", "\n\t ") for text in texts[:9]]
    accents = ["caf\u00e9 au lait", "cafe\u0301 au lait"]
    everything = [*texts, *spaced, *accents, *texts[20:23]]
    assert assemble(tmp_path / "a", [source(everything)]).taken()[0].documents == len(everything)
    made = assemble(tmp_path / "b", [source(everything)], dedup=True)
    found = contents(made)[0]
    assert sorted(found["train"] + found["val"]) == sorted([*texts, accents[0]])
    assert made.taken()[0].duplicates == made.taken()[0].dropped == 9 + 1 + 3
    for a, b in zip(texts, spaced, strict=False):
        assert side(a) == side(b)
    assert side(accents[0]) == side(accents[1])


def test_groups_stay_on_one_side_and_no_text_on_two(tmp_path):
    rng = random.Random(3)
    texts = words(200)
    texts[100:140] = texts[:40]  # the same text in other groups
    groups = [f"site{rng.randrange(12)}" for _ in texts]
    found, _, _ = contents(made := assemble(tmp_path / "a", [source(texts, 9, groups)]))
    sides = {group: "val" if encoding._hash64(group.encode()) < QUARTER else "train" for group in groups}
    assert set(sides.values()) == {"train", "val"}
    assert not set(found["train"]) & set(found["val"])
    first = {}
    for text, group in zip(texts, groups, strict=True):
        first.setdefault(text, sides[group])  # the first decides
    expected = [t for t, g in zip(texts, groups, strict=True) if sides[g] == first[t] == "train"]
    assert found["train"] == expected
    crossing = sum(sides[g] != first[t] for t, g in zip(texts, groups, strict=True))
    assert made.taken()[0].crossing == crossing > 0


@pytest.mark.parametrize("limit", (1, 2, 57, 100, 101, 640))
def test_max_tokens_is_exact(tmp_path, limit):
    texts = words(60)
    whole = assemble(tmp_path / "whole", [source(texts)])
    made = assemble(tmp_path / "cut", [source(texts)], max_tokens=limit)
    (_, all_files, all_entries), (_, files, entries) = contents(whole), contents(made)
    train = b"".join(all_files[s["file"]] for s in all_entries["train"]["shards"])
    assert b"".join(files[s["file"]] for s in entries["train"]["shards"]) == train[: 2 * limit]
    assert entries["train"]["tokens"] == limit
    ids = np.frombuffer(train[: 2 * limit], "<u2")
    assert entries["train"]["text_bytes"] == (ids != BYTE.eot_id).sum()
    assert entries["train"]["documents"] == (ids == BYTE.eot_id).sum() + (ids[-1] != BYTE.eot_id)
    assert made.taken()[0].rows == made.taken()[0].documents


def test_max_docs_is_exact(tmp_path):
    texts = words(60)
    for limit in (1, 5, 17, 60, 99):
        made = assemble(tmp_path / str(limit), [source(texts)], max_docs=limit)
        taken = made.taken()[0]
        assert taken.documents == taken.rows == min(limit, 60)
        entries = made.entries()[0]
        assert sum(entries[split]["documents"] for split in shards.SPLITS) == min(limit, 60)


# ---- several


def test_sources_without_weights_follow_each_other(tmp_path):
    a, b = words(30, 1), words(30, 2)
    found, _, entries = contents(assemble(tmp_path / "a", [source(a), source(b)]))
    assert found["train"] == [text for text in a + b if side(text) == "train"]
    assert {shard["source"] for shard in entries["train"]["shards"]} == {0, 1}
    one = contents(assemble(tmp_path / "b", [source(a + b)]))[2]
    assert entries["train"]["stream_sha256"] == one["train"]["stream_sha256"]


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    sizes=st.lists(st.integers(40, 90), min_size=4, max_size=4),
    limit=st.none() | st.integers(1, 1500),
)
def test_shares_are_exact(tmp_path_factory, weights, sizes, limit):
    fractions = [Fraction(w, sum(weights)) for w in weights]
    lists = [words(size, seed) for seed, size in zip(range(len(weights)), sizes, strict=False)]
    made = assemble(tmp_path_factory.mktemp("w"), [source(texts) for texts in lists], fractions, max_tokens=limit)
    tokens = [each["train"] for each in made.tokens()]
    have = [sum(len(t) + 1 for t in texts if side(t) == "train") for texts in lists]
    level = min(h / f for h, f in zip(have, fractions, strict=True))
    total = min(limit, level) if limit is not None else level
    for count, fraction, available in zip(tokens, fractions, have, strict=True):
        assert abs(count - fraction * total) < 1 and count <= available
    if limit is not None and limit < level - 1:
        assert sum(tokens) == limit
    for taken in made.taken():
        assert taken.rows == taken.documents


@pytest.mark.parametrize("dedup", (False, True))
@pytest.mark.parametrize("weights", (None, (Fraction(3, 4), Fraction(1, 4))))
@pytest.mark.parametrize("limit", (None, 900))
def test_going_on_from_any_commit_gives_the_same_bytes(tmp_path, monkeypatch, weights, limit, dedup):
    monkeypatch.setattr(assembly, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(assembly, "COMMIT_APART", 0.0)
    a, b = words(80, 1), words(50, 2)
    a[40:50], b[10:30] = b[:10], a[:20]  # and texts that are in both
    groups = [f"g{i % 7}" for i in range(80)]
    options = {"weights": weights, "max_tokens": limit, "dedup": dedup}

    def sources():
        return [source(a, 5, groups), source(b, 3)]

    whole = assemble(tmp_path / "whole", sources(), **options)
    expected = contents(whole)
    commits = 0
    while True:
        commits += 1
        work = tmp_path / f"at{commits}"
        stopped = assemble(work, sources(), stop_after=commits, **options)
        if isinstance(stopped, Assembly):
            break
        (work / "0" / "train_999.bin").write_bytes(b"written after the commit")
        with (work / "seen_train.u64").open("ab") as f:
            f.write(b"rubbish!")
        made = assemble(work, sources(), state=stopped, **options)
        assert contents(made) == expected and made.taken() == whole.taken()
        twice = assemble(tmp_path / f"twice{commits}", sources(), stop_after=max(1, commits // 2), **options)
        again = assemble(tmp_path / f"twice{commits}", sources(), state=twice, stop_after=2, **options)
        if not isinstance(again, Assembly):
            again = assemble(tmp_path / f"twice{commits}", sources(), state=again, **options)
        assert contents(again) == expected
    assert commits > 8


# ---- sets of hashes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 30), max_size=30), max_size=12))
def test_hashes_is_a_set(batches):
    ours, plain = assembly.Hashes(np.zeros(0, np.uint64)), set()
    for batch in batches:
        asked = np.array(batch, np.uint64)
        assert ours.has(asked).tolist() == [h in plain for h in batch]
        new = sorted(set(batch) - plain)
        ours.add(np.array(new, np.uint64))
        plain |= set(new)
        sizes = [len(run) for run in ours._runs]
        assert all(a >= 2 * b for a, b in pairwise(sizes))


def test_the_hash_is_fixed_for_ever():
    assert encoding.text_hash("") == 11592837232007162221
    assert encoding.text_hash("naïve 中文") == encoding.text_hash(" nai\u0308ve\n中 文") == 17250041133558883024


def test_a_lost_hash_file_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(assembly, "COMMIT_APART", 0.0)
    state = assemble(tmp_path / "a", [source(words(40))], stop_after=3)
    (tmp_path / "a" / "seen_train.u64").write_bytes(b"")
    with pytest.raises(InputError, match="not what an interrupted run wrote; delete"):
        assemble(tmp_path / "a", [source(words(40))], state=state)


# ---- against a plain model of what should happen


def modelled(lists, groups, weights, dedup, max_tokens, max_docs, shares):
    """Token lists of each source, train and val, taken document by document by the book."""
    out = [{"train": [], "val": []} for _ in lists]
    counts, at, seen, documents, dry = [0] * len(lists), [0] * len(lists), {}, 0, False
    asked = shares if weights and max_tokens is not None else [None] * len(lists)
    while max_docs is None or documents < max_docs:
        if weights:
            going = [i for i in range(len(lists)) if asked[i] is None or counts[i] < asked[i]]
            if dry or not going:
                break
            i = min(going, key=lambda i: (counts[i] / weights[i], i))
            if at[i] == len(lists[i]):
                dry = True
                continue
        else:
            going = [i for i in range(len(lists)) if at[i] < len(lists[i])]
            if not going or (max_tokens is not None and sum(counts) >= max_tokens):
                break
            i = going[0]
        text, group = lists[i][at[i]], groups[i][at[i]]
        at[i] += 1
        documents += 1
        where = (
            "val" if (encoding._hash64(group.encode()) if group else encoding.text_hash(text)) < QUARTER else "train"
        )
        home = seen.setdefault("".join(text.split()), (where, documents))
        if home[0] != where or (dedup and home[1] != documents):
            continue
        ids = [*text.encode(), BYTE.eot_id]
        out[i][where].append(ids)
        counts[i] += len(ids) if where == "train" else 0
    if weights:
        level = min((counts[i] / weights[i] for i in range(len(lists)) if at[i] == len(lists[i]) and dry), default=None)
        targets = [
            min(x for x in (asked[i], None if level is None else int(level * weights[i])) if x is not None)
            if asked[i] is not None or level is not None
            else None
            for i in range(len(lists))
        ]
    else:
        left, targets = max_tokens, []
        for count in counts:
            targets.append(None if left is None else min(left, count))
            left = None if left is None else left - targets[-1]
    streams = []
    for split in shards.SPLITS:
        stream = []
        for i in range(len(lists)):
            flat = [t for ids in out[i][split] for t in ids]
            stream += flat[: targets[i]] if split == "train" and targets[i] is not None else flat
        streams.append(stream)
    return streams


@settings(max_examples=150, deadline=None)
@given(
    picks=st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=25), min_size=1, max_size=3),
    grouped=st.booleans(),
    weights=st.none() | st.lists(st.integers(1, 4), min_size=3, max_size=3),
    dedup=st.booleans(),
    max_tokens=st.none() | st.integers(1, 400),
    max_docs=st.none() | st.integers(1, 40),
    per_chunk=st.integers(1, 9),
    recent=st.integers(1, 20),
)
def test_documents_are_taken_by_the_book(
    tmp_path_factory, picks, grouped, weights, dedup, max_tokens, max_docs, per_chunk, recent
):
    """Shares, limits, duplicates and groups together, whatever the chunks are."""
    texts = words(26)
    lists = [[texts[i].replace(" ", "  ") if k % 3 else texts[i] for k, i in enumerate(pick)] for pick in picks]
    groups = [[f"g{(k + i) % 5}" if grouped else None for k in range(len(pick))] for i, pick in enumerate(picks)]
    if len(lists) > 1:
        max_docs = None
    fractions = [Fraction(w, sum(weights[: len(lists)])) for w in weights[: len(lists)]] if weights else None
    made = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "RECENT", recent)
        made = assemble(
            tmp_path_factory.mktemp("m"),
            [source(t, per_chunk, g) for t, g in zip(lists, groups, strict=True)],
            fractions,
            dedup=dedup,
            max_tokens=max_tokens,
            max_docs=max_docs,
        )
    shares = made._shares_of(max_tokens) if fractions else None
    expected = modelled(lists, groups, fractions, dedup, max_tokens, max_docs, shares)
    _, files, entries = contents(made)
    for split, stream in zip(shards.SPLITS, expected, strict=True):
        got = np.frombuffer(b"".join(files[shard["file"]] for shard in entries[split]["shards"]), "<u2").tolist()
        assert got == stream
    for taken in made.taken():
        assert taken.rows == taken.documents + taken.dropped + taken.crossing
