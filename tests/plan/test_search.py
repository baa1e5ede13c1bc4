"""Layout search: the search space, its errors, and a ranking equal to the predictions of `plan`."""

import json
import math
import shlex
import subprocess
import sys
from functools import partial

import pytest

from tests.cli.test_plan import planned
from titan_exp.cli.plan_commands.search import search_options
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.plan.search.layouts import KEYS, _enumerate, fixed_keys, search_space, train_command
from titan_exp.rules import EVERY_RULE, violations
from titan_exp.rules.rule import find_violations

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
    assert found.tried == len(found.candidates) + sum(count for count, _ in found.left_out)
    assert all(
        candidate.layout.world_size == 16 and not violations(candidate.experiment) for candidate in found.candidates
    )
    layouts = {
        tuple(getattr(candidate.parallelism, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))
        for candidate in found.candidates
    }
    # 16 has C(4 + 4, 4) ways to be a product of five degrees; four layers are no more than four stages.
    assert len(layouts) < math.comb(8, 4)
    assert max(pp for *_, pp in layouts) == 4
    assert {violation.field for _, violation in found.left_out} >= {"parallelism.pp"}


def test_a_rule_is_called_once_for_layouts_equal_to_it():
    experiment, fixed = composed("model=qwen3_moe_debug"), {"training.micro_batch_size", "parallelism.cp"}
    calls = [0] * len(EVERY_RULE)

    def check(number: int, layout: Experiment) -> Violation | None:
        calls[number] += 1
        return next(iter(find_violations(EVERY_RULE[number : number + 1], layout)), None)

    checks = LayoutChecks([partial(check, number) for number in range(len(EVERY_RULE))], KEYS)
    layouts = list(_enumerate(experiment, 8, fixed))
    found = [checks.first(layout) for layout in layouts]
    assert found[::3] == [next(iter(violations(layout)), None) for layout in layouts[::3]]
    assert 0 < found.count(None) < len(found)
    assert max(calls) <= len(layouts)
    assert sorted(calls)[len(calls) // 2] < 10
    assert {None if layout.parallelism.tp == 1 else layout.parallelism.etp for layout in layouts} > {None, 1, 2}


def test_typed_keys_stay_fixed():
    typed = ["parallelism.tp=2", "activation_checkpoint=full", "training.micro_batch_size=1", "optimizer.lr=1e-3"]
    fixed = fixed_keys(typed)
    assert fixed == {"parallelism.tp", "activation_checkpoint.mode", "training.micro_batch_size"} < set(KEYS)
    found = search_space(composed(*typed), 8, fixed)
    assert {(candidate.parallelism.tp, candidate.mode) for candidate in found.candidates} == {(2, "full")}


def test_an_empty_search_space_is_refused():
    with pytest.raises(UserError, match=r"parallelism.tp=8 does not divide 12 GPUs"):
        search_space(composed("parallelism.tp=8"), 12, {"parallelism.tp"})
    with pytest.raises(UserError, match=r"each of \d+ layouts on 7 GPUs breaks a rule"):
        search_space(composed(), 7, {"parallelism.dp_replicate"})


def test_commands_compose_to_their_layouts():
    found = search_space(composed(), 8, frozenset())
    for candidate in found.candidates[:: len(found.candidates) // 5]:
        each = candidate.experiment
        program, verb, *words = shlex.split(train_command(candidate, TYPED, {"training.steps": 7}))
        assert (program, verb) == ("titan-exp", "train")
        again = to_experiment(compose(words))
        assert (again.parallelism, again.activation_checkpoint) == (each.parallelism, each.activation_checkpoint)
        assert again.training.micro_batch_size == each.training.micro_batch_size
        assert again.training.steps == 7


def test_options_are_split_from_overrides():
    options, rest = search_options(["--tokens", "15e12", "model=llama3_8b", "--global-batch-size", "64", "--gpus", "8"])
    assert (options.tokens, options.gpus, options.limit) == (15e12, 8, 10)
    assert rest == ["model=llama3_8b", "training.global_batch_size=64"]
    with pytest.raises(UserError, match="gpus=many: must be a whole number"):
        search_options(["--gpus", "many"])
    with pytest.raises(UserError, match="--tokens needs a value"):
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
    for row in rows[1:]:  # the first costs as much
        launched = shlex.split(row["command"])[2:]
        alone = json.loads(planned(*launched, "--json"))
        assert max(rank["peak_allocated_bytes"] for rank in alone["ranks"]) == row["peak_allocated_bytes"]
        assert alone["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-9)


@pytest.mark.night
def test_the_smallest_layout_is_named_if_none_fits():
    fixed = ["parallelism.tp=1", "parallelism.cp=1", "parallelism.pp=1", "parallelism.dp_replicate=1"]
    words = ["model=llama3_8b", "model.layers=16", *TYPED[1:], "training.micro_batch_size=8", "training.seq_len=8192"]
    said = planned("search", "--gpus", "8", *words, *fixed, "activation_checkpoint=none", code=2)
    assert "nothing fits on 8 x H100" in said
    assert "The smallest of 1 layouts needs" in said
    assert "training.loss_chunk_tokens=2048" in said
    assert "Traceback" not in said


INTERRUPTED = """
import json, multiprocessing, os, signal, time
from tests.plan.test_search import composed
from titan_exp.plan.cuda.devices import device_named
from titan_exp.plan.search.layouts import fixed_keys, search_space
from titan_exp.plan.search.search import LayoutSearch

def interrupt(line):
    if "fastest" in line:
        os.killpg(0, signal.SIGINT)
        time.sleep(20)  # until the signal arrives, maybe in another thread

words = ["training.micro_batch_size=2", "parallelism.dp_replicate=1", "parallelism.cp=1", "activation_checkpoint=full"]
space = search_space(composed(*words), 8, fixed_keys(words))
limits = [(interrupt, None), (len, 0.01)]
found = [LayoutSearch(space, device_named("h100"), 10, show).run(seconds) for show, seconds in limits]
left = [len(space.candidates) - result.looked_at - result.floor == result.slower > 0 for result in found]
rows = [[row.step_seconds for row in result.rows] for result in found]
print(json.dumps([rows, left, [result.stopped for result in found], len(multiprocessing.active_children())]))
"""


def test_an_interrupted_search_returns_the_best_so_far():
    """Ctrl-C reaches the workers too; a time limit of 10 ms ends before the first trace."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    (first, none), left, stopped, workers = json.loads(done.stdout)
    assert 0 < len(first) < 10
    assert first == sorted(first)
    assert none == []
    assert left == stopped == [True, True]
    assert workers == 0


def test_cpus_are_refused():
    assert "no speed model for CPUs" in planned("search", "model=llama_debug", "cluster.device=cpu", code=2)
    assert "unknown device" in planned("search", *TYPED, "--device", "h10", code=2)


def test_fp32_is_refused():
    said = planned("search", *TYPED, "training.mixed_precision=fp32", "--gpus", "8", code=2)
    assert "no speed model for fp32" in said
