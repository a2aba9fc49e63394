"""Parsing: any text comes back as it was, and what is malformed or damaged is named by file and line."""

import gzip
import os
import random
import shutil
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sources import (
    KINDS,
    SEPARATOR,
    messages,
    opened,
    shrink,
    stored,
    stories,
    texts_of,
    whole_from_everywhere,
    write,
    zstd,
)

from fourscale import documents, files, sources
from fourscale.cli import InputError
from fourscale.documents import BadRow, Document


def strict(source):
    """All documents; a malformed row is raised, as prepare.py does without --skip-bad."""
    for row in source.documents():
        if isinstance(row, BadRow):
            raise InputError(row.message)


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch)


# ---- exact round trips -----------------------------------------------------------------------------------------------


def odd_text(**size):
    pieces = [
        "a",
        "é",
        "中",
        "😀",
        " ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\0",
        '"',
        '""',
        ",",
        "\u2028",
        "\ufeff",
        "x" * 9,
    ]
    pieces += ["<", "|", SEPARATOR[:5], "\\", "\\u", "\x1c", "\x85", "\x1a"]
    return st.lists(st.one_of(st.sampled_from(pieces), st.characters(exclude_categories=["Cs"])), **size).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_comes_back_as_it_was(small, tmp_path, kind):
    count = 25 if kind == "saved" else 60

    @settings(max_examples=count, deadline=None)
    @given(st.lists(odd_text(max_size=30), min_size=1, max_size=8))
    def check(texts):
        path = tmp_path / kind
        if kind == "saved":
            shutil.rmtree(path, ignore_errors=True)
            datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
        else:
            write(path, texts)
        source = opened(path)
        expected = [text for text in SEPARATOR.join(texts).split(SEPARATOR) if text] if ".txt" in kind else texts
        assert texts_of(source) == expected
        whole_from_everywhere(source)

    check()


@pytest.mark.parametrize("name", ("x.txt", "x.txt.gz", "x.txt.zst"))
def test_units_join_to_the_file(small, tmp_path, name):
    path = tmp_path / name

    @settings(max_examples=150, deadline=None)
    @given(odd_text(max_size=150))
    @example("é中😀" * 60)
    @example("a line\n" * 60)
    def check(text):
        path.write_bytes(stored(name, text.encode()))
        source = sources.open_source(str(path))
        rows = list(source.documents())
        assert "".join(row.text for row in rows) == text
        assert all(row.text and len(row.text.encode()) <= 64 for row in rows)
        position = 0
        for row in rows:
            assert row.where == f"{path}:{text[:position].count(chr(10)) + 1}"
            position += len(row.text)
        whole_from_everywhere(source)

    check()


@pytest.mark.parametrize("separator", ("\n\n", "aa", "<>", "aba", "é"))
def test_separated_text_splits_as_python_does(small, tmp_path, separator):
    path = tmp_path / "x.txt"

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(["a", "b", "<", ">", "\n", "é", "中" * 20]), max_size=200).map("".join))
    @example("b" + separator[0] * 301)
    @example("b" + separator[:-1] * 301)
    def check(text):
        path.write_bytes(text.encode())
        source = sources.open_source(str(path), doc_sep=separator)
        assert texts_of(source) == [part for part in text.split(separator) if part]
        where = iter(row.where for row in source.documents())
        line = 1
        for part in text.split(separator):
            assert not part or next(where) == f"{path}:{line}"
            line += part.count("\n") + separator.count("\n")
        whole_from_everywhere(source)

    check()


