"""Pipeline and expert parallelism rules: stages, schedules, micro-batches; degrees that experts and channels divide."""

import math
from collections.abc import Iterator
from functools import partial

from titan_exp.config.errors.user_error import (
    Violation,
    did_you_mean,
    divisors,
    listed,
    multiples_near,
    nearest_numbers,
)
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout import pipeline_schedules
from titan_exp.config.layout.pipeline_schedules import SCHEDULES, is_file, microbatches_of, read_schedule, takes
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import has_experts, model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.rules.compile import PARTITIONING_BACKENDS, compiled_blocks
from titan_exp.rules.rule import Refuse, check_multiple, check_number, rules

SCHEDULE = "parallelism.pp_schedule"
WHOLE_BACKWARD = "GPipe, 1F1B, Interleaved1F1B or LoopedBFS"  # schedules that do not split the backward pass


def keys_have_an_effect(parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Without a pipeline, no pipeline key is set."""
    for key in ("pp_microbatches", "pp_layers", "pp_layers_per_stage", "pp_first_stage_less", "pp_last_stage_less"):
        if value := getattr(parallelism, key):
            reason = "with parallelism.pp=1 there is no pipeline, so this would change nothing"
            remedy = f"use parallelism.pp=2, or leave {key} out"
            yield Violation(f"parallelism.{key}", value, reason, remedy)


def schedule_is_known(parallelism: ParallelismConfig) -> Iterator[Violation]:
    """The schedule is one of torch's, or a file with one row per pipeline rank."""
    name, ranks = parallelism.pp_schedule, parallelism.pp
    if not is_file(name):
        if name not in SCHEDULES:
            offer = did_you_mean(name, SCHEDULES) or f"use {listed(SCHEDULES)}."
            remedy = f"{offer} A schedule of your own is a file that ends in .csv"
            yield Violation(SCHEDULE, name, "no schedule has this name", remedy)
        return
    if ranks == 1:
        return
    try:
        actions = read_schedule(name)
        idle = [rank for rank, row in enumerate(actions) if not row]
        if len(actions) != ranks:
            reason = f"this file has {len(actions)} rows, one for each pipeline rank, and parallelism.pp is {ranks}"
            remedy = f"use parallelism.pp={max(1, len(actions))}, or a file with {ranks} rows"
        elif idle:
            reason, remedy = f"row {idle[0] + 1} has no action", "give every rank a stage"
        else:
            pipeline_schedules.check_complete(actions)
            pipeline_schedules.timeline(actions)
            return
    except OSError as error:
        reason = f"titan_exp cannot read this file: {error.strerror}"
        remedy = f"give a path from the current folder, or one of {listed(SCHEDULES)}"
    except UnicodeDecodeError:
        reason = "this is not a text file"
        remedy = "give a CSV file of cells like 2F0, with a row for each rank"
    except pipeline_schedules.MalformedSchedule as error:
        cells = "a row is a rank, which executes its cells in order (2F0: stage 2, forward, micro-batch 0)"
        reason, remedy = str(error), f"correct the file: {cells}"
    yield Violation(SCHEDULE, name, reason, remedy)


def stages_fit(model: ModelConfig, parallelism: ParallelismConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """The number of stages fits the schedule, and their layers add up."""
    if not schedule_can_be_read(parallelism) or model_spec(model) is None:
        return
    keys = ("pp_layers_per_stage", "pp_first_stage_less", "pp_last_stage_less")
    beside = [key for key in keys if parallelism.pp_layers is not None and getattr(parallelism, key)]
    for key in beside:
        reason = "parallelism.pp_layers already gives the layers of each stage"
        remedy = f"leave out {key}, or parallelism.pp_layers"
        yield Violation(f"parallelism.{key}", getattr(parallelism, key), reason, remedy)
    wrong_count = [*_stage_count(parallelism, layout)]
    yield from wrong_count if beside or wrong_count else _stage_layers(parallelism, layout)


def microbatches_fit(
    parallelism: ParallelismConfig, training: TrainingConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """A data-parallel rank's share of the batch divides into passes of micro-batches valid for the schedule."""
    micro, share = training.micro_batch_size, layout.sequences_per_dp_rank
    if not schedule_can_be_read(parallelism) or training.global_batch_size % (layout.dp_degree * (micro or 1)):
        return  # An indivisible batch violates the training rules.
    total, number, is_csv = share // (micro or 1), parallelism.pp_microbatches, is_file(parallelism.pp_schedule)
    passes = [count for count in divisors(total) if takes(parallelism, count)]
    accepted = f"{parallelism.pp_schedule} takes {accepted_numbers(parallelism)}"
    whole = (number or next(filter(partial(takes, parallelism), range(1, 10**6)))) * layout.dp_degree * (micro or 1)
    larger = f"nearest: training.global_batch_size={listed(multiples_near(training.global_batch_size, whole))}"
    if number is not None:
        if number not in passes:
            unit = "micro-batches" if micro else "sequences"
            indivisible = f"it does not divide the {total} {unit} that a data rank takes in a step"
            near = f"nearest: parallelism.pp_microbatches={listed(nearest_numbers(number, passes))}"
            reason = indivisible if total % number else accepted
            yield Violation("parallelism.pp_microbatches", number, reason, near if passes else larger)
        return
    works = [count for count in divisors(share) if fits(parallelism, count)]
    if micro is None and not works:
        reason = f"no size of micro-batch divides a data rank's {share} sequences as the schedule needs: {accepted}"
        remedy = f"{larger}, or choose another parallelism.pp_schedule"
        yield Violation("training.global_batch_size", training.global_batch_size, reason, remedy)
    elif micro is not None and total not in works:
        sizes = nearest_numbers(micro, [share // count for count in works])
        remedies = [f"use training.micro_batch_size={listed(sizes)}"] if sizes else []
        if passes and not is_csv:
            near = listed(nearest_numbers(total, passes))
            remedies.append(f"use parallelism.pp_microbatches={near}, for several passes in a step")
        parts = f"{total} micro-batch{'es' * (total != 1)}"
        reason = f"it cuts a data rank's {share} sequences into {parts}, and {accepted}"
        yield Violation("training.micro_batch_size", micro, reason, ", or ".join(remedies) or larger)


def _stage_count(parallelism: ParallelismConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """The number of stages per rank fits the schedule."""
    count, ranks, name = layout.stage_count, parallelism.pp, parallelism.pp_schedule
    if is_file(name):
        required = len(pipeline_schedules.placement_of(read_schedule(name)))
        rule = f"{name} has {required} stages"
    elif SCHEDULES[name].fixed:
        required = ranks * SCHEDULES[name].stages_per_rank
        rule = f"{name} needs {required} stages on {ranks} ranks"
    else:
        required = None
        rule = f"{name} needs the same number of stages on each of {ranks} ranks"

    def accepts(stages: int) -> bool:
        return stages == required if required is not None else stages > 0 and stages % ranks == 0

    if accepts(count):
        return
    if parallelism.pp_layers is not None:
        field, value = "parallelism.pp_layers", list(parallelism.pp_layers)
        works = nearest_numbers(count, [number for number in range(1, 2 * count + 2 * ranks) if accepts(number)])
        remedy = f"give a list of {listed(works)} numbers"
    else:
        field, value = "parallelism.pp_layers_per_stage", parallelism.pp_layers_per_stage
        held = layout.layers + parallelism.pp_first_stage_less + parallelism.pp_last_stage_less
        sizes = nearest_numbers(value or 1, [size for size in range(1, held + 1) if accepts(-(-held // size))])
        remedy = f"use parallelism.pp_layers_per_stage={listed(sizes)}" if sizes else "leave it out"
    others = [] if is_file(name) else [other for other, schedule in SCHEDULES.items() if not schedule.fixed]
    if others and count % ranks == 0 and name not in others:
        remedy += f", or parallelism.pp_schedule={listed(others)}"
    yield Violation(field, value, f"{rule}, and this makes {count}", remedy)


def _stage_layers(parallelism: ParallelismConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """Layers add up, and only the first and the last stage (embedding, head) may have none."""
    counts, layers = layout.layer_counts, layout.layers
    first, last = parallelism.pp_first_stage_less, parallelism.pp_last_stage_less
    if parallelism.pp_layers is not None:
        if sum(counts) != layers:
            reason = f"these numbers add up to {sum(counts)} layers, and the model has {layers}"
            yield Violation("parallelism.pp_layers", counts, reason, f"give numbers that add up to {layers}")
        elif 0 in counts[1:-1]:
            reason = f"stage {counts.index(0, 1)} would have no layer, which only the first and the last stage may do"
            yield Violation("parallelism.pp_layers", counts, reason, "give every stage in between at least 1 layer")
    elif min(counts) >= 0 and 0 not in counts[1:-1] and (0 not in counts or first or last):
        return
    elif first or last:
        key = "pp_first_stage_less" if first else "pp_last_stage_less"
        reason = f"this leaves one of the {len(counts)} stages without any of the {layers} layers"
        remedy = f"use a smaller {key}, use fewer stages, or give the layers of each stage with parallelism.pp_layers"
        yield Violation(f"parallelism.{key}", getattr(parallelism, key), reason, remedy)
    else:
        per_rank = len(counts) // parallelism.pp
        reason = f"{parallelism.pp_schedule} cuts the model into {len(counts)} stages, and it has {layers} layers"
        more = ", or set parallelism.pp_layers, which may be 0 for the first and the last stage"
        more += "" if per_rank == 1 else ", or use parallelism.pp_schedule=1F1B, with one stage on each rank"
        pp, largest = parallelism.pp, layers // per_rank
        yield from check_number("parallelism.pp", pp, lambda one: one <= largest, reason, largest=largest, more=more)


def fits(parallelism: ParallelismConfig, total: int) -> bool:
    """True if a step of `total` micro-batches is a whole number of passes."""
    name = parallelism.pp_schedule
    return total % microbatches_of(read_schedule(name)) == 0 if is_file(name) else takes(parallelism, total)


def accepted_numbers(parallelism: ParallelismConfig) -> str:
    """Numbers of micro-batches that the schedule accepts, in words."""
    name, ranks = parallelism.pp_schedule, parallelism.pp
    if is_file(name):
        return f"{microbatches_of(read_schedule(name))} micro-batches in a pass"
    if SCHEDULES[name].in_rounds:
        return f"fewer than {2 * ranks} micro-batches, or a number n that n // {ranks} divides"
    return f"at least {SCHEDULES[name].fill * ranks} micro-batches"


def schedule_can_be_read(parallelism: ParallelismConfig) -> bool:
    """True if the schedule has a known name, or its file is a schedule."""
    return not any(schedule_is_known(parallelism))


def saved_outputs_last(
    parallelism: ParallelismConfig, activation_checkpoint: ActivationCheckpointConfig, compile: CompileConfig
) -> Iterator[Violation]:
    """Outputs that selective checkpointing saves are there for both parts of a backward pass: a graph-partitioning
    compiler has chosen them for both."""
    chosen = compile.compiles("blocks") and compile.backend in PARTITIONING_BACKENDS
    if activation_checkpoint.mode == "selective" and not chosen:
        reason = f"{parallelism.pp_schedule} goes backward through a block twice, and after the first time the saved "
        reason += "outputs of operators are gone"
        graphs = f"use {compiled_blocks(compile)}, whose graphs keep them"
        others = f"activation_checkpoint=full, every_n or none, or parallelism.pp_schedule={WHOLE_BACKWARD}"
        yield Violation("activation_checkpoint.mode", "selective", reason, f"{graphs}, or {others}")


PIPELINE_RULES = (
    *rules(schedule_is_known),
    *rules(keys_have_an_effect, when=lambda parallelism: parallelism.pp == 1),
    *rules(
        Refuse(
            "parallelism.pp",
            lambda model: model_spec(model) is None,
            "{model.architecture} is a plain class, without a spec that says how to cut it into stages",
            "use parallelism.pp=1 parallelism.dp_shard={parallelism.pp}, or model.architecture=llama",
        ),
        Refuse(
            "compile.backend",
            lambda compile: compile.enabled and compile.backend == "cudagraphs",
            "a pipeline holds the activations of several micro-batches, and a CUDA graph has room for one",
            "use compile.backend=inductor or aot_eager",
        ),
        stages_fit,
        when=lambda parallelism: parallelism.pp > 1,
    ),
    *rules(
        Refuse(
            "parallelism.reshard_after_forward",
            lambda parallelism: parallelism.reshard_after_forward not in ("auto", "never"),
            "{parallelism.pp_schedule} computes the gradients of weights later than those of inputs. Resharded "
            "parameters are gone by then, and the gradients would be wrong without an error",
            f"use parallelism.reshard_after_forward=auto or never, or parallelism.pp_schedule={WHOLE_BACKWARD}",
        ),
        saved_outputs_last,
        when=lambda parallelism, layout: (
            parallelism.pp > 1 and schedule_can_be_read(parallelism) and layout.splits_backward
        ),
    ),
)


SYMMETRIC_RANKS = SYMMETRIC_EXPERTS = 16
"""Ranks, and experts of a rank, that torch 2.13's exchange over NVSHMEM has warps for: 512 threads of a block."""
EP, ETP, TP = "parallelism.ep", "parallelism.etp", "parallelism.tp"


def degree_divides(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Expert-parallel ranks are taken from those of tp, cp and dp_shard, and each has as many experts."""
    ep, etp, ranks = parallelism.ep, _etp(parallelism), _ranks(parallelism)
    if not _regroups(ep, parallelism):
        needed = f"{ETP} · ep = {etp * ep}" if etp > 1 else f"{ep}"
        reason = f"experts are divided among the ranks of parallelism.dp_shard · cp · tp = {ranks}, and {needed} does "
        reason += "not divide that"
        step = ep * etp // math.gcd(ep * etp, parallelism.cp * parallelism.tp)
        shards = "" if _rest(spec, ep) else f", or use parallelism.dp_shard={-(-parallelism.dp_shard // step) * step}"
        yield from _refused(spec, parallelism, reason, shards)
    elif rest := _rest(spec, ep):
        yield from _refused(spec, parallelism, f"{ep} ranks cannot share {rest[0]} experts evenly")


def channels_are_whole_or_tensor_parallel(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Experts' channels are whole, or divided among all tensor-parallel ranks."""
    tp, etp = parallelism.tp, parallelism.etp
    if etp not in (1, tp):
        reason = f"either a rank holds whole experts ({ETP}=1) or the {tp} ranks of {TP} divide each of them"
        yield Violation(ETP, etp, reason, f"use {ETP}={listed(sorted({1, tp}))}, or {TP}={etp}")
        return
    for style in dict.fromkeys(linear.tp for linear in spec.expert_linears):
        if isinstance(style, Colwise) and not style.divides(etp):
            more = f", or use {style.key}={listed(multiples_near(style.units * style.width, style.width * etp))}"
            reason = f"{etp} ranks cannot share {style.described} evenly, in groups of {style.width}"
            yield Violation(ETP, etp, reason, f"nearest: {ETP}=1{more}")
    biased = [linear.outputs for linear in spec.expert_linears if linear.bias and linear.outputs % etp]
    if biased:
        reason = f"{etp} ranks cannot share the {biased[0]} outputs of the experts' biases evenly"
        yield Violation(ETP, etp, reason, f"use {ETP}=1")


def expert_shards_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """FSDP can shard the experts' weights evenly by a dim, if expert parallelism shards them too."""
    if uneven := _uneven(spec, parallelism, parallelism.ep):
        shards = _ranks(parallelism) // (parallelism.ep * _etp(parallelism))
        dims = f"their number nor the channels of {listed(uneven, 'and')}"
        reason = f"FSDP cuts the experts of a rank into {shards} shards, which divide neither {dims}"
        yield from _refused(spec, parallelism, reason, ", or choose another parallelism.dp_shard")


def tokens_of_experts_divide(
    spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig
) -> Iterator[Violation]:
    """Tensor-parallel ranks route as many tokens of each sequence, with or without sequence parallelism."""
    degree = math.lcm(parallelism.sequence_chunks, parallelism.cp * parallelism.tp)
    if not parallelism.sequence_parallel and training.seq_len % parallelism.sequence_chunks == 0:
        reason = f"each of the {parallelism.tp} ranks of parallelism.tp routes the same number of its tokens to experts"
        yield from check_multiple("training.seq_len", training.seq_len, degree, reason)


def symmetric_memory_is_supported(spec: ModelSpec, parallelism: ParallelismConfig, device: str) -> Iterator[Violation]:
    """Symmetric memory is that of GPUs, and its kernels have a thread or a warp for each rank and expert."""
    field, ep = "parallelism.token_exchange", parallelism.ep
    if parallelism.token_exchange == "all_to_all" or _rest(spec, ep):
        return
    local, remedy = max(linear.experts for linear in spec.expert_linears) // ep, ""
    if ep == 1:
        reason = "with parallelism.ep=1 the ranks exchange no tokens"
    elif device == "cpu":
        reason = "it needs symmetric memory, which a CPU lacks"
    elif parallelism.async_tp:
        reason = "parallelism.async_tp uses another kind of symmetric memory, and a run can have only one"
        remedy = "parallelism.async_tp=false, or "
    elif ep > SYMMETRIC_RANKS or local > SYMMETRIC_EXPERTS:
        most = f"{SYMMETRIC_RANKS} ranks with {SYMMETRIC_EXPERTS} experts each"
        reason = f"torch's kernel takes at most {most}, and {EP}={ep} gives each rank {local}"
    else:
        return
    yield Violation(field, parallelism.token_exchange, reason, f"use {remedy}{field}=all_to_all")


def _etp(parallelism: ParallelismConfig) -> int:
    """Degree of the experts' channels; 1 if refused."""
    return parallelism.etp if parallelism.etp == parallelism.tp else 1


def _ranks(parallelism: ParallelismConfig) -> int:
    """Ranks that experts are divided among."""
    return parallelism.dp_shard * parallelism.cp * parallelism.tp


def _regroups(ep: int, parallelism: ParallelismConfig) -> bool:
    """True if the degree divides these ranks."""
    return _ranks(parallelism) % (ep * _etp(parallelism)) == 0


def _rest(spec: ModelSpec, ep: int) -> list[int]:
    """Numbers of experts that the degree does not divide."""
    return [linear.experts for linear in spec.expert_linears if linear.experts % ep]


def _uneven(spec: ModelSpec, parallelism: ParallelismConfig, ep: int) -> list[str]:
    """Experts' linears of which no dim is divided evenly by FSDP; others than DTensors need not be."""
    etp = _etp(parallelism)
    if ep * etp == 1 or not _regroups(ep, parallelism) or _rest(spec, ep):
        return []
    shards, found = _ranks(parallelism) // (ep * etp), []
    for linear in spec.expert_linears:
        by_rows, experts = linear.divided == "outputs", linear.experts // ep
        outputs, inputs = linear.outputs // (etp if by_rows else 1), linear.inputs // (1 if by_rows else etp)
        # Shapes of a rank's part of a stacked weight and of its bias, before FSDP.
        shapes = [(experts, outputs, inputs), *([(experts, linear.outputs // etp)] if linear.bias else [])]
        if any(all(size % shards for size in sizes) for sizes in shapes):
            found.append(linear.name)
    return found


def _refused(spec: ModelSpec, parallelism: ParallelismConfig, reason: str, more: str = "") -> Iterator[Violation]:
    """Violation of the degree, with the nearest that work."""

    def works(ep: int) -> bool:
        return _regroups(ep, parallelism) and not _rest(spec, ep) and not _uneven(spec, parallelism, ep)

    largest, alone = _ranks(parallelism), f"use {ETP}=1"
    yield from check_number(EP, parallelism.ep, works, reason, largest=largest, more=more, otherwise=alone)


RULES = (
    *rules(
        Refuse(
            EP,
            lambda model, parallelism: (
                parallelism.ep > 1
                and not has_experts(model)
                # The spec itself may say why the model has none.
                and not any(one.key == EP for one in getattr(model_spec(model), "unsupported", ()))
            ),
            "{model.name} has no experts",
            "use parallelism.ep=1 parallelism.dp_shard={parallelism.ep}, or a model with experts",
        ),
        Refuse(
            ETP,
            lambda model, parallelism: parallelism.etp > 1 and not has_experts(model),
            "{model.name} has no experts",
            "use parallelism.etp=1 (parallelism.tp divides the channels of other feed-forward layers)",
        ),
    ),
    *rules(
        channels_are_whole_or_tensor_parallel,
        tokens_of_experts_divide,
        symmetric_memory_is_supported,
        when=lambda spec: spec is not None and spec.has_experts,
    ),
    *PIPELINE_RULES,
)
LAYOUT_RULES = (
    *rules(degree_divides, expert_shards_divide, when=lambda spec: spec is not None and spec.has_experts),
    *rules(microbatches_fit, when=lambda parallelism: parallelism.pp > 1),
)
