"""Which window is sample i: each once an epoch, by one rank, whatever the topology."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourscale.budget import updates_for
from fourscale.cli import InputError
from fourscale.order import Mixture, Order, key64, permute, supervised, update_rows


@given(st.integers(1, 3000), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_one(n, seed):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key64(seed))), np.arange(n))


def test_neighbours_are_no_likelier_than_chance():
    # In a random permutation of n, i+1 follows i with probability 1/n: about one pair a permutation.
    n, keys = 200, 400
    pairs = sum(int((np.diff(permute(np.arange(n), n, key64(k))) == 1).sum()) for k in range(keys))
    assert abs(pairs / keys - 1) < 0.2  # standard error 0.05


@pytest.mark.parametrize("total", [1 + 32 * 7, 10_001, 32 * 150])
def test_each_window_once_an_epoch_and_disjoint(total):
    order = Order(total, 32, seed=7)
    for epoch in range(3):
        starts = order.starts(epoch * order.n_windows + np.arange(order.n_windows))
        assert np.unique(starts).size == order.n_windows
        assert (np.diff(np.sort(starts)) == 32).all()
        assert starts.min() >= 0
        assert starts.max() + 33 <= total


def test_epochs_differ_and_a_seed_repeats():
    order = Order(100_000, 64, seed=3)
    n = order.n_windows
    first, second = order.starts(np.arange(n)), order.starts(n + np.arange(n))
    assert not np.array_equal(first, second)
    assert set(first % 64) != set(second % 64)  # the epoch's random offset
    assert not np.array_equal(first // 64, second // 64)  # and another permutation, offset apart
    assert np.array_equal(first, Order(100_000, 64, seed=3).starts(np.arange(n)))
    assert not np.array_equal(first, Order(100_000, 64, seed=4).starts(np.arange(n)))


@pytest.mark.parametrize("world,local_bsz", [(1, 12), (1, 5), (2, 3), (3, 1), (4, 4), (8, 2)])
def test_any_split_of_a_global_batch_sees_the_same_samples(world, local_bsz):
    global_bsz = 12
    grad_accum = -(-global_bsz // (world * local_bsz))
    rows = [update_rows(global_bsz, world, r, local_bsz, grad_accum) for r in range(world)]
    assert {r.shape for r in rows} == {(grad_accum, local_bsz)}  # every rank runs the same forwards
    seen = np.concatenate([r.ravel() for r in rows])
    assert sorted(seen[seen < global_bsz]) == list(range(global_bsz))
    assert supervised(seen, 10**9, 32, global_bsz).sum() == global_bsz * 32  # padding rows weigh nothing


def test_each_window_of_an_epoch_goes_to_exactly_one_rank():
    order, world, local_bsz, accum = Order(20_000, 32, seed=1), 4, 2, 3
    per_update = world * local_bsz * accum
    seen = []
    for update in range(-(-order.n_windows // per_update)):
        for rank in range(world):
            index = update * per_update + update_rows(per_update, world, rank, local_bsz, accum).ravel()
            seen += order.starts(index[index < order.n_windows]).tolist()
    assert len(seen) == len(set(seen)) == order.n_windows


def test_the_tail_ends_inside_a_window():
    assert updates_for(2 * 10**9, 262_144) == (7_630, 103_424)
    assert updates_for(3 * 10**9, 327_680) == (9_156, 89_600)
    assert 89_600 % 1_024 == 512
    lengths = supervised(np.arange(320), 89_600, 1_024, 320)
    assert lengths.sum() == 89_600
    assert lengths[86:89].tolist() == [1_024, 512, 0]


def test_random_sampling_reaches_every_legal_start_and_repeats():
    order = Order(100, 32, seed=5, sampling="random")
    starts = order.starts(np.arange(20_000))
    assert set(starts) == set(range(100 - 32))
    counts = np.bincount(starts, minlength=68)
    assert counts.max() / counts.min() < 1.5  # 294 expected each, standard deviation 17
    assert np.array_equal(starts, order.starts(np.arange(20_000)))


def test_a_stream_shorter_than_a_window_is_refused():
    with pytest.raises(InputError, match="ctx \\+ 1 = 33"):
        Order(32, 32, seed=0)


def test_the_order_is_pinned():
    # A run that is resumed by a later version must go on with the same samples.
    assert Order(10_001, 32, seed=7).starts(np.arange(6)).tolist() == [96, 7072, 1376, 352, 5248, 3232]
    assert Order(100_000, 64, seed=3, sampling="random").starts(np.arange(4)).tolist() == [70088, 69463, 25492, 62771]
    mixed = Mixture([10_001, 5_000], [Fraction(7, 10), Fraction(3, 10)], 32, seed=7)
    assert [x.tolist() for x in mixed.starts(np.arange(6))] == [[0, 0, 1, 1, 0, 1], [5632, 5248, 320, 1088, 7072, 1056]]


@pytest.mark.parametrize("sampling", ["epoch", "random"])
@pytest.mark.parametrize("total", [1 + 32 * 7, 10_001])
def test_a_mixture_of_one_is_its_order(total, sampling):
    index = np.arange(5_000).reshape(50, 100)
    parts, starts = Mixture([total], [Fraction(1)], 32, 7, sampling).starts(index)
    assert np.array_equal(starts, Order(total, 32, 7, sampling).starts(index))
    assert not parts.any() and parts.shape == index.shape


@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.integers(0, 2**32), st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_every_block_of_a_mixture_holds_exactly_its_shares(counts, seed, first):
    mixture = Mixture([10_000] * len(counts), [Fraction(c, sum(counts)) for c in counts], 32, seed)
    share = np.array(counts) // np.gcd.reduce(counts)
    block, blocks = int(share.sum()), 5
    index = first * block + np.arange(blocks * block)
    parts, within = mixture.locate(index)
    for b in range(blocks):
        assert np.array_equal(np.bincount(parts[b * block : (b + 1) * block], minlength=len(counts)), share)
    for k, w in enumerate(share):  # a part's samples are numbered without a gap or a repeat
        assert np.array_equal(np.sort(within[parts == k]), first * w + np.arange(blocks * w))
    some = index[::-3]  # a sample doesn't depend on those asked for with it
    assert np.array_equal(mixture.locate(some)[0], parts[::-3]) and np.array_equal(
        mixture.locate(some)[1], within[::-3]
    )


def test_a_mixture_has_no_pattern_and_the_same_text_twice_has_two_orders():
    mixture = Mixture([100_000, 100_000], [Fraction(1, 2), Fraction(1, 2)], 32, seed=3)
    parts, starts = mixture.starts(np.arange(2_000))
    assert abs((parts[::2] == 0).mean() - 0.5) < 0.05  # standard deviation 0.016
    assert not np.array_equal(starts[parts == 0], starts[parts == 1])
    assert mixture.epochs(2_000) == pytest.approx([1_000 / mixture.orders[0].n_windows] * 2)
    other = Mixture([100_000, 100_000], [Fraction(1, 2), Fraction(1, 2)], 32, seed=4)
    assert not np.array_equal(other.starts(np.arange(2_000))[0], parts)


def test_a_part_of_a_mixture_sees_each_window_once_an_epoch():
    mixture = Mixture([20_000, 9_000, 700], [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)], 32, seed=1)
    parts, starts = mixture.starts(np.arange(6_000))
    for k, order in enumerate(mixture.orders):
        # Blocks of 6 samples: an epoch's last samples may stand a few places into the next.
        first_epoch = starts[parts == k][: order.n_windows // 3 * 3 - 3]
        assert np.unique(first_epoch).size == first_epoch.size


def test_shares_too_fine_to_be_exact_are_refused():
    Mixture([1_000] * 2, [Fraction(1, 10**6), 1 - Fraction(1, 10**6)], 32, seed=0)
    with pytest.raises(InputError, match=r"--data: the weights are exact only in 1,000,001 samples"):
        Mixture([1_000] * 2, [Fraction(1, 1_000_001), Fraction(1_000_000, 1_000_001)], 32, seed=0)
