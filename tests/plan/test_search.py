"""Layout search: the search space, its errors, and a ranking equal to the predictions of `plan`."""

import json
import math
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.cli.test_plan import planned
from tests.ranks import run_ranks
from titan_exp.cli.plan_commands.search import search_options
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import CONF_DIR
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_kernels
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.cuda.devices import device_named
from titan_exp.plan.search.layouts import KEYS, REFINED, Candidate, SearchSpace, fixed_keys, train_command
from titan_exp.plan.search.moves import moves
from titan_exp.plan.search.search import interrupt_after
from titan_exp.rules import EVERY_RULE, violations
from titan_exp.rules.rule import find_violations

if TYPE_CHECKING:
    from titan_exp.plan.search.layout_cost import LayoutCost

TYPED = [
    "model=llama_debug",
    "cluster=slurm_h100",
    "compile=none",
    "training.seq_len=512",
    "training.mixed_precision=bf16",
    "training.global_batch_size=64",
]

DEBUG_MODELS = sorted(path.stem for path in Path(CONF_DIR, "model").glob("*_debug.yaml"))


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
    chosen = {f"activation_checkpoint.{key}" for key in ("mode", "every", "budget")}
    assert fixed == {"parallelism.tp", "training.micro_batch_size", *chosen} < {*KEYS, *REFINED}
    found = search_space(composed(*typed), 8, fixed)
    assert {(candidate.parallelism.tp, candidate.mode) for candidate in found.candidates} == {(2, "full")}


def test_an_empty_search_space_is_refused():
    with pytest.raises(UserError, match=r"parallelism.tp=8 does not divide 12 GPUs"):
        search_space(composed("parallelism.tp=8"), 12, {"parallelism.tp"})
    with pytest.raises(UserError, match=r"each of \d+ layouts on 7 GPUs breaks a rule"):
        search_space(composed(), 7, {"parallelism.dp_replicate"})


def near(space: SearchSpace, **values: object) -> tuple[Candidate, dict[str, tuple[int, Candidate]]]:
    """A layout of a space, and its neighbours with their directions, by what their commands change."""
    own = next(each for each in space.candidates if all(each.values[key] == value for key, value in values.items()))
    found = {}
    for direction, moved in moves(own, space, device_named("h100")):
        changed = {key: value for key, value in moved.values.items() if own.values.get(key, "") != value}
        found[" ".join(f"{key.partition('.')[2]}={value}" for key, value in changed.items())] = direction, moved
    return own, found


LONG = ["training.seq_len=16384", "training.global_batch_size=16", "model.context=16384", "model.layers=8"]


def test_neighbours_differ_in_one_key_or_factor():
    own = {"parallelism.cp": 2, "parallelism.dp_shard": 4, "activation_checkpoint.mode": "selective"}
    _, found = near(search_space(composed(*LONG), 8, frozenset()), **own)
    assert {"micro_batch_size=2", "cp_method=ulysses", "cp=1 tp=2", "dp_replicate=2 dp_shard=2"} <= set(found)
    signs = {name: (direction > 0) - (direction < 0) for name, (direction, _) in found.items()}
    assert {name for name, sign in signs.items() if sign > 0} == {
        "mode=none",
        "budget=0.8",
        "reshard_after_forward=never",
    }
    less = {"mode=full", "budget=0.4", "reshard_after_forward=always", "loss_chunk_tokens=4096"}
    assert {name for name, sign in signs.items() if sign < 0} == less
    assert all(not violations(moved.experiment) for _, moved in found.values())
    pipeline = {"parallelism.pp": 2, "parallelism.dp_shard": 4, "parallelism.pp_schedule": "Interleaved1F1B"}
    _, found = near(search_space(composed(*LONG), 8, frozenset()), **pipeline)
    assert {"pp_schedule=1F1B", "pp_layers_per_stage=1"} <= set(found)
    less = {name for name, (direction, _) in found.items() if direction < 0}
    assert "reshard_after_forward=all_but_last" in less, "a pipeline keeps gathered parameters unless told otherwise"
    fixed = fixed_keys(["compile=none", "activation_checkpoint.budget=0.5", "training.loss_chunk_tokens=auto"])
    _, found = near(search_space(composed(*LONG), 8, fixed), **{"activation_checkpoint.mode": "selective"})
    assert "mode=full" in found
    assert not any(key in name for name in found for key in ("budget", "chunk", "enabled"))


