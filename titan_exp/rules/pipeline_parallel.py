"""Rules about the pipeline: what can be cut into stages, what a schedule takes, and what goes with it."""

from collections.abc import Callable, Iterator

from titan_exp.config.errors.did_you_mean import did_you_mean, divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import (
    SCHEDULES,
    MalformedSchedule,
    check_complete,
    is_file,
    microbatches_of,
    placement_of,
    read_schedule,
    takes,
)
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import timeline
from titan_exp.rules.recompute import PARTITIONING_BACKENDS
from titan_exp.rules.rule import rules

SCHEDULE = "parallelism.pp_schedule"
WHOLE_BACKWARD = "GPipe, 1F1B, Interleaved1F1B or LoopedBFS"
"""Schedules that do not split the backward pass."""


def keys_mean_something(experiment: Experiment) -> Iterator[Violation]:
    """Without a pipeline nothing is cut."""
    for key in ("pp_microbatches", "pp_layers", "pp_layers_per_stage", "pp_first_stage_less", "pp_last_stage_less"):
        value = getattr(experiment.parallelism, key)
        if value:
            yield Violation(
                f"parallelism.{key}",
                value,
                "there is no pipeline (parallelism.pp=1), so that it would change nothing",
                f"parallelism.pp=2, or leave {key} out",
            )


def schedule_is_known(experiment: Experiment) -> Iterator[Violation]:
    """It has one of torch's names, or is a file that holds a schedule for so many ranks."""
    name, ranks = experiment.parallelism.pp_schedule, experiment.parallelism.pp
    if not is_file(name):
        if name not in SCHEDULES:
            offer = did_you_mean(name, SCHEDULES) or f"there is {listed(SCHEDULES, 'and')}."
            yield Violation(SCHEDULE, name, "there is no such schedule", f"{offer} A file of yours ends in .csv")
        return
    if ranks == 1:
        return
    try:
        orders = read_schedule(name)
        idle = [rank for rank, order in enumerate(orders) if not order]
        if len(orders) != ranks:
            reason = f"it has {len(orders)} rows, one for each pipeline rank, and parallelism.pp is {ranks}"
            yield Violation(
                SCHEDULE, name, reason, f"parallelism.pp={max(1, len(orders))}, or a file with {ranks} rows"
            )
        elif idle:
            yield Violation(SCHEDULE, name, f"row {idle[0] + 1} holds no action", "give every rank a stage")
        else:
            check_complete(orders)
            timeline(orders)
    except OSError as error:
        remedy = "a path is relative to where the command is typed; a schedule may also be one of "
        yield Violation(SCHEDULE, name, f"it cannot be read: {error.strerror}", remedy + listed(SCHEDULES))
    except UnicodeDecodeError:
        yield Violation(SCHEDULE, name, "it is not a text file", "rows of cells like 2F0, one row for each rank")
    except MalformedSchedule as error:
        remedy = "put the file right; rows are ranks, and their cells are executed in order (2F0: stage 2, forward, "
        yield Violation(SCHEDULE, name, str(error), f"{remedy}micro-batch 0)")


def model_can_be_cut(experiment: Experiment) -> Iterator[Violation]:
    """Only of the built-in model is it known which parts a stage may lack."""
    architecture, degree = experiment.model.architecture, experiment.parallelism.pp
    if architecture not in ARCHITECTURES:
        yield Violation(
            "parallelism.pp",
            degree,
            f"stages are cut from the built-in model, and {architecture} does not say how it is cut",
            f"parallelism.pp=1, spread over ranks with parallelism.dp_shard={degree}; or model.architecture=decoder",
        )


def one_way_to_divide(experiment: Experiment) -> Iterator[Violation]:
    """Layers given for each stage leave nothing else to be said about them."""
    parallelism = experiment.parallelism
    for key in ("pp_layers_per_stage", "pp_first_stage_less", "pp_last_stage_less"):
        value = getattr(parallelism, key)
        if parallelism.pp_layers is not None and value:
            remedy = f"leave out {key}, or parallelism.pp_layers"
            yield Violation(
                f"parallelism.{key}", value, "parallelism.pp_layers says already what each stage holds", remedy
            )


