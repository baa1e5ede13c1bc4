"""A user's families get what built-in ones get: every layout, recipes, export, plan; and only the keys they have."""

from pathlib import Path

import pytest
import torch

from tests.parity.runs import Curve, assert_same_curve, remembered, train
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_huggingface
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.spec.lookup import model_spec

OWN = "model.architecture=tests.models.own_family +model.embedding_scale=2.0"
EXPERIMENTS = {
    "own": OWN,
    "normed": "model.architecture=tests.models.own_head_norm +model.gathers=whole",
    "float8": f"{OWN} quantization=float8_rowwise quantization.smallest_gemm=0",
}
MIXER = """
name: mixer
architecture: tests.models.own_mixer
layers: 2
dim: 64
vocab_size: 320
context: 512
decay: 0.9
"""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.fixture
def mixer(tmp_path: Path) -> list[str]:
    """Overrides that choose a model group of the user's own folder."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mixer.yaml").write_text(f"# @package model\n{MIXER}")
    return [f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "model=mixer"]


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.cp=2", "parallelism.pp=2"])
def test_a_subclass_of_the_decoder_trains_in_every_layout(tmp_path: Path, one_device, layout: str):
    assert_same_curve(train(tmp_path, *OWN.split(), layout), one_device("own"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.tp=2 parallelism.dp_shard=2", marks=pytest.mark.day),
        # More ranks than key and value heads, which replicate them.
        pytest.param("parallelism.tp=4 parallelism.sequence_parallel=false", marks=pytest.mark.night),
        pytest.param("parallelism.tp=2 compile=blocks compile.backend=aot_eager", marks=pytest.mark.night),
        pytest.param("parallelism.tp=2 activation_checkpoint=full parallelism.cp=2", marks=pytest.mark.night),
    ],
)
def test_a_norm_over_all_heads_sees_those_of_all_ranks(tmp_path: Path, one_device, layout: str):
    assert_same_curve(train(tmp_path, *EXPERIMENTS["normed"].split(), *layout.split()), one_device("normed"))


@pytest.mark.night
def test_it_is_quantized(tmp_path: Path, one_device):
    found: Curve = train(tmp_path, *EXPERIMENTS["float8"].split(), "parallelism.tp=2")
    assert found.loss == pytest.approx(one_device("float8").loss, rel=1e-3)
    assert one_device("float8").loss != one_device("own").loss


def test_it_is_exported_and_read_again(tmp_path: Path, one_device):
    model = to_experiment(compose(["model=llama_debug", *OWN.split()])).model
    weights = one_device("own").weights
    source = OpenCheckpoint(Path("memory"), "torch", model, TorchFileReader(weights))
    export_weights(source, tmp_path / "export", ExportOptions("huggingface"))
    again = open_huggingface(tmp_path / "export", model.architecture)
    assert vars(again.model)["embedding_scale"] == 2.0
    assert all(torch.equal(again.parameters.read(name), weight) for name, weight in weights.items())


def test_its_memory_is_planned(tmp_path: Path):
    from tests.plan.layouts import experiment_of as planned
    from tests.plan.layouts import measured, predicted

    experiment = planned(f"{OWN} parallelism.dp_shard=2")
    (guess,), (fact,) = predicted(experiment, tmp_path / "plan"), measured(experiment, tmp_path / "run")
    assert guess.passing <= fact.passing <= 1.02 * guess.passing


def test_its_shape_is_checked():
    with pytest.raises(UserError, match=r"nearest: model\.head_dim"):
        _checked(*OWN.split(), "model.head_dim=17")


def test_a_family_without_attention_has_only_its_own_keys(mixer: list[str]):
    experiment = to_experiment(compose(mixer))
    assert set(vars(experiment.model)) == {"name", "architecture", "layers", "dim", "vocab_size", "context", "decay"}
    spec = model_spec(experiment.model)
    assert spec is not None
    assert spec.parameters == 2 * (64 * 64 + 64) + 2 * 320 * 64 + 64
    with pytest.raises(UserError, match="heads"):
        to_experiment(compose([*mixer, "+model.heads=4"]))


@pytest.mark.parametrize("layout", ["parallelism.dp_shard=2", "parallelism.pp=2"])
def test_a_family_without_attention_trains(tmp_path: Path, mixer: list[str], layout: str):
    expected = train(tmp_path / "one", *mixer)
    assert_same_curve(train(tmp_path / "many", *mixer, layout), expected)


def test_context_parallelism_needs_attention(mixer: list[str]):
    with pytest.raises(UserError, match=r"parallelism\.cp"):
        _checked(*mixer, "parallelism.cp=2")


def _checked(*overrides: str) -> Experiment:
    from titan_exp.rules import check

    model = [] if any(word.startswith("model=") for word in overrides) else ["model=llama_debug"]
    return check(to_experiment(compose([*model, *overrides, "training.seq_len=64", "cluster.device=cpu"])))
