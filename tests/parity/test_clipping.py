"""Clipping by value, by group and by AdaGC: one device's in every layout, and in a run that continues."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.parity.runs import LINES, Curve, assert_same_curve, train
from tests.parity.test_continued import assert_continues, continued
from tests.patching import patch
from titan_exp.optim import grad_clip
from titan_exp.optim.grad_clip import GradientClipper

CLIPS = {
    "value": "grad_clip=value grad_clip.max_value=2e-3 training.max_grad_norm=0.2",
    "groups": "+optimizer.groups.ends={match:[embedding,head],max_grad_norm:0.1} "
    "+optimizer.groups.norms={match:[vector],max_grad_norm:0.005} training.max_grad_norm=0.2",
    "adagc": "grad_clip=adagc grad_clip.warmup_steps=2 grad_clip.relative=0.9 grad_clip.decay=0.8 "
    "training.max_grad_norm=0.3",
}
EXPERTS = "model=qwen3_moe_debug"
LAYOUTS = [
    ("", "parallelism.tp=2 parallelism.dp_shard=2"),
    ("", "parallelism=hsdp training.micro_batch_size=1"),
    ("model.tied_embeddings=true", "parallelism.pp=2 parallelism.dp_shard=2"),
    ("", "parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B parallelism.tp=2"),
    (EXPERTS, "parallelism.dp_shard=4 parallelism.ep=2"),
    (EXPERTS, "parallelism.dp_shard=2 parallelism.tp=2 parallelism.etp=2"),
    (EXPERTS, "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2"),
]


def assert_same(found: Curve, expected: Curve) -> None:
    assert_same_curve(found, expected)
    for row, other in zip(found.rows, expected.rows, strict=True):
        metrics = {name: value for name, value in other.items() if name.startswith("clip/")}
        assert {name: row[name] for name in metrics} == pytest.approx(metrics, rel=1e-3)
        assert metrics
    assert min(row["clip/factor"] for row in expected.rows) < 0.99


def words(name: str, model: str) -> list[str]:
    clip = CLIPS[name].replace("embedding,head", "embedding") if "tied" in model else CLIPS[name]
    return [*clip.split(), *model.split(), *LINES]


@pytest.mark.parametrize(
    ("name", "model", "layout"),
    [
        pytest.param("adagc", "training.steps=4", "parallelism.tp=2 parallelism.dp_shard=2", marks=pytest.mark.day),
        *(pytest.param(name, *layout, marks=pytest.mark.night) for layout in LAYOUTS for name in CLIPS),
    ],
)
def test_layouts(tmp_path: Path, name: str, model: str, layout: str):
    own = words(name, model)
    assert_same(train(tmp_path / "many", *own, *layout.split()), train(tmp_path / "one", *own))


@pytest.mark.night
@pytest.mark.parametrize(
    ("before", "after"), [("parallelism.dp_shard=2", "parallelism.tp=2"), ("", "parallelism.pp=2")]
)
def test_adagc_continues_in_another_layout(tmp_path: Path, before: str, after: str):
    own = [*CLIPS["adagc"].split(), "training.seq_len=32"]
    whole, changed = continued(tmp_path, [*own, *before.split()], [*own, *after.split()])
    assert_continues(whole, changed)
    for found, row in zip(changed.rows, whole.rows[5:], strict=True):
        assert found["clip/factor"] == pytest.approx(row["clip/factor"], rel=1e-3)


@pytest.mark.night
def test_adagc_resumes_bitwise(tmp_path: Path):
    own = [*CLIPS["adagc"].split(), "parallelism.dp_shard=2", "training.seq_len=32"]
    whole, changed = continued(tmp_path, own, own)
    assert changed.loss == whole.loss[5:]
    assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())


def norms_are_of_local_shards() -> None:
    patch("titan_exp.optim.grad_clip.sum_over_shards", lambda _: lambda numbers, parameters: torch.stack(list(numbers)))


def shards_of_a_dim_that_two_axes_divide_are_not_summed() -> None:
    """Their placement is no `Shard` of torch, but another class."""

    def summed(numbers: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        found = [number.clone() for number in numbers]
        for total, parameter in zip(found, parameters, strict=True):
            for axis, placement in enumerate(getattr(parameter, "placements", ())):
                if type(placement) is Shard:
                    torch.distributed.all_reduce(total, group=parameter.device_mesh.get_group(axis))  # type: ignore[attr-defined]
        return torch.stack(found)

    patch("titan_exp.optim.grad_clip.sum_over_shards", lambda _: summed)


def beyond_is_counted_on_one_shard() -> None:
    def make(original: Callable[[GradientClipper], torch.Tensor]) -> Callable[[GradientClipper], torch.Tensor]:
        def clamp(self: GradientClipper) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as during:
                during.setattr(grad_clip, "sum_over_shards", lambda numbers, _: torch.stack(list(numbers)))
                return original(self)

        return clamp

    patch("titan_exp.optim.grad_clip.GradientClipper._clamp", make)


def stages_limit_groups_alone() -> None:
    patch(
        "titan_exp.trainer.train_state.GradientClipper",
        lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, "pp_group": None}),
    )


def average_norms_are_forgotten() -> None:
    patch("titan_exp.checkpoint.optimizer_state.is_optional", lambda _: lambda key: True)
    patch(
        "titan_exp.checkpoint.storage_reader.tensor_shapes",
        lambda original: (
            lambda path: {key: shape for key, shape in original(path).items() if not key.endswith("average_grad_norm")}
        ),
    )


@pytest.mark.night
@pytest.mark.parametrize(
    ("name", "layout", "mutate"),
    [
        ("adagc", "parallelism.dp_shard=2", norms_are_of_local_shards),
        ("groups", "parallelism.dp_shard=2", norms_are_of_local_shards),
        ("adagc", "parallelism.tp=2 parallelism.dp_shard=2", shards_of_a_dim_that_two_axes_divide_are_not_summed),
        ("value", "parallelism.tp=2", beyond_is_counted_on_one_shard),
        ("groups", "parallelism.pp=2", stages_limit_groups_alone),
    ],
)
def test_mutations_are_noticed(tmp_path: Path, name: str, layout: str, mutate):
    own = words(name, "")
    found = train(tmp_path / "many", *own, *layout.split(), mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same(found, train(tmp_path / "one", *own))


@pytest.mark.night
def test_forgotten_average_norms_are_noticed(tmp_path: Path):
    own = [*CLIPS["adagc"].split(), "training.seq_len=32"]
    with pytest.raises(AssertionError):
        assert_continues(*continued(tmp_path, own, own, mutate=average_norms_are_forgotten))