def test_units_end_at_blank_lines_and_are_bounded(tmp_path):
    path = tmp_path / "a.txt"
    paragraphs = [f"paragraph {i}\n" + "line of it\n" * 30 + "\n \n" * (i % 3) + "\n" for i in range(9000)]
    path.write_text("".join(paragraphs))
    units = texts_of(sources.open_source(str(path)))
    assert all(unit.startswith("paragraph ") and unit.endswith("\n\n") for unit in units)
    assert sum(4096 <= len(unit) < 5000 for unit in units) > 0.98 * len(units)
    path.write_text("a line\n" * 500_000)  # no blank line: after a line
    units = texts_of(sources.open_source(str(path)))
    assert max(map(len, units)) <= documents.LONGEST_PARAGRAPH + 7 and all(unit.endswith("\n") for unit in units)
    path.write_text("中xy" * 1_000_000)  # no line
    units = texts_of(sources.open_source(str(path)))
    assert "".join(units) == "中xy" * 1_000_000 and max(len(unit.encode()) for unit in units) <= files.CHUNK_BYTES


def test_a_row_longer_than_many_chunks(tmp_path):
    texts = ["short", 'x\n"y" 中' * 300_000, "last"]
    for kind in ("a.txt", "a.jsonl", "a.csv", "a.parquet"):
        source = opened(write(tmp_path / kind, texts))
        assert texts_of(source) == texts
        assert list(source.chunks(next(source.chunks(None)).after)) == list(source.chunks(None))[1:]


def test_windows_line_ends_a_byte_order_mark_and_blank_lines(tmp_path):
    texts = stories(9)
    for kind in ("a.jsonl", "a.csv"):
        path = write(tmp_path / kind, texts)
        data = path.read_bytes().replace(b"\r\n", b"\n")
        if kind == "a.jsonl":
            data = data.replace(b"\n", b"\r\n\r\n")
        path.write_bytes(b"\xef\xbb\xbf" + data + b"\n\n")
        assert texts_of(sources.open_source(str(path))) == texts
    path.write_bytes(b'\xef\xbb\xbf"text"\r\n"a\r\nb"\r\n\r\n"c"')
    source = sources.open_source(str(path))
    assert [(d.text, d.where) for d in source.documents()] == [("a\r\nb", f"{path}:2"), ("c", f"{path}:5")]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of memory")
