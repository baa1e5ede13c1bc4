"""The example package of the guide on one's own code: checked by day, and by night every command as it is typed."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.journeys.command import REPOSITORY, titan_exp
from tests.journeys.test_docs import commands
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.build import build_model
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.check_user_code import check_user_code
from titan_exp.rules import check

PACKAGE = REPOSITORY / "docs" / "examples" / "my_package"
COMMANDS = [line for line in commands(REPOSITORY / "docs/guides/extending.md") if "additions" in line]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's folder, on the search path for imports."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    return PACKAGE


def example(*overrides: str) -> Experiment:
    words = [f"hydra.searchpath=[file://{PACKAGE / 'my_package/conf'}]", "+experiment=additions", *overrides]
    return resolve_layout(to_experiment(compose([*words, "cluster.device=cpu"])), 1)


@pytest.mark.parametrize("model", ["parallel_llama_debug", "conv_lm"])
def test_the_package_passes_the_check_before_a_launch(package: Path, model: str):
    experiment = check(example(f"model={model}"))
    check_user_code(experiment)
    assert experiment.optimizer.name == "my_package.optim.Signum"


def test_branches_of_the_example_are_parallel(package: Path):
    import torch

    experiment = example()
    model = build_model(experiment.model, seq_len=64, attention_backend="math")
    assert "blocks.0.feed_forward_norm.weight" not in dict(model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        model.reset_buffers()  # type: ignore[operator]  # the decoder's own
        assert model(torch.zeros(1, 64, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(("word", "norms"), [("+model.qk_norm=true", 8), ("+model.window=16", 0)])
def test_a_variant_of_llama_changes_one_thing(package: Path, word: str, norms: int):
    words = ["model=llama_debug", "model.architecture=my_package.llama_variant", "cluster.device=cpu"]
    plain, varied = (check(resolve_layout(to_experiment(compose(list(found))), 1)) for found in (words, [*words, word]))
    before, after = (build_model(one.model, seq_len=64, attention_backend="math") for one in (plain, varied))
    added = dict(after.named_parameters()).keys() - dict(before.named_parameters()).keys()
    assert len(added) == norms
    spec = model_spec(varied.model)
    assert spec is not None
    windows = {layer.attention.window for layer in spec.layers if layer.attention is not None}
    assert windows == {16 if norms == 0 else None}


def test_the_guide_shows_the_variant():
    text = (PACKAGE / "my_package" / "llama_variant.py").read_text()
    assert text.partition("@dataclass")[2] in (REPOSITORY / "docs/guides/own-model.md").read_text()


def test_the_guide_holds_its_commands():
    assert {shlex.split(line)[1] for line in COMMANDS} == {"train", "generate", "evaluate", "convert", "plan"}


@pytest.mark.night
def test_every_command_of_the_example_works_as_typed(tmp_path: Path):
    folder = tmp_path / "my_package"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("runs", "weights"))
    for command in COMMANDS:
        done = titan_exp(*shlex.split(command)[1:], folder=folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
