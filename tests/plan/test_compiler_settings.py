"""Settings of the compiler are the process's: a planned run leaves none to the next."""

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
    from titan_exp.plan.trace.fake_world import fake_rank

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
