"""Mutations of RoPE's scalings, each of which the comparison with the frequencies of `transformers` must notice.

python -m pytest tests/parity/rope_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.test_against_transformers import LINEAR, YARN, test_scaled_frequencies_equal_and_come_back
from titan_exp.models.spec import rope
from titan_exp.ops.attention.rope import Frequencies


def the_fast_pairs_are_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Frequencies._yarn
    monkeypatch.setattr(Frequencies, "_yarn", lambda self, given: given + given / self.factor - plain(self, given))


def the_ramp_counts_turns_in_the_stretched_context(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Frequencies.inverse

    def inverse(self: Any, head_dim: int) -> torch.Tensor:
        self.original_context = int(self.original_context * self.factor)
        return plain(self, head_dim)

    monkeypatch.setattr(Frequencies, "inverse", inverse)


def scores_get_the_factor_of_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rope.magnitude
    monkeypatch.setattr(rope, "magnitude", lambda factor, mscale: plain(factor, mscale) ** 0.5)


def linear_keeps_the_fastest_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Frequencies.inverse

    def inverse(self: Any, head_dim: int) -> torch.Tensor:
        found = plain(self, head_dim)
        if self.scaling == "linear":
            found[0] *= self.factor
        return found

    monkeypatch.setattr(Frequencies, "inverse", inverse)


NOTICED: list[tuple[rope.RopeConfig, Callable[[pytest.MonkeyPatch], None]]] = [
    (YARN, the_fast_pairs_are_slowed_down),
    (YARN, the_ramp_counts_turns_in_the_stretched_context),
    (replace(YARN, mscale=0.707, mscale_all_dim=1.0), scores_get_the_factor_of_cosines),
    (LINEAR, linear_keeps_the_fastest_pair),
]


@pytest.mark.parametrize(("scaled", "mutate"), NOTICED, ids=lambda case: getattr(case, "__name__", "rope"))
def test_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, scaled: rope.RopeConfig, mutate: Any):
    test_scaled_frequencies_equal_and_come_back(scaled)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_scaled_frequencies_equal_and_come_back(scaled)
