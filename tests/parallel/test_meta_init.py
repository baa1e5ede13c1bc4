import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.config.composing import experiment
from tests.models.shapes import TINY, own_class, real_model
from tests.ranks import run_ranks
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.models.build import build_model, init_specs
from titan_exp.parallel.fsdp import FSDPOptions, apply_fsdp
from titan_exp.parallel.mesh import build_mesh
from titan_exp.parallel.meta_init import (
    buffer_places,
    copy_initial_weights,
    init_buffers,
    init_weights,
    materialize_parameters,
)
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")


def layout(dp_replicate: int, dp_shard: int) -> ParallelismConfig:
    return experiment(f"parallelism.dp_replicate={dp_replicate}", f"parallelism.dp_shard={dp_shard}").parallelism


def sharded_weights(degrees: tuple[int, int]) -> tuple[dict[str, torch.Tensor], int]:
    """Initial weights as a sharded model holds them, put together again, and the elements this rank drew."""
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(TINY, seq_len=64, attention_backend="math")
        table = init_specs(model)
        assert table is not None
        apply_fsdp(model, build_mesh(layout(*degrees), CPU), FSDPOptions(bf16=False, reshard_after_forward="always"))
        materialize_parameters(model, CPU)
        init_weights(model, table, seed=3)
        parameters = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        own = sum(parameter.to_local().numel() for parameter in parameters.values())  # type: ignore[attr-defined]
        return {name: parameter.full_tensor().detach() for name, parameter in parameters.items()}, own  # type: ignore[attr-defined]


@pytest.mark.parametrize("degrees", [(1, 4), (2, 2), (1, 3)])
def test_initial_weights_are_bitwise_those_of_one_device(degrees):
    """97 rows of vocabulary divide into no number of ranks here, so shards are uneven."""
    expected = dict(real_model(seed=3).named_parameters())
    results = run_ranks(degrees[0] * degrees[1], sharded_weights, degrees)
    for weights, own in results:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert own < 0.6 * sum(value.numel() for value in expected.values())


def test_tied_weights_stay_tied():
    config = own_class("tests.models.own_faults.Faulty")
    with torch.device("meta"):
        model = build_model(config, seq_len=64, attention_backend="math")
    assert materialize_parameters(model, CPU) == [buffer_places(model)["scale"]], "no module computes it"
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert len(list(model.parameters())) == len({id(value) for value in model.parameters()}) == 5


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.empty((), device="meta"), persistent=False)


def test_buffers_that_no_module_computes_are_those_of_the_model_as_written():
    config = own_class("tests.models.own_faults.Faulty")
    build = functools.partial(build_model, config, seq_len=64, attention_backend="math")
    with torch.device("meta"):
        model = build()
    places = buffer_places(model)
    model.register_module("added", Scaled())  # as a recipe's are, after the model was built
    init_buffers(places, materialize_parameters(model, CPU), build, seed=0)
    assert model.get_buffer("scale") == 0.5


def undeclared_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model of the user's own: sharded weights put together, and those of the model built plainly."""
    config = own_class("tests.models.own_model.Bigram", scale=0.5)
    build = functools.partial(build_model, config, seq_len=64, attention_backend="math")
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build()
        places = buffer_places(model)
        apply_fsdp(model, build_mesh(layout(1, 2), CPU), FSDPOptions(bf16=False, reshard_after_forward="always"))
        init_buffers(places, materialize_parameters(model, CPU), build, seed=3)
        copy_initial_weights(model, build, seed=3)
        found = {name: value.full_tensor() for name, value in model.named_parameters()}  # type: ignore[attr-defined]
        found["scale"] = model.get_buffer("scale")
        torch.manual_seed(3)
        plain = build()
        return {name: value.detach() for name, value in found.items()}, dict(plain.state_dict())


def test_a_model_that_declares_nothing_starts_as_it_was_written():
    for found, expected in run_ranks(2, undeclared_weights):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
