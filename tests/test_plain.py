"""train.py, with all that makes it fast, trains what the plain loop trains."""

import pytest
from conftest import rows, run

from fourscale import plain
from fourscale.measuring import flags_of, random_text

SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 2, "ctx": 64, "vocab_size": 65, "local_bsz": 4, "lr": 3e-3}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return random_text(tmp_path_factory.mktemp("ids"), 65, 50_000)


@pytest.mark.parametrize(("dtype", "off"), [("fp32", 5e-5), ("bf16", 2e-3)])
def test_losses_are_the_plain_loops(ids, tmp_path, dtype, off):
    told = SHAPE | {"grad_accum": 1, "updates": 20, "log_every": 1, "data": str(ids / "train.bin"), "dtype": dtype}
    want = plain.train(plain.Plain(**told))
    flags = SHAPE | {"steps": 20, "warmup": 1, "data": ids, "data_dtype": "uint16", "dtype": dtype, "device": "cpu"}
    flags |= {"eval_every": 0, "ckpt_dir": tmp_path / "run"}
    run("train.py", *flags_of(flags))
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert found == pytest.approx(want["losses"], abs=off)
    assert found[-1] < found[0] - 0.5
    assert want["first_update_s"] > 0 and len(want["tokens_per_s"]) == 20
