"""Layout search: the search space, its errors, and a ranking equal to the predictions of `plan`."""

import json
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.test_plan import planned
from tests.ranks import run_ranks
from titan_exp.cli.plan import _explain_no_fit, search_options
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import CONF_DIR
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import resolve_kernels
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.devices import device_named
from titan_exp.plan.layout_search import interrupt_after
from titan_exp.plan.layouts import KEYS, REFINED, Candidate, SearchSpace, fixed_keys, moves, train_command, with_values
from titan_exp.rules import violations
from titan_exp.tracking.display import GIB

if TYPE_CHECKING:
    from titan_exp.plan.layout_search import LayoutCost

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


def space_of(gpus: int, *words: str) -> SearchSpace:
    """Space of a run with more words, which fix their keys."""
    return SearchSpace(composed(*words), gpus, fixed_keys(words))


def seeds_of(space: SearchSpace) -> list[Candidate]:
    from titan_exp.plan.layout_search import LayoutSearch

    return LayoutSearch(space, device_named("h100"), 1, lambda _: None)._seeds()


def test_seeds_are_a_dozen_layouts_that_the_rules_allow():
    for gpus, model, most in ((16, "llama_debug", 8), (64, "qwen3_moe_debug", 11)):
        seeds = seeds_of(SearchSpace(composed(f"model={model}"), gpus))
        assert 4 < len(seeds) <= most
        assert all(seed.layout.world_size == gpus and not violations(seed.experiment) for seed in seeds)
        axes = {axis for axis in (*DEGREES, "ep") if any(getattr(seed.parallelism, axis) > 1 for seed in seeds)}
        assert axes == {*DEGREES, *(["ep"] if "moe" in model else [])}
        assert (seeds[0].parallelism.dp_shard, seeds[0].mode) == (gpus, "none")


def test_seeds_of_a_large_model_are_those_that_may_fit():
    """70B on 128 GPUs: FSDP alone comes first, with full recomputation and no accumulation; replicas in a node never
    fit."""
    words = ["model=llama3_1_70b", "training.seq_len=8192", "training.global_batch_size=512"]
    first, *others = seeds_of(space_of(128, *words))
    assert (first.parallelism.dp_shard, first.mode, first.layout.gradient_accumulation) == (128, "full", 1)
    assert len(others) > 2
    assert all(each.parallelism.dp_replicate == 1 for each in others)
    assert any(each.parallelism.tp == 8 for each in others)
    typed = seeds_of(space_of(128, *words, "activation_checkpoint=none", "training.micro_batch_size=1"))
    assert {(each.mode, each.layout.micro_batch_size) for each in typed} == {("none", 1)}


def stopped_search(space: SearchSpace, *missed: "LayoutCost") -> str:
    """What is said of a stopped search in which no layout fits."""
    from titan_exp.plan.layout_search import SearchResult

    result = SearchResult([], [], list(missed), 3, [], len(missed), len(missed), 0, 0, [], 60.0, stopped=True)
    return _explain_no_fit(result, space, device_named("h100"))


def test_a_stopped_search_offers_only_keys_that_are_open_and_says_what_misses():
    from tests.plan.test_descent import planned as cost_of

    open_space = space_of(16)
    assert "as in activation_checkpoint=full" in stopped_search(open_space)
    assert "as in parallelism.pp=1" in stopped_search(space_of(16, "activation_checkpoint=full", "parallelism.tp=8"))
    all_typed = ["activation_checkpoint=full", "parallelism.tp=8", "parallelism.pp=1", "training.micro_batch_size=1"]
    assert stopped_search(space_of(16, *all_typed)).endswith("Use more --seconds.")
    cost = cost_of(seeds_of(open_space)[0], device_named("h100"))
    said = stopped_search(open_space, replace(cost, reserved=cost.room + 3 * GIB))
    assert "none of 1 planned layouts fits in 60 s" in said
    assert "\n  3 GiB too large: parallelism.dp_shard=16" in said


