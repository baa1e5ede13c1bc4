"""Unrolled optimizer steps equal traced ones, event for event."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.layouts import experiment_of
from tests.plan.test_extrapolate import ACCUMULATED, BF16, CUDA, EXPERTS
from tests.ranks import run_ranks
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.plan.extrapolate.optimizer_step import Token, unroll
from titan_exp.plan.extrapolate.schedule import ExtrapolationError

DEEP = "model.layers=26 "
STEPS = {
    "AdamW, fsdp on CUDA": CUDA + DEEP + "parallelism.dp_shard=2",
    "AdamW, groups with frozen layers, accumulated": ACCUMULATED + BF16 + "model.layers=32 parallelism.dp_shard=2 "
    "+optimizer.groups.first.match=[embedding,blocks.0.*] +optimizer.groups.first.frozen=true "
    "+optimizer.groups.head.match=[head] +optimizer.groups.head.max_grad_norm=0.5",
    "AdamW, hsdp x tp": BF16 + DEEP + "parallelism=hsdp parallelism.tp=2",
    "moments in bf16, AdaGC on CUDA": CUDA + DEEP + "parallelism.dp_shard=2 optimizer.state_precision=bf16 "
    "grad_clip=adagc",
    "experts x ep, average of weights on CUDA": CUDA + EXPERTS + DEEP + "parallelism.dp_shard=4 parallelism.ep=2 "
    "weight_average=ema training.micro_batch_size=1",
    "one data rank, SGD": BF16 + DEEP + "parallelism.dp_shard=1 optimizer=sgd",
    "offloaded on CUDA": CUDA + DEEP + "parallelism.dp_shard=2 parallelism.cpu_offload=true",
    "windows in every second layer": BF16 + "model=gpt_oss_debug model.layers=50 parallelism.dp_shard=2",
    "a dense layer first, modules behind the last on CUDA": CUDA + "model=deepseek_debug model.layers=33 "
    "model.mtp.depth=1 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1",
    "Adafactor": BF16 + DEEP + "parallelism.dp_shard=2 optimizer=adafactor",
    "Dion": BF16 + DEEP + "parallelism.dp_shard=2 optimizer=dion",
    "tied, no clipping": BF16 + DEEP + "model.tied_embeddings=true training.max_grad_norm=null parallelism.dp_shard=2",
}
BY_DAY = ("AdamW, fsdp on CUDA",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.night]) for name in STEPS]
)
def test_an_unrolled_optimizer_step_equals_the_traced_one(name: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(experiment_of(STEPS[name])))
    ((traced, unrolled),) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"))
    assert traced == unrolled


def both_ways(path: str) -> list[dict[str, Any]]:
    from titan_exp.config.devices import device_type
    from titan_exp.plan.extrapolate import optimizer_step

    experiment = load_experiment(path, trust=True)
    cuda, depths = device_type(experiment.cluster) == "cuda", optimizer_step._depths(experiment)
    assert depths is not None
    unrolled = optimizer_step._unrolled(experiment, depths, cuda=cuda)
    return [quantities(each) for each in (optimizer_step._trace(experiment, 0, cuda=cuda), unrolled)]


def quantities(trace: Any) -> dict[str, Any]:
    return {
        "events": [
            [(each.position, each.begins_phase, each.category, each.where, list(each.events)) for each in segments]
            for segments in (trace.setup, *trace.ends)
        ],
        "gradients": list(trace.gradients),
        "others": list(trace.others),
        "costs": trace.costs,
        "model": (trace.parameters, trace.flops_per_token),
        "host": trace.on_host,
    }


class Quadratic(torch.optim.SGD):
    """Compares every pair of parameters."""

    def step(self, closure: Any = None) -> Any:
        count = sum(len(group["params"]) for group in self.param_groups)
        torch.zeros(count, count)
        return super().step(closure)


@pytest.mark.night
def test_an_optimizer_that_is_not_linear_in_layers_is_traced(tmp_path: Path):
    words = "optimizer.name=tests.plan.test_unroll.Quadratic optimizer.implementation=for_loop model.layers=26"
    (tmp_path / "config.yaml").write_text(to_yaml(experiment_of(words)))
    (sizes,) = run_ranks(1, sizes_of_temporaries, str(tmp_path / "config.yaml"))
    assert (26 * 6 + 3) ** 2 * 4 in sizes


def sizes_of_temporaries(path: str) -> list[int]:
    from titan_exp.plan.extrapolate.optimizer_step import trace_optimizer_step

    trace = trace_optimizer_step(load_experiment(path, trust=True), 0, cuda=False)
    return [event.size for segment in trace.ends[1] for event in segment.events]


def step(layers: int) -> list[Token]:
    """Weights of every layer, a sum of their norms, and their release: those of matrices, then those of vectors."""
    made = [Token(("made", layer % 2), (layer, 512)) for layer in range(2 * layers)]
    freed = [Token(("freed",), (2 * layer,)) for layer in range(layers)]
    freed += [Token(("freed",), (2 * layer + 1,)) for layer in reversed(range(layers))]
    return [*made, Token(("made", 0), (2 * layers, 8 * layers)), *freed, Token(("freed",), (2 * layers,))]


@pytest.mark.parametrize("periods", [0, 1, 2, 50])
def test_a_deep_sequence_follows_from_three_shallow_ones(periods: int):
    assert unroll([step(layers) for layers in (2, 3, 4)], periods) == step(2 + periods)


def test_sequences_that_are_not_linear_are_refused():
    def squared(layers: int) -> list[Token]:
        return [*step(layers), Token(("made", 1), (2 * layers + 1, layers**2))]

    def grown(layers: int) -> list[Token]:
        return [token for layer in range(layers) for token in step(layer)]

    def named(layers: int) -> list[Token]:
        return [Token((f"layer {layer}",), (layer,)) for layer in range(layers)]

    for sequence in (squared, grown, named):
        refused: Sequence[Sequence[Token]] = [sequence(layers) for layers in (2, 3, 4)]
        with pytest.raises(ExtrapolationError):
            unroll(refused, 7)
