import numpy as np
import pytest
import torch
from scipy import stats

from titan_exp.models.blocks.initialization import TRUNCATION, InitSpec, ShardSpec, init_slice

NORMAL = InitSpec("normal", 0.5)


def whole(shape: tuple[int, ...], name: str = "w", seed: int = 0) -> torch.Tensor:
    return init_slice(seed, name, NORMAL, ShardSpec.whole(shape))


@pytest.mark.parametrize("shape", [(200, 30), (64, 7), (1, 5), (37,), (3, 130, 6)])
def test_any_part_is_that_part_of_the_whole(shape):
    random = np.random.default_rng(0)
    everything = whole(shape)
    for _ in range(20):
        start = tuple(int(random.integers(0, extent)) for extent in shape)
        size = tuple(int(random.integers(0, extent - first + 1)) for extent, first in zip(shape, start, strict=True))
        window = tuple(slice(first, first + extent) for first, extent in zip(start, size, strict=True))
        assert torch.equal(init_slice(0, "w", NORMAL, ShardSpec(shape, start, size)), everything[window])


def test_values_depend_on_seed_and_name():
    assert not torch.equal(whole((64, 8)), whole((64, 8), seed=1))
    assert not torch.equal(whole((64, 8)), whole((64, 8), name="v"))


def test_rows_of_different_blocks_differ():
    values = whole((256, 16))
    assert torch.unique(values, dim=0).shape[0] == 256


def test_distribution_is_a_truncated_normal():
    values = whole((1000, 1000)).flatten().numpy()
    # Clamping would heap 0.27 % of the values on the two ends.
    expected = stats.truncnorm(-TRUNCATION, TRUNCATION, scale=0.5)
    assert stats.kstest(values[::7], expected.cdf).pvalue > 0.01
    assert values.std() == pytest.approx(expected.std(), rel=2e-3)
    assert np.count_nonzero(np.abs(values) > 0.999 * TRUNCATION * 0.5) < 40


def test_bits_are_pinned():
    """Initial weights are part of every experiment's identity: a change here changes every published curve."""
    expected = torch.tensor([0.3936519027, 0.2161132097, -0.7524012923])
    assert torch.equal(whole((4, 3), name="embedding.weight")[1], expected)


def test_constants():
    assert torch.equal(init_slice(0, "w", InitSpec("ones"), ShardSpec((4,), (0,), (2,))), torch.ones(2))
    assert torch.equal(init_slice(0, "w", InitSpec("zeros"), ShardSpec((4,), (1,), (3,))), torch.zeros(3))