def test_a_row_under_pressure_names_the_fastest_with_room_and_no_count_is_zero():
    from tests.plan.test_descent import planned as cost_of
    from titan_exp.plan.layout_search import SearchResult
    from titan_exp.plan.tables import _left_out

    space = space_of(16, "activation_checkpoint=none", "training.micro_batch_size=1")
    cost = cost_of(seeds_of(space)[0], device_named("h100"))
    keys = "parallelism.dp_shard=16 training.micro_batch_size=1 activation_checkpoint.mode=none"
    assert str(cost).endswith(f" reserved: {keys}")
    tight = replace(cost, retries=2)
    assert str(tight).endswith(f" reserved, allocator under pressure: {keys}")
    said = "~ the allocator is under pressure and waits for the GPU, which the speeds do not count."
    ends = [" Row 3 is the fastest with room.", " No row has room.", "", None]
    for rows, end in zip(([tight, tight, cost], [tight], [cost, tight], [cost]), ends, strict=True):
        lines = _left_out(SearchResult(rows, [True] * len(rows), [], 3, [], 3, 0, 0, 0, [], 60.0))
        assert [line for line in lines if line.startswith("~")] == ([] if end is None else [said + end])
        assert not any(line.startswith("  0 ") for line in lines)
    lines = _left_out(SearchResult([cost], [True], [], 9, [], 3, 2, 1, 4, [], 60.0, stopped=True))
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "4"]


def test_typed_keys_stay_fixed():
    typed = ["parallelism.tp=2", "activation_checkpoint=full", "training.micro_batch_size=1", "optimizer.lr=1e-3"]
    fixed = fixed_keys(typed)
    chosen = {f"activation_checkpoint.{key}" for key in ("mode", "every", "budget")}
    assert fixed == {"parallelism.tp", "training.micro_batch_size", *chosen} < {*KEYS, *REFINED}
    found = seeds_of(space_of(8, *typed))
    assert {(seed.parallelism.tp, seed.mode) for seed in found} == {(2, "full")}
    assert len(found) > 2


def test_an_empty_search_space_is_refused():
    with pytest.raises(UserError, match=r"parallelism.tp=8 does not divide 12 GPUs"):
        seeds_of(space_of(12, "parallelism.tp=8"))
    with pytest.raises(UserError, match=r"each of \d+ layouts on 7 GPUs breaks a rule"):
        seeds_of(space_of(7, "parallelism.dp_replicate=1"))


def near(space: SearchSpace, **values: Any) -> tuple[Candidate, dict[str, tuple[int, Candidate]]]:
    """A layout of a space, and its neighbours with their directions, by what their commands change."""
    degrees = {f"parallelism.{degree}": 1 for degree in DEGREES if f"parallelism.{degree}" not in space.fixed}
    own = space.candidate(with_values(space.run, degrees | {"training.micro_batch_size": 1} | values))
    found = {}
    for move in moves(own.experiment, space.fixed, space.recipes, space.run):
        moved = space.candidate(move.experiment)
        if not violations(moved.experiment):
            changed = {key: value for key, value in moved.values.items() if own.values.get(key, "") != value}
            name = " ".join(f"{key.partition('.')[2]}={value}" for key, value in changed.items())
            found[name] = move.direction, moved
    return own, found


LONG = ["training.seq_len=16384", "training.global_batch_size=16", "model.context=16384", "model.layers=8"]


def test_neighbours_differ_in_one_key_or_factor():
    own = {"parallelism.cp": 2, "parallelism.dp_shard": 4, "activation_checkpoint.mode": "selective"}
    whole = SearchSpace(composed(*LONG), 8)
    _, found = near(whole, **own)
    assert {"micro_batch_size=2", "cp_method=ulysses", "cp=1 tp=2", "dp_replicate=2 dp_shard=2"} <= set(found)
    signs = {name: (direction > 0) - (direction < 0) for name, (direction, _) in found.items()}
    assert {name for name, sign in signs.items() if sign > 0} == {
        "mode=none",
        "budget=0.8",
        "reshard_after_forward=never",
    }
    less = {"mode=full", "budget=0.4", "reshard_after_forward=always", "loss_chunk_tokens=4096"}
    assert {name for name, sign in signs.items() if sign < 0} == less
    pipeline = {"parallelism.pp": 2, "parallelism.dp_shard": 4, "parallelism.pp_schedule": "Interleaved1F1B"}
    _, found = near(whole, **pipeline)
    assert {"pp_schedule=1F1B", "pp_layers_per_stage=1"} <= set(found)
    less = {name for name, (direction, _) in found.items() if direction < 0}
    assert "reshard_after_forward=all_but_last" in less, "a pipeline keeps gathered parameters unless told otherwise"
    fixed = fixed_keys(["compile=none", "activation_checkpoint.budget=0.5", "training.loss_chunk_tokens=auto"])
    some = SearchSpace(composed(*LONG), 8, fixed)
    _, found = near(some, **{"activation_checkpoint.mode": "selective", "parallelism.dp_shard": 8})
    assert "mode=full" in found
    assert not any(key in name for name in found for key in ("budget", "chunk", "enabled"))


