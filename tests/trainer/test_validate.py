"""The row of an evaluation: one source as it is, several by their tokens."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from titan_exp.trainer import updates as module
from titan_exp.trainer.updates import ValidationResult, evaluate_sources


def row(monkeypatch: pytest.MonkeyPatch, **sources: ValidationResult) -> dict[str, float | int]:
    monkeypatch.setattr(module, "evaluate", lambda model, batches, mesh, token_bytes: batches)
    model: Any = SimpleNamespace(objective=None)
    given: Any = sources
    mesh: Any = None
    return evaluate_sources(model, given, mesh)


def test_one_source_has_no_name(monkeypatch: pytest.MonkeyPatch):
    found = row(monkeypatch, **{"": ValidationResult(1.1, 3)})
    assert found == {"validation_loss": 1.1, "validation_perplexity": math.exp(1.1), "validation_tokens": 3}


def test_several_sources_count_by_their_tokens(monkeypatch: pytest.MonkeyPatch):
    found = row(monkeypatch, a=ValidationResult(1.0, 30), b=ValidationResult(2.0, 10), c=ValidationResult(math.nan, 0))
    assert found["validation_loss"] == pytest.approx(1.25)
    assert found["validation_perplexity"] == pytest.approx(math.exp(1.25))
    assert found["validation_tokens"] == 40
    assert (found["validation_loss/a"], found["validation_loss/b"]) == (1.0, 2.0)
    assert math.isnan(found["validation_loss/c"])


def test_bits_per_byte_are_a_ratio_of_sums(monkeypatch: pytest.MonkeyPatch):
    found = row(monkeypatch, a=ValidationResult(math.log(2), 30, 60), b=ValidationResult(2 * math.log(2), 10, 10))
    assert found["validation_bits_per_byte/a"] == pytest.approx(0.5)
    assert found["validation_bits_per_byte/b"] == pytest.approx(2.0)
    assert found["validation_bits_per_byte"] == pytest.approx(50 / 70)
