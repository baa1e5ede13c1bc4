"""Power of the layout check: planted faults of a user's kind are found, and honest models pass in every layout."""

from collections.abc import Iterator

import pytest

from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.layout.cases import Verdict
from titan_exp.doctor.layout.check import check_layouts
from titan_exp.plan.planner_processes import PlannerProcesses

FAMILY = "model.architecture=tests.models.own_planted +model.planted="
PLAIN = "model.architecture=tests.models.own_planted_block.PlantedClass +model.options.planted="
OBJECTIVE = "training.objective=tests.trainer.own_planted_objective."
TP, SP, CP = "parallelism.tp=2 parallelism.sequence_parallel=false", "parallelism.tp=2", "parallelism.cp=2"
DP, PP = "parallelism.dp_shard=2", "parallelism.pp=2"
MICRO, FULL = "training.micro_batch_size=1", "activation_checkpoint=full"

FAULTS = {
    # a partial gradient that nothing sums
    f"{FAMILY}gain {SP}": "gain.weight",
    f"{FAMILY}head_gain {TP}": "gain.weight",
    f"{FAMILY}wrong_style_head_gain {TP}": "gain.weight",
    f"{FAMILY}one_gain {TP}": "gain.weight",
    # something over all heads or channels, of which a rank has some
    "model.architecture=tests.models.own_head_norm +model.gathers='' " + TP: "attention",
    f"{FAMILY}head_softmax {TP}": "attention",
    f"{FAMILY}head_count {TP}": "attention",
    f"{FAMILY}head_slopes {TP}": "attention",
    f"{FAMILY}talking_heads {TP}": "attention",
    f"{FAMILY}channel_norm {TP}": "feed_forward",
    f"{FAMILY}channel_top {TP}": "feed_forward",
    f"{FAMILY}half_rotated {TP}": "feed_forward",
    # tokens of a rank taken for those of a sequence
    f"{FAMILY}token_shift {SP}": "mixes tokens outside attention",
    f"{FAMILY}causal_conv {CP}": "mixes tokens outside attention",
    f"{FAMILY}running_sum {CP}": "mixes tokens outside attention",
    f"{FAMILY}token_mean {SP}": "mixes tokens outside attention",
    f"{FAMILY}sequence_norm {SP}": "mixes tokens outside attention",
    f"{FAMILY}first_token {CP}": "mixes tokens outside attention",
    f"{FAMILY}last_token {CP}": "mixes tokens outside attention",
    f"{FAMILY}sinusoids {CP}": "position",
    f"{FAMILY}sinusoids {SP}": "",
    # rows of a rank taken for the batch
    f"{FAMILY}batch_norm {DP}": "rows",
    f"{FAMILY}row_mean {DP}": "rows",
    f"{FAMILY}by_rows {MICRO}": "",
    f"{FAMILY}mean_penalty {DP}": "",
    f"{FAMILY}expert_choice {DP}": "rows",
    f"{FAMILY}clipped_by_largest {DP}": "rows",
    f"{PLAIN}batch_norm_module {DP}": "rows",
    f"{PLAIN}batch_softmax {DP}": "rows",
    f"{OBJECTIVE}MeanLoss {DP}": "",
    f"{OBJECTIVE}HardTokens {MICRO}": "",
    # random numbers, and state
    f"{FAMILY}dropout {DP}": "random numbers",
    f"{FAMILY}stochastic_depth {MICRO}": "random numbers",
    f"{FAMILY}noise {DP}": "random numbers",
    f"{PLAIN}dropout_module {DP}": "random numbers",
    f"{FAMILY}running_mean {DP}": "seen",
    f"{FAMILY}token_counter {DP}": "",
    f"{FAMILY}last_seen {MICRO}": "",
    f"{FAMILY}every_call {FULL}": "",
    f"{FAMILY}value_residual {PP}": "",
    f"{FAMILY}block_count {PP}": "",
}
"""Words of the explanation, by what is planted and the layout in which it is wrong."""

EVERY = "parallelism.tp=2 parallelism.dp_shard=2 parallelism.cp=2 parallelism.pp=2 data.document_mask=true"
HONEST = [
    f"{FAMILY}'' {EVERY} {FULL}",
    f"{FAMILY}honest_gain {SP} {DP}",
    f"{FAMILY}honest_head_gain {SP} {CP} data.document_mask=true",
    f"{FAMILY}honest_head_gain {TP}",
    f"{PLAIN}'' {DP} {FULL} {MICRO}",
    f"model.architecture=tests.models.own_family +model.embedding_scale=2.0 {EVERY}",
    f"model.architecture=tests.models.own_head_norm +model.gathers=whole {SP} {CP}",
    f"model.architecture=tests.models.own_attention +model.window=16 +model.chunk=16 {EVERY}",
    f"model.architecture=tests.models.own_style +model.handled=true {TP} {DP}",
    f"model.architecture=tests.models.own_model.Bigram {DP} {MICRO}",
    f"model.architecture=tests.models.own_experts.Mixture {DP} {MICRO}",
    f"training.objective=titan_exp.trainer.objective.LanguageModeling {DP} {MICRO}",
]
PRESETS = {
    "llama_debug": EVERY,
    "olmo2_debug": EVERY,
    "qwen3_debug": f"{EVERY} parallelism.dp_replicate=2",
    "qwen3_moe_debug": f"{EVERY} parallelism.ep=2",
    "deepseek_debug": f"{EVERY} parallelism.ep=2",
    "gpt_oss_debug": f"{EVERY} parallelism.ep=2",
    "llama4_debug": f"{EVERY} parallelism.ep=2",
    "qwen3_next_debug": f"{EVERY} parallelism.ep=2",
    "qwen3_5_debug": EVERY,
    "olmo_hybrid_debug": EVERY,
    "kimi_linear_debug": f"{EVERY} parallelism.ep=2",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[PlannerProcesses]:
    """A process in which every dtype is fp64."""
    with PlannerProcesses(1, alone=True) as pool:
        yield pool


def verdict(worker: PlannerProcesses, words: str) -> Verdict:
    """Verdict about a run, in a warm process."""
    given = ["model=llama_debug", "cluster.device=cpu", "parallelism.dp_shard=1", "training.global_batch_size=8"]
    chosen = {word.partition("=")[0] for word in words.split()}
    run = to_experiment(compose([*(word for word in given if word.partition("=")[0] not in chosen), *words.split()]))
    return worker.submit(check_layouts, resolve_layout(run, 1), 60.0).result(timeout=120)


@pytest.mark.parametrize("words", FAULTS)
def test_a_planted_fault_is_found(worker, words: str):
    found = verdict(worker, words)
    assert FAULTS[words] in found.difference, found
    assert found.difference, found


@pytest.mark.parametrize("words", HONEST)
def test_an_honest_model_passes(worker, words: str):
    found = verdict(worker, words)
    assert found.difference == "", found.difference
    assert found.agreeing, found
    assert not [note for note in found.notes if "fails" in note or "did not" in note], found.notes


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes(worker, name: str):
    found = verdict(worker, f"model={name} {PRESETS[name]}")
    assert found.difference == "", found.difference
    assert not found.notes, found.notes
