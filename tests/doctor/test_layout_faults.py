"""Power of the layout check: planted faults of a user's kind are found, and honest models pass in every layout."""

import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.layout import check_layouts
from titan_exp.doctor.layout.cases import Verdict, cases
from titan_exp.plan.planner_processes import PlannerProcesses

FAMILY = "model.architecture=tests.models.own_planted +model.planted="
PLAIN = "model.architecture=tests.models.own_planted_block.PlantedClass +model.options.planted="
PLACES = "model.architecture=tests.models.own_places "
KINDS = "model.architecture=tests.models.own_kinds."
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
    f"{PLACES}+model.local=true {CP}": "position",
    f"{PLACES}+model.taps=4 {CP}": "blocks.0.taps (Taps) mixes tokens outside attention",
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
    f"{FAMILY}stochastic_depth {MICRO}": "random numbers",
    f"{FAMILY}noise {DP}": "random numbers",
    f"{FAMILY}running_mean {DP}": "seen",
    f"{FAMILY}token_counter {DP}": "",
    f"{FAMILY}last_seen {MICRO}": "",
    f"{FAMILY}every_call {FULL}": "",
    f"{FAMILY}value_residual {PP}": "",
    f"{FAMILY}block_count {PP}": "",
}
"""Words of the explanation, by what is planted and the layout in which it is wrong."""

BY_DAY = {f"{FAMILY}gain {SP}", f"{FAMILY}token_shift {SP}", f"{FAMILY}running_mean {DP}", f"{OBJECTIVE}MeanLoss {DP}"}
"""One of each kind of difference: in a gradient, in a module's output, after the first step, and in the loss alone."""

EVERY = "parallelism.tp=2 parallelism.dp_shard=2 parallelism.cp=2 parallelism.pp=2 data.document_mask=true"
HONEST = [
    f"{FAMILY}'' {EVERY} {FULL}",
    f"{FAMILY}honest_gain {SP} {DP}",
    f"{FAMILY}honest_head_gain {SP} {CP} data.document_mask=true",
    f"{FAMILY}honest_head_gain {TP}",
    f"{PLAIN}'' {DP} {FULL} {MICRO}",
    f"{KINDS}Shared {DP} {FULL} {MICRO}",
    f"{KINDS}Recurrent {DP} {MICRO} activation_checkpoint=selective",
    f"{PLACES}{EVERY} data.reset_positions=true",
    f"{PLACES}+model.taps=4 {TP} {DP}",
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


def by_night(cases: Iterable[str], by_day: Collection[str]) -> list[Any]:
    """Cases, of which only some run by day."""
    return [pytest.param(case, marks=() if case in by_day else pytest.mark.night) for case in cases]


@pytest.fixture(scope="module")
def worker() -> Iterator[PlannerProcesses]:
    """A process in which every dtype is fp64."""
    with PlannerProcesses(1, alone=True) as pool:
        yield pool


def experiment(words: str) -> Experiment:
    """A run with a resolved layout."""
    given = ["model=llama_debug", "cluster.device=cpu", "parallelism.dp_shard=1", "training.global_batch_size=8"]
    chosen = {word.partition("=")[0] for word in words.split()}
    run = to_experiment(compose([*(word for word in given if word.partition("=")[0] not in chosen), *words.split()]))
    return resolve_layout(run, 1)


def verdict(worker: PlannerProcesses, words: str) -> Verdict:
    """Verdict about a run, in a warm process."""
    return worker.submit(check_layouts, experiment(words), 60.0).result(timeout=120)


def with_dropout(run: Experiment) -> list[Any]:
    """Numbers of a run's last layout in fp64, without and with dropout; called in the worker."""
    import torch
    from torch.nn import functional

    from titan_exp.doctor.layout import in_double

    in_double()
    from titan_exp.doctor.layout.ranks import record, without_dropout
    from titan_exp.doctor.layout.shrink import shrink

    without_dropout()
    small = shrink(run)
    assert isinstance(small, Experiment)
    case, kept, found = cases(run, small)[0][-1], functional.dropout, list[Any]()
    for dropout in (kept, lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]):
        functional.dropout = dropout
        ((_, numbers),) = record([[case]], time.monotonic() + 60)
        found.append(numbers)
    functional.dropout = kept
    return found


@pytest.mark.parametrize("words", by_night(FAULTS, BY_DAY))
def test_a_planted_fault_is_found(worker, words: str):
    found = verdict(worker, words)
    assert FAULTS[words] in found.difference, found
    assert found.difference, found


@pytest.mark.parametrize("words", by_night(HONEST, HONEST[1:2]))
def test_an_honest_model_passes(worker, words: str):
    found = verdict(worker, words)
    assert found.difference == "", found.difference
    assert found.agreeing, found
    assert not [note for note in found.notes if "fails" in note or "did not" in note], found.notes


def test_dropout_is_left_out_of_the_check(worker):
    found = verdict(worker, f"{FAMILY}dropout {SP} {DP}")
    assert found.difference == "", found.difference
    assert len(found.agreeing) == 3
    assert [note for note in found.notes if note.startswith("This model drops 0.1 of some activations")]


def test_ranks_that_hold_the_same_tokens_drop_the_same(worker):
    given = experiment(f"{FAMILY}dropout {TP}")
    whole, dropping = worker.submit(with_dropout, given).result(timeout=120)
    assert dropping.disputed == whole.disputed == []
    assert dropping.losses != whole.losses


@pytest.mark.night
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes(worker, name: str):
    found = verdict(worker, f"model={name} {PRESETS[name]}")
    assert found.difference == "", found.difference
    assert not found.notes, found.notes
