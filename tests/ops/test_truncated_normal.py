import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr, ndtri

from titan_exp.ops.truncated_normal import (
    _DENOMINATOR,
    _NUMERATOR,
    _SCALE,
    GAMMA,
    TRUNCATION,
    splitmix64,
    truncated_normal,
    wrap,
)

MASK = 2**64 - 1


def words(key: int, count: int, device: str = "cpu") -> torch.Tensor:
    states = torch.arange(1, count + 1, device=device).mul_(wrap(GAMMA)).add_(wrap(key))
    return splitmix64(states)


def mixed(state: int) -> int:
    """SplitMix64's mixing of one state, in Python's integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def test_words_are_those_of_splitmix64():
    """The first three are the published test vector of seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word & MASK for word in words(1234567, 3).tolist()] == published
    key = 2**64 - 99  # states with every pattern of signs
    found = words(key, 2000)
    assert [word & MASK for word in found.tolist()] == [mixed(key + (i + 1) * GAMMA & MASK) for i in range(2000)]
    assert 900 < int((found < 0).sum()) < 1100


def as_words(integers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(integers.astype(np.int32)).view(torch.int64)[None]


def test_every_operation_is_rounded_on_its_own():
    """Bitwise numpy's float32, one operation at a time: no kernel fuses a multiplication with an addition."""
    integers = np.random.default_rng(0).integers(-(2**31), 2**31, 100_001 * 2)
    t = integers.astype(np.int32).astype(np.float32) * np.float32(2**-31)
    w = np.float32(1) - t * t

    def polynomial(coefficients: tuple[float, ...]) -> np.ndarray:
        value = w + np.float32(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            value = value * w
            value = value + np.float32(coefficient)
        return value

    expected = polynomial(_NUMERATOR) / polynomial(_DENOMINATOR) * t * np.float32(_SCALE * 0.02)
    assert np.array_equal(truncated_normal(as_words(integers), 0.02)[0].numpy(), expected)


def test_numbers_are_the_inverse_cdf():
    """Against scipy in fp64. Near three sigma, rounding t to fp32 is as large an error as the fit's."""
    random = np.random.default_rng(0)
    tail = 2**31 - 1 - random.integers(0, 2**22, 2**18)
    ends = np.concatenate([2**31 - 1 - np.arange(512), np.arange(-512, 512), -(2**31) + np.arange(512)])
    for integers, error in ((random.integers(-(2**31), 2**31, 2**20), 8e-6), (tail, 8e-6), (-tail, 8e-6), (ends, 8e-6)):
        t = integers / 2**31
        low = ndtr(-TRUNCATION)
        exact = -np.sign(t) * ndtri(low + (0.5 - low) * (1 - np.abs(t)))
        found = truncated_normal(as_words(integers), 1.0)[0].numpy()
        assert np.abs(found - exact).max() < error
        assert np.abs(found).max() <= TRUNCATION
    middle = np.arange(-1000, 1000)
    assert np.allclose(truncated_normal(as_words(middle), 1.0)[0], ndtri(0.5 + (0.5 - low) * middle / 2**31), rtol=1e-5)


def test_distribution_is_a_truncated_normal():
    """Clamping would heap 0.27 % of the numbers on the two ends."""
    expected = stats.truncnorm(-TRUNCATION, TRUNCATION)
    values = truncated_normal(words(7, 2**20)[None], 1.0)[0].double().numpy()
    count = len(values)
    assert stats.kstest(values[::4], expected.cdf).pvalue > 0.01
    assert abs(values.mean()) < 4 * expected.std() / count**0.5
    assert values.std() == pytest.approx(expected.std(), rel=4 / (2 * count) ** 0.5)
    assert abs(stats.skew(values)) < 4 * (6 / count) ** 0.5
    assert stats.kurtosis(values) == pytest.approx(float(expected.stats("k")), abs=4 * (24 / count) ** 0.5)
    assert np.count_nonzero(np.abs(values) > 2.99) == pytest.approx(2 * count * expected.sf(2.99), rel=0.3)


def test_neighbours_keys_and_bits_are_independent():
    values = truncated_normal(words(7, 2**19)[None], 1.0)[0]
    limit = 4.5 / len(values) ** 0.5
    for other in (
        *(values.roll(shift) for shift in (1, 2, 3, 64, 4096)),
        truncated_normal(words(8, 2**19)[None], 1.0)[0],
    ):
        for left, right in ((values, other), (values.square(), other.square())):
            assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < limit
    bits = torch.stack([(words(9, 2**16) >> bit) & 1 for bit in range(64)]).double()
    correlation = torch.corrcoef(bits)
    assert (correlation - torch.eye(64)).abs().max() < 5 / 2**8
    assert (bits.mean(1) - 0.5).abs().max() < 4.5 / 2**9


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bits_are_the_same_on_a_gpu():
    on_gpu = truncated_normal(words(3, 2**22, "cuda")[None], 0.02).cpu()
    assert torch.equal(on_gpu.view(torch.int32), truncated_normal(words(3, 2**22)[None], 0.02).view(torch.int32))
