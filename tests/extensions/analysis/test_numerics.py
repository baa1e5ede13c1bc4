"""titan-exp doctor --numerics: arguments, and the layer with the worst error."""

import math

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.data.batch import Batch
from titan_exp.extensions.analysis import numerics as module
from titan_exp.extensions.analysis.numerics import decibels, numerics_command, report_numerics
from titan_exp.models.blocks.linear import Linear

SMALL = ["model=llama_debug", "training.seq_len=64", "cluster.device=cpu"]


@pytest.mark.parametrize("words", [[], ["--numbers"], ["--numerics", "a", "b"], ["--numerics", *SMALL]])
def test_invalid_arguments_are_refused(words: list[str]):
    with pytest.raises(UserError, match="doctor --numerics"):
        numerics_command(words)


def test_an_invalid_recipe_is_refused():
    with pytest.raises(UserError, match="multiples of 32"):
        numerics_command(["--numerics", *SMALL, "quantization=mxfp8", "model.head_dim=20"])


def test_the_table_lists_every_linear(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    words = ["quantization=float8_rowwise", "quantization.filter=[blocks.1.attention.out]", "model.layers=2"]
    assert numerics_command(["--numerics", *SMALL, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "blocks." in line]
    assert len(rows) == 8
    assert [row.split("│")[2].strip() for row in rows if "blocks.1.attention.out" in row] == ["high"]
    assert sum("exact" in row for row in rows) == 1
    assert lines[-1].startswith("loss 5.")


def test_the_layer_with_the_worst_error_comes_first():
    """One channel is huge, so that tensorwise scaling rounds the others to zero."""
    overrides = [*SMALL, "quantization=float8_tensorwise", "model.layers=3"]
    examined = resolve_layout(experiment(*overrides), 1)
    model = module.build_initial(examined.model, 64, examined.experiment.seed, torch.device("cpu"))
    with torch.no_grad():
        # Its first channel alone decides about the scale, and about nothing behind it.
        model.get_parameter("blocks.1.feed_forward_norm.weight")[0] = 1e6
        model.get_parameter("blocks.1.feed_forward.gate_up.weight")[:, 0] = 0
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    report = report_numerics(model, examined.quantization, 3, Batch(tokens, tokens.roll(-1, 1), None, None))
    worst = min(report.projections, key=lambda error: error.own)
    assert worst.name == "blocks.1.feed_forward.gate_up"
    assert worst.own < 10 < min(error.own for error in report.projections if error is not worst)
    assert [error.weight_gradient for error in report.projections] == sorted(
        error.weight_gradient for error in report.projections
    )
    assert sum(isinstance(layer, Linear) for layer in model.modules()) == len(report.projections) == 12


def test_decibels():
    ones = torch.ones(4)
    assert decibels(ones, ones) == math.inf
    assert decibels(ones, ones * 1.1) == pytest.approx(20)
    assert decibels(ones * 0, ones) == -math.inf


def test_linears_of_experts_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    words = ["model.architecture=tests.models.own_experts.Mixture", "model.layers=3", "quantization=nvfp4"]
    assert numerics_command(["--numerics", *SMALL, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:6]] for line in lines if "│ b" in line
    }
    assert len(rows) == 6
    assert {recipe for recipe, *_ in rows.values()} == {"yes"}
    assert all(5 < float(own) < 40 and 5 < float(gradient) < 40 for _, own, _, gradient in rows.values())
    # Of the first block the router sees what it sees without a recipe; of a later one hardly.
    assert float(rows["blocks.0.experts.gate_up"][2]) == float(rows["blocks.0.experts.gate_up"][1])
    assert rows["blocks.2.experts.down"][2] == "routed"
    assert "'routed': rounding before this layer made a router send tokens to other experts." in lines


@pytest.mark.parametrize(
    ("words", "high"),
    [
        (["model=qwen3_moe_debug", "model.layers=2"], set()),
        # Latent attention, a dense layer first, shared experts; of the experts one linear has no recipe.
        (["model=deepseek_debug", "model.layers=2", "quantization.filter=[*.experts.down]"], {"experts.down"}),
        # Biases of experts, and experts whose inputs are weighted.
        pytest.param(["model=gpt_oss_debug", "model.layers=2"], set(), marks=pytest.mark.night),
        pytest.param(["model=llama4_debug"], set(), marks=pytest.mark.night),
    ],
)
def test_experts_of_every_family_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], high: set[str]
):
    """Weights of experts' outputs, which without a recipe go into the down projection, are not part of its error."""
    monkeypatch.setenv("COLUMNS", "120")
    assert numerics_command(["--numerics", *SMALL[1:], "quantization=mxfp8", *words]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:6]] for line in capsys.readouterr().out.splitlines()]
    experts = [row for row in rows if row and ".feed_forward.experts." in row[0]]
    assert {row[0].partition("feed_forward.")[2] for row in experts} == {"experts.gate_up", "experts.down"}
    for name, recipe, own, *_ in experts:
        exact = name.partition("feed_forward.")[2] in high
        assert (recipe, own) == ("high", "exact") if exact else recipe == "yes" and 25 < float(own) < 32, name