@pytest.mark.parametrize(
    ("typed", "degree", "offered"), [("blocks", 2, True), ("blocks", 1, False), ("none", 2, False)]
)
def test_messages_of_compiled_blocks_may_be_fused(typed: str, degree: int, offered: bool):
    run = composed(*LONG, f"compile={typed}")
    space = search_space(run, 8, fixed_keys([f"compile={typed}"]))
    _, found = near(space, **{"parallelism.tp": degree, "parallelism.dp_shard": 8 // degree})
    assert ("async_tp=True" in found) is offered
    few = replace(run, cluster=replace(run.cluster, gpus_per_node=1))
    _, found = near(search_space(few, 8, frozenset()), **{"parallelism.tp": 2, "parallelism.dp_shard": 4})
    assert "async_tp=True" not in found, "tensor-parallel ranks are in several nodes"


def test_a_layout_that_cannot_be_extrapolated_does_not_end_a_search():
    space = search_space(composed(*LONG), 8, frozenset())
    from titan_exp.plan.search.search import LayoutSearch

    search = LayoutSearch(space, device_named("h100"), 2, lambda _: None)
    failed: Any = SimpleNamespace(result=lambda: (space.candidates[3], None, None, "the step is odd"))
    search._add(failed)
    assert search._next([]) is not None
    assert [int(number) for number in np.flatnonzero(~search._open)] == [3]
    assert dict(search._unknown)["the step is odd"] == 1


def test_commands_compose_to_their_layouts():
    found = search_space(composed(*LONG), 8, frozenset())
    _, moved = near(found, **{"activation_checkpoint.mode": "selective", "parallelism.cp": 2})
    assert len(moved) > 10
    for candidate in (*found.candidates[:: len(found.candidates) // 5], *(each for _, each in moved.values())):
        each = candidate.experiment
        program, verb, *words = shlex.split(train_command(candidate, [*TYPED, *LONG], {"training.steps": 7}))
        assert (program, verb) == ("titan-exp", "train")
        again = resolve_kernels(to_experiment(compose(words)))
        # The schedule of learning rates follows the steps.
        training = replace(each.training, steps=7)
        assert again == replace(each, training=training, lr_schedule=again.lr_schedule)


def test_commands_quote_typed_overrides_for_a_shell():
    typed = [*TYPED, """experiment.notes="the lab's run" """.strip(), "experiment.tags=[small,test]"]
    found = search_space(composed(), 8, frozenset())
    assert set(typed) < set(shlex.split(train_command(found.candidates[0], typed, {})))


def test_options_are_split_from_overrides():
    options, rest = search_options(["--tokens", "15e12", "model=llama3_8b", "--global-batch-size", "64", "--gpus", "8"])
    assert (options.tokens, options.gpus, options.limit) == (15e12, 8, 10)
    assert rest == ["model=llama3_8b", "training.global_batch_size=64"]
    with pytest.raises(UserError, match="gpus=many: must be a whole number"):
        search_options(["--gpus", "many"])
    with pytest.raises(UserError, match="--tokens needs a value"):
        search_options(["--tokens"])


@pytest.mark.parametrize("compiled", ["none", pytest.param("blocks", marks=pytest.mark.night)])
def test_the_ranking_is_what_plan_predicts(compiled: str):
    words = [*TYPED, "training.global_batch_size=16", "activation_checkpoint=full", "parallelism.cp=1"]
    words.append(f"compile={compiled}")
    words += [
        "parallelism.tp=2",
        "training.micro_batch_size=2",
        "parallelism.pp_schedule=1F1B",
        "parallelism.dp_replicate=1",
    ]
    rows_as_planned("--gpus", "8", *words)


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", [name for name in DEBUG_MODELS if name not in ("llama_debug", "flux_debug")])
def test_every_family_is_searched(model: str):
    """Over all axes but replicas and recomputation, with layers of each kind to extrapolate from. No objective trains
    FLUX.1 yet."""
    words = [
        f"model={model}",
        "model.layers=12",
        *TYPED[1:],
        "training.global_batch_size=16",
        "parallelism.dp_replicate=1",
    ]
    rows_as_planned("--gpus", "4", *words, "activation_checkpoint=selective", "compile=none")


def rows_as_planned(*words: str) -> None:
    """Rows of a search, whose numbers are those that `plan` prints for their commands."""
    found = json.loads(planned("search", "--tokens", "1e9", "--limit", "2", "--json", *words))
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
        assert max(rank["peak_reserved_bytes"] for rank in alone["ranks"]) == row["peak_reserved_bytes"]
        assert alone["ranks"][row["peak_pipeline_rank"]]["peak_allocated_bytes"] == row["peak_allocated_bytes"]
        assert alone["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-9)


WIDE = ["model.dim=512", "model.layers=8", "training.global_batch_size=16", "training.micro_batch_size=2"]
ONE_RANK = [*(f"parallelism.{degree}=1" for degree in ("dp_replicate", "tp", "cp", "pp")), "data.tokenizer=bytes"]


@pytest.mark.night
def test_no_neighbour_of_the_best_layout_is_better():
    """On a device with memory for something between selective and no recomputation, which only refined keys reach."""
    [best] = run_ranks(1, best_row, 2, [*WIDE, *ONE_RANK], 0.5, limit=300)
    assert best.candidate.refined or best.candidate.mode == "every_n"


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("gpus", "words"), [(4, [*WIDE, "compile=none"]), (4, [*LONG, "parallelism.cp=2"])])
def test_no_neighbour_of_the_best_of_more_keys_is_better(gpus: int, words: list[str]):
    run_ranks(1, best_row, gpus, words, 0.3, limit=1200)


def best_row(gpus: int, words: list[str], between: float) -> "LayoutCost":
    """Best row of a search, which the gate admits with the row's numbers; no neighbour that it admits is faster.

    The device has memory between what the first layout needs with selective and no recomputation.
    """
    from titan_exp.plan.device_memory import memory_of_gpu
    from titan_exp.plan.gate.gate import MemoryCheck
    from titan_exp.plan.predict import predict
    from titan_exp.plan.search.layout_cost import planned_cost
    from titan_exp.plan.search.search import LayoutSearch

    space, device = search_space(composed(*words), gpus, fixed_keys(words)), device_named("h100")
    first = [next(each for each in space.candidates if each.mode == mode) for mode in ("selective", "none")]
    less, more = (planned_cost(each, device)[0] for each in first)
    room = round(less.reserved + between * (more.reserved - less.reserved))
    device = replace(device, memory=room + device.memory - less.room)
    best = LayoutSearch(space, device, 2, lambda _: None).run().rows[0]
    neighbours = [moved for _, moved in moves(best.candidate, space, device)]
    assert len(neighbours) > 3
    for candidate in (best.candidate, *neighbours):
        plan = predict(candidate.experiment, device)
        memory = memory_of_gpu(device, candidate.layout, candidate.spec)
        admitted = MemoryCheck(candidate.experiment, memory, prediction=plan.prediction).fits
        assert plan.step_seconds is not None
        if candidate is best.candidate:
            assert admitted
            assert plan.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
            assert max(rank.bytes for rank in plan.ranks) == best.reserved
        else:
            assert not admitted or plan.step_seconds >= best.step_seconds * (1 - 1e-9), candidate.values
    return best


@pytest.mark.night
def test_the_smallest_layout_is_named_if_none_fits():
    fixed = ["parallelism.tp=1", "parallelism.cp=1", "parallelism.pp=1", "parallelism.dp_replicate=1"]
    words = ["model=llama3_8b", "model.layers=16", *TYPED[1:], "training.micro_batch_size=8", "training.seq_len=8192"]
    said = planned("search", "--gpus", "8", *words, *fixed, "activation_checkpoint=none", code=2)
    assert "nothing fits on 8 x H100" in said
    assert "The smallest planned layout needs" in said
    assert "training.loss_chunk_tokens=2048" in said
    assert "Traceback" not in said


INTERRUPTED = """
import json, multiprocessing, os, signal, time
from contextlib import suppress
from tests.plan.test_search import composed
from titan_exp.plan.cuda.devices import device_named
from titan_exp.plan.search.estimates import Estimates
from titan_exp.plan.search.layouts import fixed_keys, search_space
from titan_exp.plan.search.search import LayoutSearch, interrupt_after

# A shell starts commands in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(line):
    if "fastest" in line:
        os.killpg(0, signal.SIGINT)
        time.sleep(20)  # until the signal arrives, maybe in another thread

words = ["training.micro_batch_size=2", "parallelism.dp_replicate=1", "parallelism.cp=1", "activation_checkpoint=full"]
space = search_space(composed(*words), 8, fixed_keys(words))
for microseconds in range(5, 2000, 5):
    with suppress(KeyboardInterrupt), interrupt_after(microseconds / 1e6):
        Estimates(space.candidates, device_named("h100"))
limits = [(interrupt, None), (len, 0.01)]
found = [LayoutSearch(space, device_named("h100"), 10, show).run(seconds) for show, seconds in limits]
left = [len(space.candidates) - result.planned - result.floor == result.slower > 0 for result in found]
rows = [[row.step_seconds for row in result.rows] for result in found]
print(json.dumps([rows, left, [result.stopped for result in found], len(multiprocessing.active_children())]))
"""


def test_an_interrupted_search_returns_the_best_so_far():
    """Ctrl-C reaches the workers too; a time limit of 10 ms ends before the first trace; estimates may be interrupted
    at any moment."""
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


CUT_OFF = """
import json
from tests.plan.test_search import composed
from titan_exp.plan.cuda.devices import device_named
from titan_exp.plan.search.layouts import fixed_keys, search_space
from titan_exp.plan.search.search import LayoutSearch

def cut_off(line):
    if line.startswith("3 layouts"):
        raise KeyboardInterrupt

words = ["training.micro_batch_size=1", "parallelism.cp=1", "parallelism.pp=1", "activation_checkpoint=full"]
result = LayoutSearch(search_space(composed(*words), 16, fixed_keys(words)), device_named("h100"), 10, cut_off).run()
degrees = [row.candidate.parallelism for row in result.rows]
print(json.dumps([result.stopped, [[own.dp_replicate > 1, own.tp > 1, own.tp <= 8] for own in degrees]]))
"""


def test_a_search_that_is_cut_off_has_planned_the_plain_layouts():
    """FSDP alone, with tensor parallelism in a node, and with replicas: whatever the first estimates say."""
    done = subprocess.run(
        [sys.executable, "-c", CUT_OFF],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    stopped, kinds = json.loads(done.stdout)
    assert stopped
    assert sorted(kinds) == [[False, False, True], [False, True, True], [True, False, True]]


def test_a_time_limit_that_a_finalizer_ignores_is_enforced_a_second_later():
    began = time.perf_counter()
    with suppress(KeyboardInterrupt), interrupt_after(0.01):
        with suppress(KeyboardInterrupt):
            time.sleep(30)
        time.sleep(30)
    assert time.perf_counter() - began < 10


def test_cpus_are_refused():
    assert "no speed model for CPUs" in planned("search", "model=llama_debug", "cluster.device=cpu", code=2)
    assert "unknown device" in planned("search", *TYPED, "--device", "h10", code=2)


def test_unknown_recipes_are_refused():
    said = planned("search", *TYPED, "--gpus", "8", "--recipes", "float9", code=2)
    assert "--recipes float9: unknown recipe. Use float8_rowwise, " in said


def test_fp32_is_refused():
    said = planned("search", *TYPED, "training.mixed_precision=fp32", "--gpus", "8", code=2)
    assert "no speed model for fp32" in said
