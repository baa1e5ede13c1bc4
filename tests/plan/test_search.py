"""Layouts of a cluster: which there are, what is said where there is none; what is ranked is what `plan` says."""

import json
import math
import shlex

import pytest

from tests.cli.test_plan import planned
from titan_exp.cli.plan_search import search_options
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.search.layouts import KEYS, command_line, fixed_keys, search_space
from titan_exp.rules import violations

TYPED = [
    "model=llama_debug",
    "cluster=slurm_h100",
    "training.seq_len=512",
    "training.mixed_precision=bf16",
    "training.global_batch_size=64",
]


def composed(*more: str) -> Experiment:
    return to_experiment(compose([*TYPED, *more]))


def test_candidates_are_all_factorizations_that_the_rules_allow():
    found = search_space(composed(), 16, frozenset())
    assert found.tried == len(found.experiments) + sum(count for count, _ in found.left_out)
    assert all(ResolvedLayout.of(each).world_size == 16 and not violations(each) for each in found.experiments)
    layouts = {
        tuple(getattr(each.parallelism, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))
        for each in found.experiments
    }
    # 16 has C(4 + 4, 4) ways to be a product of five degrees; four layers are no more than four stages.
    assert len(layouts) < math.comb(8, 4)
    assert max(pp for *_, pp in layouts) == 4
    assert {violation.field for _, violation in found.left_out} >= {"parallelism.pp"}


def test_what_is_typed_is_kept():
    typed = ["parallelism.tp=2", "activation_checkpoint=full", "training.micro_batch_size=1", "optimizer.lr=1e-3"]
    fixed = fixed_keys(typed)
    assert fixed == {"parallelism.tp", "activation_checkpoint.mode", "training.micro_batch_size"} < set(KEYS)
    found = search_space(composed(*typed), 8, fixed)
    assert {(each.parallelism.tp, each.activation_checkpoint.mode) for each in found.experiments} == {(2, "full")}


def test_impossible_totals_are_said():
    with pytest.raises(UserError, match=r"12 GPUs cannot be laid out with parallelism.tp=8"):
        search_space(composed("parallelism.tp=8"), 12, {"parallelism.tp"})
    with pytest.raises(UserError, match=r"none of \d+ layouts on 7 GPUs can be"):
        search_space(composed(), 7, {"parallelism.dp_replicate"})


def test_commands_compose_to_their_layouts():
    found = search_space(composed(), 8, frozenset())
    for each in found.experiments[:: len(found.experiments) // 5]:
        program, verb, *words = shlex.split(command_line(each, TYPED, {"training.steps": 7}))
        assert (program, verb) == ("titan-exp", "train")
        again = to_experiment(compose(words))
        assert (again.parallelism, again.activation_checkpoint) == (each.parallelism, each.activation_checkpoint)
        assert again.training.micro_batch_size == each.training.micro_batch_size
        assert again.training.steps == 7


def test_options_are_told_from_overrides():
    options, rest = search_options(["--tokens", "15e12", "model=llama3_8b", "--global-batch-size", "64", "--gpus", "8"])
    assert (options.tokens, options.gpus, options.limit) == (15 * 10**12, 8, 10)
    assert rest == ["model=llama3_8b", "training.global_batch_size=64"]
    with pytest.raises(UserError, match="--gpus many: it takes a whole number"):
        search_options(["--gpus", "many"])
    with pytest.raises(UserError, match="--tokens takes a value, as in --tokens 15e12"):
        search_options(["--tokens"])


def test_the_ranking_is_what_plan_predicts():
    words = [*TYPED, "training.global_batch_size=16", "activation_checkpoint=full", "parallelism.cp=1"]
    words += [
        "parallelism.tp=2",
        "training.micro_batch_size=2",
        "parallelism.pp_schedule=1F1B",
        "parallelism.dp_replicate=1",
    ]
    found = json.loads(planned("search", "--gpus", "8", "--tokens", "1e9", "--limit", "2", "--json", *words))
    rows = found["layouts"]
    assert len(rows) == 2
    speeds = [row["tokens_per_second_per_device"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert rows[0]["on_front"]
    for row in rows:
        assert row["gpu_hours"] == pytest.approx(1e9 / row["tokens_per_second_per_device"] / 3600)
        launched = shlex.split(row["command"])[2:]
        alone = json.loads(planned(*launched, "--json"))
        assert max(rank["peak_allocated_bytes"] for rank in alone["ranks"]) == row["peak_allocated_bytes"]
        assert alone["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-9)


@pytest.mark.night
def test_where_nothing_fits_the_smallest_is_named():
    fixed = ["parallelism.tp=1", "parallelism.cp=1", "parallelism.pp=1", "parallelism.dp_replicate=1"]
    words = ["model=llama3_8b", "model.layers=6", *TYPED[1:], "training.micro_batch_size=8", "training.seq_len=8192"]
    said = planned("search", "--gpus", "8", *words, *fixed, "activation_checkpoint=none", code=2)
    assert "nothing fits on 8 x H100" in said
    assert "The smallest of 1 layouts takes" in said
    assert "training.loss_chunk_tokens=2048" in said
    assert "Traceback" not in said


def test_a_cpu_has_no_speed():
    assert "nothing is known of a CPU's" in planned("search", "model=llama_debug", "cluster.device=cpu", code=2)
    assert "there is no such device" in planned("search", *TYPED, "--device", "h10", code=2)


def test_what_has_no_known_speed_is_not_ranked():
    said = planned("search", *TYPED, "training.mixed_precision=fp32", "--gpus", "8", code=2)
    assert "ranked by speed" in said
