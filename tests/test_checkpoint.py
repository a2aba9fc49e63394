"""Tensors and files: each byte written by one rank, the same bytes however they are saved, loaded on any topology."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from conftest import run
from torch.distributed.checkpoint import metadata as dcp_metadata

from fourscale import checkpoint
from fourscale.cli import InputError

PROGRAM = "tests/saver_program.py"


def program(case, path, nproc=None, code=0, **options):
    return run(PROGRAM, case, path, json.dumps(options), nproc=nproc, code=code)


def result(done):
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("result: "))[8:])


KINDS = ["ddp", "fsdp", "hsdp"]


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def saved(request, tmp_path_factory):
    """A directory of runs by each kind of sharding, saved in each mode, and what their ranks said."""
    path = tmp_path_factory.mktemp("saved")
    return path, result(program("modes", path, nproc=request.param, kinds=KINDS, modes=["off", "on"])), request.param


def test_asynchronous_saves_are_the_bytes_of_synchronous_ones(saved):
    """Whatever training does to the tensors once a save has begun."""
    _, told, _ = saved
    for kind in KINDS:
        assert len(set(told[f"{kind}-on"])) == 2
        assert told[f"{kind}-on"] == told[f"{kind}-off"]


def test_each_byte_is_staged_and_written_by_one_rank(saved):
    path, told, ranks = saved
    whole = sum(size for size, _ in told["fsdp bytes"])
    for kind in KINDS:
        sizes = [size for size, _ in told[f"{kind} bytes"]]
        assert sum(sizes) == whole and max(sizes) < 1.2 * whole / ranks, sizes
        files = [p.stat().st_size for p in (path / f"{kind}-on" / "step_1").glob("*.distcp")]
        assert len(files) == ranks and max(files) < 1.2 * sum(files) / ranks, files
    assert all(size == whole for _, size in told["ddp bytes"])  # though each rank held all


def test_loaded_on_any_topology(saved):
    path, _, ranks = saved
    sources = [f"{kind}-on" for kind in KINDS]
    assert result(program("load", path, sources=sources, kinds=["ddp"])) == "equal"
    if ranks == 2:
        assert result(program("load", path, nproc=2, sources=sources, kinds=["ddp", "hsdp"])) == "equal"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_a_partition_and_even(ranks):
    tensors = {f"t{i}": torch.zeros(i % 7 + 1, 10 + i) for i in range(60)}
    shares = [checkpoint.share(tensors, rank, ranks) for rank in range(ranks)]
    assert sorted(name for s in shares for name in s) == sorted(tensors)
    assert all(list(s) == [n for n in tensors if n in s] for s in shares)  # in order
    sizes = [checkpoint.local_bytes(s) for s in shares]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 7, 11])
def test_a_number_that_is_not_finite_is_found(bad, at):
    tensors = {"empty": torch.zeros(0, 4), "a": torch.randn(3, 4), "scalar": torch.tensor(3.0), "b": torch.randn(12)}
    assert checkpoint.non_finite(tensors) is None
    tensors["b"][at] = bad
    assert checkpoint.non_finite(tensors) == "b"
    assert checkpoint.non_finite({"empty": torch.zeros(0)}) is None


def test_available_memory_is_below_what_the_machine_has():
    free = checkpoint.available_memory()
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024  # "MemTotal: N kB" comes first
    assert 0 < free <= total


def test_a_rank_that_cannot_write_says_why(tmp_path):
    with pytest.raises(OSError, match=r"rank 0: .*is a directory"):
        (tmp_path / "__0_0.distcp").mkdir()
        checkpoint.write(tmp_path, {"a": torch.zeros(3)}, 0, None)


def test_another_model_is_named(tmp_path):
    checkpoint.write(tmp_path, {"a": torch.zeros(3)}, 0, None)
    with pytest.raises(InputError, match="has no b; it is a checkpoint of another model"):
        checkpoint.load(tmp_path, {"b": torch.zeros(3)}, None)
    with pytest.raises(InputError, match=r"a is \(3,\), the model's is \(4,\)"):
        checkpoint.load(tmp_path, {"a": torch.zeros(4)}, None)


class Attribute:
    """Pickled as getattr(owner, name), as Python before 3.11.4 does with members of enums."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_metadata_of_an_older_python_is_read_and_its_getattr_gives_members_of_enums_alone():
    formats = dcp_metadata._MEM_FORMAT_ENCODING

    def load(owner, name):
        return checkpoint._TensorMetadataUnpickler(io.BytesIO(pickle.dumps(Attribute(owner, name)))).load()

    assert load(formats, "TORCH_PRESERVE_FORMAT") is formats.TORCH_PRESERVE_FORMAT
    for owner, name in (
        (formats, "__class__"),
        (formats, "mro"),
        (dcp_metadata.Metadata, "__init__"),
        (Path, "unlink"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="no place in tensor metadata"):
            load(owner, name)