def test_memory_stays_flat_over_one_large_row_group(tmp_path):
    texts = [random.Random(i).randbytes(1 << 11).hex() for i in range(1 << 15)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    code = (
        "import pyarrow.parquet\nfrom fourscale import sources\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) >> 10\n"
        "source, size = sources.open_source('a.parquet'), 0\nbefore = peak()\n"
        "for row in source.documents(): size += len(row.text)\n"
        "print(size, peak() - before)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    size, grown = map(int, done.stdout.split())
    assert size == 128 << 20 and grown < 110  # MB


def test_any_locale(tmp_path):
    path = write(tmp_path / "a.csv", ["naïve 中文"])
    code = f"from fourscale import sources; print(ascii(next(sources.open_source({str(path)!r}).documents()).text))"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "'na\\xefve \\u4e2d\\u6587'\n", done.stderr


# ---- malformed rows and damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    (
        ("a.jsonl", b'{"text": "ok"}\n{"text": "oh\n{"text": "2"}\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n[1]\n{"text": "2"}', "a.jsonl:3: a JSON list, not an object"),
        (
            "a.jsonl",
            b'{"text": "ok"}\n{"body": 1, "n": 1}\n{"text": "2"}',
            "a.jsonl:2: no field 'text'; there are body, n",
        ),
        ("a.jsonl", b'{"text": null}\n{"text": "ok"}\n{"text": "2"}', "a.jsonl:1: field 'text' is null, not text"),
        ("a.jsonl", b'{"text": 5}\n{"text": "ok"}\n{"text": "2"}', "a.jsonl:1: field 'text' is int, not text"),
        (
            "a.jsonl",
            b'{"text": "\\ud83d\\ude00"}\n{"text": "x\\udc80"}\n{"text": ""}',
            r"a.jsonl:2: \udc80 is a lone surr",
        ),
        (
            "a.jsonl",
            b'{"text": "ok"}\n{"text": "caf\xe9"}\n{"text": ""}',
            "a.jsonl:2: byte 14 of the line (0xe9) is not UTF-8",
        ),
        (
            "a.jsonl",
            b'{"text": ""}\n{"text": "\xed\xa0\x80"}\n{"text": ""}',
            "a.jsonl:2: byte 11 of the line (0xed) is not UTF-8",
        ),
        ("a.jsonl", b'{"text": ""}\n' + b"[" * 9999 + b'\n{"text": ""}', "a.jsonl:2: not valid JSON"),
        ("a.csv", b"text,n\nok,1\nonly\nok,2\n", "a.csv:3: 1 fields where the header has 2"),
        ("a.csv", b'text,n\n"o\nk",1\na,b,c\nok,2\n', "a.csv:4: 3 fields where the header has 2"),
        ("a.csv", b"text,n\nok,1\ncaf\xe9,2\n\xc3\xa9,3\n", "a.csv:3: byte 0xe9 of the row is not UTF-8"),
        ("a.csv", b"text,n\nok,1\na\rb,2\nok,2", "a.csv:3: not valid CSV"),
        ("a.txt", b"one|two\ncaf\xe9|three", "a.txt:2: byte 4 of the line (0xe9) is not UTF-8; convert the file"),
        ("a.txt", b"one|two|\n \xe4\xb8", "a.txt:2: byte 2 of the line (0xe4)"),
    ),
)
def test_a_bad_row_is_named_and_the_others_stand(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    source = sources.open_source(str(tmp_path / name), doc_sep="|" if name == "a.txt" else None)
    rows = list(source.documents())
    bad = [row.message for row in rows if isinstance(row, BadRow)]
    assert len(bad) == 1 and message in bad[0] and "\n" not in bad[0]
    assert len(rows) == 3


def test_utf16_is_recognised(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n' * 9, encoding="utf-16")
        assert "looks like UTF-16" in messages(sources.open_source(str(tmp_path / name)))[0]
    (tmp_path / "a.csv").write_text("text\nx\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"a\.csv: looks like UTF-16"):
        sources.open_source(str(tmp_path / "a.csv"))


def test_tables_account_for_every_row(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None, "", "y"], "n": [1, 2, 3, 4]}), path)
    rows = list(sources.open_source(str(path)).documents())
    assert rows[1] == BadRow(f"{path}: row 2: field 'text' is null, not text; repair or remove the row")
    assert rows[2:] == [Document("", f"{path}: row 3"), Document("y", f"{path}: row 4")]
    broken = pyarrow.array([b"ok", b"caf\xe9", None, "é".encode()], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), path)
    rows = list(sources.open_source(str(path)).documents())
    assert [getattr(row, "text", None) for row in rows] == ["ok", None, None, "é"]
    assert rows[1].message == f"{path}: row 2: field 'text' is not UTF-8; repair or remove the row"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["a", "a", "b"]).dictionary_encode()}), path)
    assert texts_of(sources.open_source(str(path))) == ["a", "a", "b"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"bytes"]}), path)
    assert messages(sources.open_source(str(path))) == [
        f"{path}: row 1: field 'text' is bytes, not text; repair or remove the row"
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    (
        ("a.jsonl.gz", b'{"text": "not gzip"}', r"a\.jsonl\.gz: damaged \.jsonl\.gz \(.*\); fetch the file again"),
        ("a.jsonl.zst", b'{"text": "not zstd"}', r"a\.jsonl\.zst: damaged"),
        ("a.txt.gz", b"", r"a\.txt\.gz: damaged \.txt\.gz \(an empty file\)"),
        ("a.txt.gz", gzip.compress(b"lines\n" * 9000, mtime=0)[:-40], r"a\.txt\.gz: damaged"),
        (
            "a.txt.gz",
            gzip.compress(b"lines\n", mtime=0) + gzip.compress(b"lines\n" * 9000, mtime=0)[:-9],
            r"a\.txt\.gz: damaged",
        ),
        ("a.txt.gz", gzip.compress(b"lines\n" * 9, mtime=0)[:-6] + b"\0" * 6, r"a\.txt\.gz: damaged"),
        ("a.txt.zst", zstd(b"lines\n" * 9000)[:-4], r"a\.txt\.zst: damaged"),
        ("a.txt.zst", zstd(b"lines\n") + zstd(random.Random(0).randbytes(999))[:-9], r"a\.txt\.zst: damaged"),
        ("a.csv.zst", zstd(b"text\nhello\n" * 900)[:-4], r"a\.csv\.zst: damaged"),
        ("a.parquet", b"PAR1 not really PAR1", r"a\.parquet: damaged \.parquet"),
        ("a.parquet", b"", r"a\.parquet: damaged \.parquet"),
    ),
)
def test_damaged_files_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as e:
        strict(sources.open_source(str(tmp_path / name)))
    assert "\n" not in str(e.value)


