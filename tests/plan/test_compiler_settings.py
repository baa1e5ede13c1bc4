"""Settings of the compiler are the process's: a planned run leaves none to the next."""

from collections.abc import Callable
from typing import Any

from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks


def test_a_planned_run_leaves_no_settings_of_the_compiler():
    ((before, within, after),) = run_ranks(1, settings_around_a_plan)
    assert within["activation_memory_budget"] == 0.3 != before["activation_memory_budget"]
    assert not within["ban_recompute_materialized_backward"]
    assert within["emulate_precision_casts"]
    assert after == before


def settings_around_a_plan() -> list[dict[str, Any]]:
    from titan_exp.plan.trace.trace_step import fake_rank

    experiment = experiment_of(
        "model.layers=2 compile=blocks quantization=float8_tensorwise activation_checkpoint=budget "
        "activation_checkpoint.budget=0.3"
    )
    before = settings()
    with fake_rank(experiment, 0):
        within = settings()
    return [before, within, settings()]


def settings() -> dict[str, Any]:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    names = {
        dynamo: ("capture_dynamic_output_shape_ops",),
        functorch: ("activation_memory_budget", "ban_recompute_materialized_backward"),
        inductor: ("emulate_precision_casts", "_micro_pipeline_tp"),
    }
    return {name: getattr(config, name) for config, these in names.items() for name in these}


def test_parts_are_compiled_as_for_a_gpu():
    [((cpu, gpu), shared)] = run_ranks(1, compiled_operators)
    # A budget's partitioner takes an attention whose FLOPs it cannot count for free, and computes it again.
    assert (cpu.count(ATTENTION), gpu.count(ATTENTION)) == (2, 1)
    # The compiler knows torch's grouped matmul, not the loop over experts.
    assert "titan_exp.grouped_rows" in cpu
    assert not any(name.startswith("titan_exp.grouped") for name in gpu)
    assert gpu.count("aten._grouped_mm") >= 3
    # A sigmoid has no buffer where it is read for its maximum, and again to be divided by it, as float8 does.
    assert [names.count("aten.empty_strided") for names in shared] == [3, 2]


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def compiled_operators() -> list[list[list[str]]]:
    """Operators of a compiled attention with experts within a budget, and of a sigmoid, on a CPU and as for a
    GPU."""
    from contextlib import nullcontext

    import torch
    import torch._functorch.config as functorch
    import torch.nn.functional as F
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_exp.ops.moe.grouped_mm import grouped_linear
    from titan_exp.plan.trace.torch_patches import compile_as_for_cuda, skip_inductor_kernels

    class Names(TorchDispatchMode):
        found: list[str]

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found.append(str(func._overloadpacket))
            return func(*args, **(kwargs or {}))

    def block(heads: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        x = heads.exp()
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2).flatten(0, 1)
        return grouped_linear(out.sin(), weight, ends).cos()

    def experts() -> None:
        heads = torch.empty(1, 2, 128, 32, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(block)(heads, weight, torch.empty(4, dtype=torch.int32)).sum().backward()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x / x.amax()).half()

    def shared() -> None:
        torch.compile(lambda x: scaled(x.sigmoid()))(torch.empty(64, 64))

    def operators(step: Callable[[], None], *, cuda: bool) -> list[str]:
        names, device = Names(), torch.device("cpu")
        names.found = []
        with (
            torch._subclasses.FakeTensorMode(),
            skip_inductor_kernels(lambda _: None, device),
            compile_as_for_cuda(beside=False) if cuda else nullcontext(),
            functorch.patch(activation_memory_budget=0.5),
            names,
        ):
            step()
        return names.found

    return [[operators(step, cuda=cuda) for cuda in (False, True)] for step in (experts, shared)]
