"""Metrics of modules by `tracking.metrics`: the same in every layout, and no bit of the curve depends on them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.journeys.command import REPOSITORY
from tests.parity.runs import Curve, train
from tests.trainer.test_trainer import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.launch.run_plan import run_id
from titan_exp.plan.check_user_code import check_user_code
from titan_exp.rules import check
from titan_exp.trainer.module_metrics.metric import ModuleMetric
from titan_exp.trainer.parts import all_parts

SQUARES = "my_package.metrics.BlockSquares"
SHORT = ["training.steps=3", "training.global_batch_size=4", "training.seq_len=32"]
BOTH = f"tracking.metrics=[max_logit,{SQUARES}]"
HERE = "tests.trainer.test_module_metrics"
NAMES = ("model/max_logit", "model/block_mean_square")
LAYOUTS = [
    ("llama_debug", "parallelism.tp=2 parallelism.dp_shard=2 training.micro_batch_size=1"),
    ("llama_debug", "parallelism.dp_shard=2 training.micro_batch_size=1 activation_checkpoint=full"),
    ("llama_debug", "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble"),
    ("llama_debug", "parallelism.cp=2 activation_checkpoint=selective"),
    ("llama_debug model.kv_heads=4", "parallelism.cp=2 parallelism.cp_method=ulysses parallelism.tp=2"),
    ("deepseek_debug", "parallelism.dp_shard=2 parallelism.ep=2"),
    ("qwen3_debug", "parallelism.tp=2 parallelism.pp=2"),
]
DAILY = (LAYOUTS[0],)


@pytest.fixture(autouse=True)
def example_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the guide can be imported."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs/examples/my_package"))


def use_examples() -> None:
    """On each rank of a layout."""
    import sys

    sys.path.insert(0, str(REPOSITORY / "docs/examples/my_package"))


def assert_same_bits(found: Curve, expected: Curve) -> None:
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, marks=pytest.mark.day if case in DAILY else pytest.mark.night) for case in LAYOUTS],
)
def test_layouts(tmp_path: Path, model: str, layout: str):
    own, many = [*SHORT, *f"model={model}".split()], layout.split()
    one = train(tmp_path / "one", *own, BOTH, mutate=use_examples)
    found = train(tmp_path / "many", *own, *many, BOTH, mutate=use_examples)
    assert_same_bits(found, train(tmp_path / "without", *own, *many))
    names = [name for name in one.rows[0] if name.startswith(NAMES)]
    assert len(names) > 4
    assert [name for name in found.rows[0] if name.startswith(NAMES)] == names
    for row, other in zip(found.rows, one.rows, strict=True):
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4)
        for name in NAMES:  # that of all layers, beside each
            combine = max if name == "model/max_logit" else lambda values: sum(values) / len(values)
            layers = [row[layer] for layer in names if layer.startswith(f"{name}/")]
            assert row[name] == pytest.approx(combine(layers), rel=1e-6)


@pytest.mark.night
def test_compiled_code_keeps_its_bits(tmp_path: Path):
    words = [*SHORT, "compile=blocks"]
    found = train(tmp_path / "with", *words, "tracking.metrics=[max_logit]")
    assert_same_bits(found, train(tmp_path / "without", *words))
    plain = train(tmp_path / "plain", *SHORT, "tracking.metrics=[max_logit]")
    assert found.rows[0]["model/max_logit"] == pytest.approx(plain.rows[0]["model/max_logit"], rel=1e-4)


class Tokens(ModuleMetric):
    """Tokens that the first block has seen."""

    name, reduction = "tokens_seen", "sum"

    @classmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        return path == "blocks.0"

    def value(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return torch.tensor(output.shape[0] * output.shape[1])


class Nowhere(Tokens):
    """Observes nothing."""

    name = "nowhere"

    @classmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        return False


def test_recomputation_and_evaluation_do_not_count(tmp_path: Path):
    words = ["activation_checkpoint=full", "training.micro_batch_size=1", "evaluation.every=1"]
    words += ["data.validation_fraction=0.1", "data.validation_documents=40", "data=text"]
    words += [f"data.paths=[{os.path.dirname(os.__file__)}/json]", "data.document=line"]
    found = train(tmp_path, *SHORT, *words, f"tracking.metrics=[{HERE}.Tokens]")
    assert [row["model/tokens_seen"] for row in found.rows] == [4 * 32] * 3


def test_beside_qk_clip_logits_are_counted_once(tmp_path: Path):
    words = [*SHORT, "model.kv_heads=4", "optimizer=muon", "optimizer.lr=2e-3", "optimizer.qk_clip=100"]
    found = train(tmp_path / "both", *words, "tracking.metrics=[max_logit]")
    assert found.rows == [row | {} for row in found.rows]
    alone = train(tmp_path / "clip", *words)
    assert [row["model/max_logit"] for row in found.rows] == [row["model/max_logit"] for row in alone.rows]


def test_metrics_are_code_and_not_part_of_the_run_id():
    with_metrics = experiment(*SHORT, BOTH)
    assert run_id(with_metrics) == run_id(experiment(*SHORT))
    assert import_paths(with_metrics) == {"tracking.metrics[1]": SQUARES}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tracking.metrics=[max_logits]"], "did you mean max_logit?"),
        (["tracking.metrics=[my_package.metrics.Block]"], "my_package.metrics has no Block"),
        ([f"tracking.metrics=[{HERE}.HERE]"], "does not extend ModuleMetric"),
        ([f"tracking.metrics=[{HERE}.Unfinished]"], "the class defines no name, observes and no value"),
        ([f"tracking.metrics=[max_logit,{HERE}.Nowhere]"], r"observes no module of .*\n    tracking.metrics=\[max"),
        ([BOTH, "compile=blocks"], "compile=none"),
        ([f"tracking.metrics=[{HERE}.Tokens,{HERE}.Twin]"], "two metrics have one name"),
    ],
)
def test_wrong_metrics_are_refused_before_the_launch(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        check_user_code(check(experiment(*SHORT, *words)))


class Unfinished(ModuleMetric):
    """Says nothing of itself."""


class Twin(Tokens):
    """Another metric of the same name."""


def test_the_example_is_short():
    text = (REPOSITORY / "docs/examples/my_package/my_package/metrics.py").read_text()
    assert text.partition("class ")[2].count("\n") < 20
    assert all_parts  # the metrics need no part