def test_a_parquet_file_damaged_within(tmp_path):
    path = write(tmp_path / "a.parquet", stories(900))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = b"\xff" * 400
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet: damaged \.parquet"):
        strict(sources.open_source(str(path)))


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ('text\nok\n5" pipe\n"fine"\n', r"a\.csv:3: a quote amid a field"),
        ('text\nok\n5" pipe and 3" nail\n', r"a\.csv:3: a quote amid a field"),
        ('text\nok\n"a" b\n', r"a\.csv:3: "),
        ('text\nok\n"line\nof ""it""\n\nend\n', r"a\.csv:3: a quoted field begins and is not closed; close it"),
        ('"te\nxt\nok\n', r"a\.csv:1: a quoted field begins"),
    ),
)
def test_quotes_that_leave_open_what_a_row_is(tmp_path, content, message):
    for name in ("a.csv", "a.csv.gz"):
        (tmp_path / name).write_bytes(stored(name, content.encode()))
        with pytest.raises(InputError, match=message.replace("csv", name[2:])):
            strict(sources.open_source(str(tmp_path / name)))


def test_a_row_without_end_is_an_error_before_memory_ends(small, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1 << 20)
    rows = b'"x\ny"\n' * 100
    for name, start, rest, options, message in (
        (
            "a.csv",
            b"text\n" + rows,
            b'"open\n' + b'""\nline\n' * 999_999,
            {},
            r"a\.csv:202: a quoted field .* within 1 MB",
        ),
        ("a.csv", b"text\n" + rows, b'5" pipe\n' + rows * 9999, {}, r"a\.csv:202: a quote amid"),
        ("a.jsonl", b'{"text": "ok"}\n' * 9, b"[" * 4_000_000, {}, r"a\.jsonl:10: a line of more than 1 MB"),
        ("a.txt", b"x|y|\n", b"line\n" * 999_999, {"doc_sep": "|"}, r"a\.txt:1: no '\|' within 1 MB; check --doc-sep"),
    ):
        (tmp_path / name).write_bytes(start + rest)
        source = sources.open_source(str(tmp_path / name), **options)
        with pytest.raises(InputError, match=message):
            strict(source)


def test_stray_quotes_are_found_wherever_they_stand():
    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(st.sampled_from(['"', '""', "a", ",", "\n", "\r\n", '"b"', '"c\n"', "é"]), max_size=14).map("".join)
    )
    def check(text):
        stray = files.stray_quote(text.encode())
        rest, at, start = text.encode(), 0, True  # by hand: quotes open at the start of a field and close at its end
        while at < len(rest):
            if rest[at : at + 1] == b'"':
                end = at + 1
                while start and end < len(rest) and (rest[end] != 34 or rest[end + 1 : end + 2] == b'"'):
                    end += 1 if rest[end] != 34 else 2
                if not start or end >= len(rest) or rest[end + 1 : end + 2] not in (b"", b",", b"\r", b"\n"):
                    break
                at, start = end + 1, False
            else:
                start, at = rest[at] in b",\r\n", at + 1
        assert stray == (at if at < len(rest) else -1)

    check()
