import torch
import torch.distributed as dist
from torch import nn

from tests.models.shapes import TINY
from tests.parallel.test_meta_init import CPU, layout
from tests.ranks import run_ranks
from titan_exp.models.build import build_model, init_specs
from titan_exp.parallel.fsdp import FSDPOptions, apply_fsdp, set_gradient_sync
from titan_exp.parallel.mesh import build_mesh
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.trainer.distributed import joined_process_group

NAMES = ("embedding", "blocks.0.attention.qkv", "blocks.1.attention_norm", "blocks.1.attention.qkv", "head")


def types_in_forward(fp32_modules: tuple[str, ...]) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Types of weight and output of some modules while the model computes."""
    found = {}

    def record(name: str):
        def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            found[name] = (module.get_parameter("weight").dtype, output.dtype)

        return hook

    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(TINY, seq_len=16, attention_backend="math")
        table = init_specs(model)
        assert table is not None
        # Before sharding's own hooks, which turn outputs of fp32 modules into bf16, and free weights.
        for name in NAMES:
            model.get_submodule(name).register_forward_hook(record(name))
        sharding = FSDPOptions(bf16=True, fp32_modules=fp32_modules)
        apply_fsdp(model, build_mesh(layout(1, 2), CPU), sharding)
        materialize_parameters(model, CPU)
        init_weights(model, table, seed=0)
        logits = model(torch.arange(32).view(2, 16))
        found["logits"] = (logits.dtype, logits.dtype)
        logits.float().square().sum().backward()
        gradients = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
        assert gradients == {torch.float32}
    return found


def test_everything_computes_in_bf16():
    for found in run_ranks(2, types_in_forward, ()):
        assert set(found.values()) == {(torch.bfloat16, torch.bfloat16)}


def test_but_for_the_modules_that_are_named():
    named = ("embedding", "blocks.0", "blocks.*.attention_norm")
    for found in run_ranks(2, types_in_forward, named):
        full = {name for name, (weight, _) in found.items() if weight == torch.float32}
        assert full == {"embedding", "blocks.0.attention.qkv", "blocks.1.attention_norm"}
        assert found["logits"][0] == torch.bfloat16


def gradients_that_are_bf16() -> float:
    """Fraction of the gradients of different tokens on every rank that bf16 holds exactly."""
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(TINY, seq_len=16, attention_backend="math")
        table = init_specs(model)
        assert table is not None
        apply_fsdp(model, build_mesh(layout(1, 2), CPU), FSDPOptions(bf16=True))
        materialize_parameters(model, CPU)
        init_weights(model, table, seed=0)
        model(torch.arange(32).view(2, 16) + 5 * dist.get_rank()).float().square().sum().backward()
        shards = [parameter.grad.to_local().flatten() for parameter in model.parameters()]  # type: ignore[union-attr]
        values = torch.cat(shards)
        values = values[values != 0]
        return float((values == values.bfloat16()).double().mean())


def test_bf16_gradients_are_added_in_fp32():
    """Sums of two numbers of eight bits have more; summed in bf16, all would have eight."""
    for fraction in run_ranks(2, gradients_that_are_bf16):
        assert 0.01 < fraction < 0.8


def summed_in_bf16(bf16_sums: bool) -> float:
    """Fraction that bf16 holds exactly of the sum over three micro-batches of rank 0, to which rank 1 adds nothing."""
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(TINY, seq_len=16, attention_backend="math")
        table = init_specs(model)
        assert table is not None
        apply_fsdp(model, build_mesh(layout(1, 2), CPU), FSDPOptions(bf16=True, bf16_sums=bf16_sums))
        materialize_parameters(model, CPU)
        init_weights(model, table, seed=0)
        for index in range(3):
            set_gradient_sync(model, last=index == 2)
            logits = model(torch.arange(32).view(2, 16) + 5 * index)
            (logits.float().square().sum() * (dist.get_rank() == 0)).backward()
        values = torch.cat([parameter.grad.to_local().flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
        values = values[values != 0]
        assert values.dtype == torch.float32
        return float((values == values.bfloat16()).double().mean())


def test_micro_batches_are_summed_in_the_asked_precision():
    assert set(run_ranks(2, summed_in_bf16, True)) == {1.0}
    assert max(run_ranks(2, summed_in_bf16, False)) < 0.8


def gathered_ahead(ahead: int) -> list[list[int]]:
    """Which blocks each block gathers ahead of its turn in forward."""
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(TINY, seq_len=16, attention_backend="math")
        apply_fsdp(model, build_mesh(layout(1, 2), CPU), FSDPOptions(bf16=False, prefetch_blocks=ahead))
        blocks = list(model.get_submodule("blocks").children())
        states = [block._get_fsdp_state() for block in blocks]  # type: ignore[operator]  # FSDP's own
        return [[states.index(later) for later in state._states_to_forward_prefetch] for state in states]


def test_blocks_are_gathered_ahead_as_asked():
    assert run_ranks(2, gathered_ahead, 2)[0] == [[1], []]
    assert run_ranks(2, gathered_ahead, 1)[0] == [[], []], "one ahead is what FSDP2 does by itself"