def stages_fit_the_schedule(experiment: Experiment) -> Iterator[Violation]:
    """Every rank has as many stages as the schedule wants."""
    parallelism = experiment.parallelism
    count, ranks, name = ResolvedLayout.of(experiment).stage_count, parallelism.pp, parallelism.pp_schedule
    wants = _wanted_stages(experiment)
    if wants(count):
        return
    if is_file(name):
        asked = f"{name} has {len(placement_of(read_schedule(name)))} stages"
    elif SCHEDULES[name].fixed:
        asked = f"{name} has {ranks * SCHEDULES[name].stages_per_rank} stages on {ranks} ranks"
    else:
        asked = f"{name} has as many stages on each of {ranks} ranks"
    if parallelism.pp_layers is not None:
        field, value = "parallelism.pp_layers", list(parallelism.pp_layers)
        works = nearest_numbers(count, [number for number in range(1, 2 * count + 2 * ranks) if wants(number)])
        remedy = f"give {listed(works)} numbers"
    else:
        field, value = "parallelism.pp_layers_per_stage", parallelism.pp_layers_per_stage
        held = experiment.model.layers + parallelism.pp_first_stage_less + parallelism.pp_last_stage_less
        sizes = nearest_numbers(value or 1, [size for size in range(1, held + 1) if wants(-(-held // size))])
        remedy = f"parallelism.pp_layers_per_stage={listed(sizes)}" if sizes else "leave it out"
    others = [] if is_file(name) else [it for it, schedule in SCHEDULES.items() if not schedule.fixed]
    if others and count % ranks == 0 and name not in others:
        remedy += f"; or parallelism.pp_schedule={listed(others)}"
    yield Violation(field, value, f"{asked}, and this makes {count}", remedy)


def every_stage_has_layers(experiment: Experiment) -> Iterator[Violation]:
    """The layers add up, and only the first and the last stage, which hold more than layers, may do without."""
    parallelism, layers = experiment.parallelism, experiment.model.layers
    counts = ResolvedLayout.of(experiment).layer_counts
    if sum(counts) != layers:
        yield Violation(
            "parallelism.pp_layers",
            counts,
            f"these are {sum(counts)} layers, and the model has {layers}",
            f"numbers that add up to {layers}",
        )
    elif parallelism.pp_layers is not None:
        if 0 in counts[1:-1]:
            reason = f"stage {counts.index(0, 1)} would hold nothing; only the first and the last may be without layers"
            yield Violation("parallelism.pp_layers", counts, reason, "at least 1 for every stage in between")
    elif min(counts) < 0 or 0 in counts[1:-1] or (0 in counts and not _less(experiment)):
        yield _too_many_stages(experiment, len(counts))


def whole_gradients(experiment: Experiment) -> Iterator[Violation]:
    """What does not go with a backward pass in two, the second part of which comes later."""
    if not ResolvedLayout.of(experiment).splits_backward:
        return
    name, policy = experiment.parallelism.pp_schedule, experiment.parallelism.reshard_after_forward
    if policy not in ("auto", "never"):
        yield Violation(
            "parallelism.reshard_after_forward",
            policy,
            f"{name} computes gradients of weights after the others, when freed parameters would be gone: silently "
            "wrong gradients",
            f"parallelism.reshard_after_forward=auto or never; or parallelism.pp_schedule={WHOLE_BACKWARD}",
        )
    compile_ = experiment.compile
    # A compiler that divides graphs has made the choice long before; it keeps what it keeps for both.
    in_graph = compile_.enabled and compile_.backend in PARTITIONING_BACKENDS
    if experiment.activation_checkpoint.mode == "selective" and not in_graph:
        yield Violation(
            "activation_checkpoint.mode",
            "selective",
            f"{name} goes back through a block twice, and what was kept of chosen operators is gone by then",
            "compile=blocks, whose graphs keep it; activation_checkpoint=full, every_n or none; "
            f"or parallelism.pp_schedule={WHOLE_BACKWARD}",
        )


def micro_batches_overlap(experiment: Experiment) -> Iterator[Violation]:
    """A CUDA graph writes every micro-batch's activations to the same place."""
    if experiment.compile.enabled and experiment.compile.backend == "cudagraphs":
        yield Violation(
            "compile.backend",
            experiment.compile.backend,
            "a pipeline holds the activations of several micro-batches, and a CUDA graph has room for one",
            "compile.backend=inductor or aot_eager",
        )


def pipelines(experiment: Experiment) -> Iterator[Violation]:
    """The rules of this file that the batch does not matter to."""
    if experiment.parallelism.pp == 1:
        yield from keys_mean_something(experiment)
        yield from schedule_is_known(experiment)
        return
    found = [*schedule_is_known(experiment), *model_can_be_cut(experiment), *micro_batches_overlap(experiment)]
    yield from found
    if any(violation.field in (SCHEDULE, "parallelism.pp") for violation in found):
        return
    yield from whole_gradients(experiment)
    conflicts = [*one_way_to_divide(experiment), *stages_fit_the_schedule(experiment)]
    yield from conflicts or every_stage_has_layers(experiment)


def micro_batches_fit(experiment: Experiment) -> Iterator[Violation]:
    """The data rank's share of the batch divides into passes of as many micro-batches as the schedule takes."""
    parallelism, training = experiment.parallelism, experiment.training
    if parallelism.pp == 1 or any(True for _ in schedule_is_known(experiment)):
        return
    share, rest = divmod(training.global_batch_size, ResolvedLayout.of(experiment).dp_degree)
    if rest or share % (training.micro_batch_size or 1):
        return  # Told by the rules about the batch.
    if parallelism.pp_microbatches is not None:
        yield from _given_passes_fit(experiment, share)
        return
    works = [number for number in divisors(share) if _fits(experiment, number)]
    total = share // training.micro_batch_size if training.micro_batch_size else None
    if total is None and not works:
        yield Violation(
            "training.global_batch_size",
            training.global_batch_size,
            f"a data rank's share of {share} sequences cannot be divided into micro-batches as "
            f"{parallelism.pp_schedule} takes them: {_takes_what(experiment)}",
            f"{_larger_batches(experiment)}; or another parallelism.pp_schedule",
        )
    elif total is not None and total not in works:
        sizes = nearest_numbers(training.micro_batch_size or 1, [share // number for number in works])
        passes = [number for number in divisors(total) if takes(parallelism, number)]
        remedies = [f"training.micro_batch_size={listed(sizes)}"] if sizes else []
        if passes and not is_file(parallelism.pp_schedule):
            near = listed(nearest_numbers(total, passes))
            remedies.append(f"parallelism.pp_microbatches={near}, in several passes")
        yield Violation(
            "training.micro_batch_size",
            training.micro_batch_size,
            f"it makes {_micro_batches(total)} of a data rank's {share} sequences, and {parallelism.pp_schedule} "
            f"takes {_takes_what(experiment)}",
            "; or ".join(remedies) or _larger_batches(experiment),
        )


def _given_passes_fit(experiment: Experiment, share: int) -> Iterator[Violation]:
    parallelism, micro = experiment.parallelism, experiment.training.micro_batch_size
    number = parallelism.pp_microbatches or 1
    total = share // (micro or 1)
    if total % number == 0 and takes(parallelism, number):
        return
    works = nearest_numbers(number, [count for count in divisors(total) if takes(parallelism, count)])
    what = f"{_micro_batches(total)} of a step" if micro else f"{share} sequences of a data rank"
    reason = (
        f"{parallelism.pp_schedule} takes {_takes_what(experiment)}"
        if total % number == 0
        else f"the {what} cannot be divided into {'passes of ' if micro else ''}{number}"
    )
    remedy = f"nearest: parallelism.pp_microbatches={listed(works)}" if works else _larger_batches(experiment)
    yield Violation("parallelism.pp_microbatches", number, reason, remedy)


def _fits(experiment: Experiment, total: int) -> bool:
    """Whether a step of so many micro-batches can be run; a file says how many one pass has."""
    name = experiment.parallelism.pp_schedule
    return total % microbatches_of(read_schedule(name)) == 0 if is_file(name) else takes(experiment.parallelism, total)


def _takes_what(experiment: Experiment) -> str:
    name, ranks = experiment.parallelism.pp_schedule, experiment.parallelism.pp
    if is_file(name):
        return f"passes of {microbatches_of(read_schedule(name))}"
    if SCHEDULES[name].in_rounds:
        return f"fewer than {2 * ranks}, or a multiple of how many times {ranks} goes into them"
    return f"at least {SCHEDULES[name].fill * ranks}"


def _larger_batches(experiment: Experiment) -> str:
    parallelism, ranks = experiment.parallelism, ResolvedLayout.of(experiment).dp_degree
    number = parallelism.pp_microbatches or next(count for count in range(1, 10**6) if takes(parallelism, count))
    near = multiples_near(
        experiment.training.global_batch_size, number * ranks * (experiment.training.micro_batch_size or 1)
    )
    return f"nearest: training.global_batch_size={listed(near)}"


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


def _wanted_stages(experiment: Experiment) -> Callable[[int], bool]:
    """Whether a number of stages fits the schedule."""
    name, ranks = experiment.parallelism.pp_schedule, experiment.parallelism.pp
    if is_file(name):
        exactly = len(placement_of(read_schedule(name)))
    elif SCHEDULES[name].fixed:
        exactly = ranks * SCHEDULES[name].stages_per_rank
    else:
        return lambda count: count > 0 and count % ranks == 0
    return lambda count: count == exactly


def _less(experiment: Experiment) -> bool:
    return bool(experiment.parallelism.pp_first_stage_less or experiment.parallelism.pp_last_stage_less)


def _too_many_stages(experiment: Experiment, stages: int) -> Violation:
    parallelism, layers = experiment.parallelism, experiment.model.layers
    if parallelism.pp_first_stage_less or parallelism.pp_last_stage_less:
        key = "pp_first_stage_less" if parallelism.pp_first_stage_less else "pp_last_stage_less"
        return Violation(
            f"parallelism.{key}",
            getattr(parallelism, key),
            f"{layers} layers cannot be divided so over {stages} stages: a stage would be left without any",
            f"a smaller {key}, fewer stages, or parallelism.pp_layers, the layers of each stage",
        )
    per_rank = stages // parallelism.pp
    works = [degree for degree in range(1, layers + 1) if degree * per_rank <= layers]
    return Violation(
        "parallelism.pp",
        parallelism.pp,
        f"{parallelism.pp_schedule} cuts the model into {stages} stages, and it has {layers} layers",
        f"parallelism.pp={listed(nearest_numbers(parallelism.pp, works))}; or parallelism.pp_layers, which may be 0 "
        "for the first and the last stage"
        + ("" if per_rank == 1 else "; or parallelism.pp_schedule=1F1B, with one stage on each rank"),
    )


RULES = rules(
    pipelines,
)
LAYOUT_RULES = rules(
    micro_batches_fit,
)