@pytest.mark.parametrize(
    ("typed", "degree", "offered"), [("blocks", 2, True), ("blocks", 1, False), ("none", 2, False)]
)
def test_messages_of_compiled_blocks_may_be_fused(typed: str, degree: int, offered: bool):
    run, degrees = composed(*LONG, f"compile={typed}"), {"parallelism.tp": degree, "parallelism.dp_shard": 8 // degree}
    _, found = near(SearchSpace(run, 8, fixed_keys([f"compile={typed}"])), **degrees)
    assert ("async_tp=True" in found) is offered
    few = replace(run, cluster=replace(run.cluster, gpus_per_node=1))
    _, found = near(SearchSpace(few, 8), **{"parallelism.tp": 2, "parallelism.dp_shard": 4})
    assert "async_tp=True" not in found, "tensor-parallel ranks are in several nodes"


def test_a_layout_that_cannot_be_extrapolated_does_not_end_a_search(monkeypatch: pytest.MonkeyPatch):
    from tests.plan.test_descent import Here, planned
    from titan_exp.plan import layout_search

    space, device = space_of(8, *LONG, "activation_checkpoint=full"), device_named("h100")
    odd = seeds_of(space)[0].identity
    monkeypatch.setattr(layout_search, "PlannerProcesses", Here)
    monkeypatch.setattr(
        layout_search,
        "_plan",
        lambda each, device: "the step is odd" if each.identity == odd else planned(each, device),
    )
    result = layout_search.LayoutSearch(space, device, 2, lambda _: None).run()
    assert len(result.rows) == 2
    assert dict(result.unknown)["the step is odd"] == 1
    assert odd not in [row.candidate.identity for row in result.rows]
    assert sum(count for count, _ in result.left_out) + result.planned <= result.tried


def test_commands_compose_to_their_layouts():
    space = SearchSpace(composed(*LONG), 8)
    values = {"activation_checkpoint.mode": "selective", "parallelism.cp": 2, "parallelism.dp_shard": 4}
    _, moved = near(space, **values)
    assert len(moved) > 10
    for candidate in (*seeds_of(space), *(each for _, each in moved.values())):
        each = candidate.experiment
        program, verb, *words = shlex.split(train_command(candidate, [*TYPED, *LONG], {"training.steps": 7}))
        assert (program, verb) == ("titan-exp", "train")
        again = resolve_kernels(to_experiment(compose(words)))
        # The schedule of learning rates follows the steps.
        training = replace(each.training, steps=7)
        assert again == replace(each, training=training, lr_schedule=again.lr_schedule)


def test_commands_quote_typed_overrides_for_a_shell():
    typed = [*TYPED, """experiment.notes="the lab's run" """.strip(), "experiment.tags=[small,test]"]
    assert set(typed) < set(shlex.split(train_command(seeds_of(SearchSpace(composed(), 8))[0], typed, {})))


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
    from titan_exp.plan.devices import memory_of_gpu
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason
    from titan_exp.plan.gate import MemoryCheck
    from titan_exp.plan.layout_search import LayoutSearch, planned_cost
    from titan_exp.plan.predict import predict

    space, device = space_of(gpus, *words), device_named("h100")
    first = seeds_of(space)[0].experiment
    modes = (with_values(first, {"activation_checkpoint.mode": mode}) for mode in ("selective", "none"))
    less, more = (planned_cost(space.candidate(each), device) for each in modes)
    room = round(less.reserved + between * (more.reserved - less.reserved))
    device = replace(device, memory=room + device.memory - less.room)
    best = LayoutSearch(space, device, 2, lambda _: None).run().rows[0]
    found = moves(best.candidate.experiment, space.fixed, typed=space.run)
    neighbours = [space.candidate(move.experiment) for move in found]
    neighbours = [
        each for each in neighbours if not violations(each.experiment) and not unsupported_reason(each.experiment)
    ]
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


WORDS = [
    "parallelism.dp_replicate=1",
    "training.micro_batch_size=2",
    "training.global_batch_size=16",
    "model.layers=8",
]
ONE = ["parallelism.dp_replicate=1", "parallelism.cp=1", "activation_checkpoint=full"]
SEARCHED = {
    "whole units": (8, WORDS),
    "replicated units": (8, [*WORDS, "model.ffn_dim=160"]),
    "windows in every second layer": (
        4,
        ["model=gpt_oss_debug", *WORDS, "parallelism.cp=1", "parallelism.tp=1", "activation_checkpoint=full"],
    ),
    "experts": (4, ["model=qwen3_moe_debug", *WORDS, "parallelism.cp=1", "activation_checkpoint=full"]),
    "8B": (8, ["model=llama3_8b", "model.layers=16", "training.seq_len=8192", "training.global_batch_size=16", *ONE]),
    "30B with experts": (
        8,
        ["model=qwen3_30b_a3b", "model.layers=12", "training.seq_len=4096", "training.global_batch_size=64", *ONE],
    ),
}
"""GPUs and overrides of searches by name."""


@pytest.mark.night
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_the_best_of_all_layouts(name: str):
    """On devices where all, half and few layouts fit, few of which the search plans."""
    words = [sys.executable, "-c", f"from tests.plan.test_search import print_both; print_both({name!r})"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    for best, found, plans, layouts in json.loads(done.stdout):
        assert found <= 1.03 * best
        assert plans < 60 or plans < layouts / 2


def print_both(name: str) -> None:
    """Seconds of the best layout of all and of the best that a search finds on three devices, and how many layouts the
    search plans, as JSON."""
    from tests.plan.test_descent import enumerated
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason
    from titan_exp.plan.layout_search import LayoutSearch, _plan
    from titan_exp.plan.planner_processes import PlannerProcesses

    gpus, words = SEARCHED[name]
    space, device, found = space_of(gpus, *words), device_named("h100"), []
    layouts = [each for each in enumerated(space) if unsupported_reason(each.experiment) is None]
    with PlannerProcesses(2) as pool:
        costs = [future.result() for future in [pool.submit(_plan, each, device) for each in layouts]]
        costs = [cost for cost in costs if not isinstance(cost, str)]
    needed = sorted(cost.reserved + device.memory - cost.room for cost in costs)
    for place in (-1, len(needed) // 2, len(needed) // 8):
        small = replace(device, memory=needed[place])
        room = small.memory - device.memory
        best = min(cost.step_seconds for cost in costs if cost.reserved <= cost.room + room)
        result = LayoutSearch(space, small, 2, lambda _: None).run()
        found.append((best, result.rows[0].step_seconds, result.planned, len(layouts)))
    print(json.dumps(found))


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
from tests.plan.test_search import space_of
from titan_exp.plan.devices import device_named
from titan_exp.plan.layout_search import LayoutSearch

# A shell starts commands in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(line):
    if "fastest" in line:
        os.killpg(0, signal.SIGINT)
        time.sleep(20)  # until the signal arrives, maybe in another thread

words = ["training.micro_batch_size=2", "parallelism.dp_replicate=1", "parallelism.cp=1", "activation_checkpoint=full"]
space, limits = space_of(8, *words), [(interrupt, None), (len, 0.01)]
found = [LayoutSearch(space, device_named("h100"), 10, show).run(seconds) for show, seconds in limits]
rows = [[row.step_seconds for row in result.rows] for result in found]
print(json.dumps([rows, [result.stopped for result in found], len(multiprocessing.active_children())]))
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
    (first, none), stopped, workers = json.loads(done.stdout)
    assert 0 < len(first) < 10
    assert first == sorted(first)
    assert none == []
    assert stopped == [True, True]
    assert workers == 0


CUT_OFF = """
import json
from tests.plan.test_search import space_of
from titan_exp.plan.devices import device_named
from titan_exp.plan.layout_search import LayoutSearch

def cut_off(line):
    if line.startswith("3 layouts"):
        raise KeyboardInterrupt

words = ["training.micro_batch_size=1", "parallelism.cp=1", "parallelism.pp=1", "activation_checkpoint=full"]
result = LayoutSearch(space_of(16, *words), device_named("h100"), 10, cut_off).run()
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
    assert "--recipes float9: there is no such recipe. Use float8_rowwise, " in said


def test_fp32_is_refused():
    said = planned("search", *TYPED, "training.mixed_precision=fp32", "--gpus", "8", code=2)
    assert "no speed model for fp32" in said
