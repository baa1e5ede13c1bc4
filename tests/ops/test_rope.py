import math
from dataclasses import replace

import pytest
import torch

from titan_exp.models.spec.rope import ScaledRope
from titan_exp.ops.attention.rope import Frequencies, RotaryEmbedding, rotate, rotate_tail


def table(length: int = 32, **scaling) -> RotaryEmbedding:
    made = RotaryEmbedding(8, length, Frequencies(100.0, **scaling))
    made.reset()
    return made


def test_rotation_is_multiplication_by_a_unit_complex_number():
    x = torch.randn(1, 32, 3, 8)
    turned = rotate(x, *table()(32, None))
    angles = torch.outer(torch.arange(32.0), 100.0 ** (-torch.arange(0, 8, 2) / 8))
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))


def test_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rope = table(64)

    def score(at_q: int, at_k: int) -> float:
        left = rotate(q, *rope(1, torch.tensor([[at_q]])))
        return float((left * rotate(k, *rope(1, torch.tensor([[at_k]])))).sum())

    assert score(5, 2) == pytest.approx(score(55, 52), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_given_positions_pick_rows_of_the_table():
    rope = table()
    plain, given = rope(4, None), rope(4, torch.arange(4)[None])
    torch.testing.assert_close(plain, given)
    torch.testing.assert_close(rope(2, torch.tensor([[7, 7]]))[0][0, 0], rope(8, None)[0][0, 7])


def test_llama3_scaling_as_published():
    """The piecewise rule, written out branch by branch as in the model's reference description."""
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
    found = Frequencies(500000.0, scaling="llama3", **rule).inverse(128)
    for index, value in enumerate(found.tolist()):
        plain = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert value == pytest.approx(expected, rel=1e-12)


def test_half_precision_is_rotated_in_fp32():
    x = torch.randn(1, 32, 1, 8, dtype=torch.bfloat16)
    cos, sin = table()(32, None)
    torch.testing.assert_close(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16(), atol=0, rtol=0)


DEEPSEEK = ScaledRope(10000.0, "yarn", 40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
GPT_OSS = ScaledRope(150000.0, "yarn", 32.0, original_context=4096, truncate=False)


@pytest.mark.parametrize(("rope", "first", "last"), [(DEEPSEEK, 10, 23), (GPT_OSS, 8.0928, 17.3980)])
def test_yarn_scaling_as_published(rope: ScaledRope, first: float, last: float):
    """Pairs before `first` are left, pairs after `last` slowed down, those between blended linearly."""
    for pair, value in enumerate(Frequencies(**rope.frequencies).inverse(64).tolist()):
        plain, slow = rope.theta ** (-2 * pair / 64), min(max((pair - first) / (last - first), 0), 1)
        assert value == pytest.approx(slow * plain / rope.factor + (1 - slow) * plain, rel=1e-4)


def test_yarn_magnitudes_as_published():
    assert (DEEPSEEK.frequencies["magnitude"], DEEPSEEK.score_factor) == (1.0, pytest.approx(1.5896, abs=1e-4))
    v3 = replace(DEEPSEEK, mscale=1.0, mscale_all_dim=1.0)
    assert (v3.frequencies["magnitude"], v3.score_factor) == (1.0, pytest.approx(1.8739, abs=1e-4))
    assert (GPT_OSS.frequencies["magnitude"], GPT_OSS.score_factor) == (pytest.approx(1.34657, abs=1e-5), 1.0)
    cos, sin = table(magnitude=1.5)(32, None)
    torch.testing.assert_close(cos**2 + sin[..., 1, :] ** 2, torch.full_like(cos, 2.25))
    assert torch.equal(sin[..., 0, :], -sin[..., 1, :])


def test_a_tail_is_rotated_alone():
    x, angles = torch.randn(1, 32, 3, 12), table()(32, None)
    turned = rotate_tail(x, *angles)
    assert torch.equal(turned[..., :4], x[..., :4])
    torch.testing.assert_close(turned[..., 4:], rotate(x[..., 4:], *angles))
