"""Output of `titan-exp plan` and `plan search`: tables and lines for a terminal, or JSON."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.errors.user_error import listed, shown
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.groups.training import steps_for as steps_of_ramp
from titan_exp.config.layout.axes import DEGREES
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.caching_allocator import STEPS
from titan_exp.plan.devices import Device, room_of, symmetric_memory
from titan_exp.plan.layout_search import LayoutCost, SearchResult, short_key
from titan_exp.plan.predict import EvaluationPlan, Plan, RankPlan
from titan_exp.plan.prediction import exchange_of
from titan_exp.plan.roofline import message_seconds
from titan_exp.plan.trace.memory_tracker import CATEGORIES
from titan_exp.plan.trace.torch_patches import uses_inductor
from titan_exp.quantization.recipes import MIN_CAPABILITY
from titan_exp.tracking.display import GIB, MIB, format_bytes, format_si

COMPILED = " We traced compiled regions with inductor's CPU code, and have not compared that with a GPU."
AT_MOST = " This is an upper bound, which counts attention's backward with its largest workspace."
OF_RUN = ("gpu_hours", "tokens", "checkpoint_bytes", "checkpoint_bytes_per_node", "host_bytes_per_node")
"""Values of a plan that its JSON repeats under the same names."""
_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "gathered parameters": "gathrd",
    "communication": "messg",
}


def print_plan(plan: Plan, console: Console | None = None, *, kernels: bool = False) -> None:
    """Print a plan on a terminal; with `kernels`, also the step of the largest rank by class of kernels."""
    console = console or Terminal()
    training, layout = plan.experiment.training, plan.layout
    devices = f"{plan.exchange.title}{layout.world_size} x {plan.device.name if plan.device else 'CPU process'}"
    micro_batch = f"{layout.micro_batch_size} x {training.seq_len} tokens per micro-batch"
    step = f"{micro_batch}, {layout.gradient_accumulation} per step"
    print_lines(console, [f"{plan.experiment.model.name} on {devices}: {step}"])
    if training.batch_ramp:
        batch = f"training.global_batch_size={training.global_batch_size}, the largest batch of the ramp"
        print_lines(console, [f"Memory and time are those of a step with {batch}."])
    print_unwrapped(console, _memory(plan))
    print_lines(console, _memory_lines(plan))
    print_unwrapped(console, _messages(plan))
    if kernels:
        print_unwrapped(console, _kernels(plan))
    print_lines(console, [*_emulated(plan), *_speed(plan), *filter(None, [plan.prediction.without_unknown])])
    full = f", every layer traced, because {plan.why_full}" if plan.why_full else ""
    console.print(f"planned in {plan.planning_seconds:.1f} s{full}", style="dim", highlight=False, soft_wrap=True)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are: unwrapped, and without colours for numbers."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def print_unwrapped(console: Console, table: Table) -> None:
    """Print a table without truncating cells, even if it is wider than the terminal."""
    unlimited = console.options.update(width=10_000)
    console.width = max(console.width, Measurement.get(console, unlimited, table).maximum)
    console.print(table)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plan as JSON values in bytes, seconds and FLOPs."""
    return {
        "device": plan.device and asdict(plan.device),
        "world_size": plan.layout.world_size,
        **plan.exchange.values(plan.weights),
        "ranks": [_rank_json(rank) for rank in plan.ranks],
        "at_most": plan.at_most,
        **{name: value for name, value in vars(plan.prediction).items() if name not in ("ranks", "pass_seconds")},
        **{name: getattr(plan, name) for name in OF_RUN},
        "worst_load_bytes": plan.worst_bytes,
        "evaluations": {
            "number": plan.evaluation_times if plan.evaluations else None,
            "seconds": plan.evaluation_seconds,
            "kinds": [_evaluation_json(one) for one in plan.evaluations],
        },
        "planning_seconds": plan.planning_seconds,
        "traced_in_full_because": plan.why_full or None,
        "no_time_because": plan.why_no_time or None,
    }


def _evaluation_json(one: EvaluationPlan) -> dict[str, Any]:
    unknown = isinstance(one.passes, str)
    return {
        "name": one.kind.name,
        "peak_allocated_bytes": one.bytes,
        "peak_during": one.where,
        "passes": None if unknown else one.passes,
        "passes_unknown_because": one.passes if unknown else None,
        "pass_seconds": one.pass_seconds,
        "seconds": one.seconds,
    }


def _rank_json(rank: RankPlan) -> dict[str, Any]:
    trace = rank.trace
    return {
        "pipeline_rank": rank.pipeline_rank,
        "peak_allocated_bytes": trace.peak.bytes,
        "peak_by_category": trace.peak.by_category,
        "peak_during": trace.peak.where,
        "peak_reserved_bytes": rank.allocator and rank.bytes,
        "allocator": rank.allocator and asdict(rank.allocator),
        "expandable_segments": rank.expandable,
        "allocator_bytes": rank.bytes - trace.peak.bytes,
        "gradient_bytes": trace.gradients,
        "sent_bytes": rank.sent,
        "saved_bytes": rank.saved,
        "allocation_retries": rank.prediction.retries,
        "saved_calls": list(trace.saved_calls),
        "host": trace.host
        and {
            "peak_bytes": trace.host.peak.bytes,
            "peak_by_category": trace.host.peak.by_category,
            "update_bytes_moved": trace.costs.host_bytes,
        },
        "flops": trace.costs.flops,
        "operators": trace.costs.operators,
        "messages": sorted(rank.messages, key=itemgetter("axis", "kind")),
        "kernels": [asdict(part) for part in rank.kernels],
        "seconds": rank.time and asdict(rank.time),
    }


def _memory(plan: Plan) -> Table:
    unit, word = (GIB, "GiB") if plan.largest.bytes >= GIB else (MIB, "MiB")
    peaks = [rank.trace.peak for rank in plan.ranks]
    sizes = {_SHORT.get(name, name): [peak.by_category[name] for peak in peaks] for name in CATEGORIES}
    sizes = {name: of_ranks for name, of_ranks in sizes.items() if any(of_ranks)}
    sizes["in all"] = [peak.bytes for peak in peaks]
    if plan.largest.allocator is not None:
        sizes["reserved"] = [rank.bytes for rank in plan.ranks]
    columns = ([f"{size / unit:.2f}" for size in of_ranks] for of_ranks in sizes.values())
    numbers, phases = (rank.pipeline_rank for rank in plan.ranks), (peak.where for peak in peaks)
    rows = zip(numbers, *columns, phases, strict=True)
    return table_of(("pp", *sizes, "during"), rows, {"pp", "during"}, f"Peak memory, {word}")


def _memory_lines(plan: Plan) -> Iterator[str]:
    yield _fit_sentence(plan)
    if not plan.is_whole:
        some, last = listed([rank.pipeline_rank for rank in plan.ranks], "and"), plan.layout.parallelism.pp - 1
        yield f"This plan has only pipeline rank {some} of 0 to {last}. It says nothing about the others."
    if plan.largest.sent and plan.layout.device_type == "cuda":
        passes = plan.layout.gradient_accumulation // plan.layout.pipeline_microbatches
        yield (
            f"Up to {format_bytes(plan.largest.sent / passes)} of it are sent activations. We count each until its "
            "pass ends. A GPU that keeps up with its host frees them earlier."
        )
    yield from (*_experts(plan), *_on_host(plan), *_evaluations(plan))
    yield from dict.fromkeys(f"{line[0].upper()}{line[1:]}." for rank in plan.ranks for line in rank.trace.saved_calls)


def _fit_sentence(plan: Plan) -> str:
    if plan.device is None or plan.layout.device_type == "cpu":
        return "Sizes count the tensors alone, on a CPU."
    largest, room = plan.largest, plan.device.memory
    tensors, allocator = largest.trace.peak.bytes, largest.allocator
    spec = model_spec(plan.experiment.model)
    overhead = room - room_of(plan.layout, spec, plan.device)
    needs = f"{_gib(tensors)} GiB of tensors"
    if allocator is not None and tensors <= room:
        way, key = ("expandable", "false") if largest.expandable else ("fixed", "true")
        other = f" ({_gib(largest.other_segments)} with cluster.expandable_segments={key})"
        other = " and in the pool of a CUDA graph" if plan.experiment.compile.cuda_graphs else other
        needs += f", for which torch's allocator reserves {_gib(largest.bytes)} in {way} segments{other}"
    unknown = "" if plan.device.matmul_workspace else ", and workspaces of its matmul library that we do not know"
    others = "NCCL's and symmetric buffers" if symmetric_memory(plan.layout, spec) else "NCCL's buffers"
    needs += f". CUDA's context and code and {others} take {_gib(overhead)}{unknown}"
    what = "tensors" if allocator is None else "reserved"
    needs += f". {_gib(largest.bytes)} {what} + {_gib(overhead)} process = {_gib(largest.bytes + overhead)} GiB"
    is_over = largest.bytes + overhead > room
    verdict = plan.verdict(fits=not is_over)
    verdict = f"{verdict[0].upper()}{verdict[1:]}"
    notes = f"{COMPILED if uses_inductor(plan.experiment.compile) else ''}{AT_MOST if plan.at_most else ''}"
    if is_over:
        return f"{verdict}, because the device has {_gib(room)} GiB: {needs}.{notes}"
    left = f"with {_gib(room - largest.bytes - overhead)} of the device's {_gib(room)} GiB left"
    if allocator is None or not allocator.retries:
        return f"{verdict}, {left}: {needs}.{notes}"
    return (
        f"{verdict} with the allocator under pressure: in {STEPS} steps it finds the device full {allocator.retries} "
        f"times, gives cached memory back, and waits for the GPU each time, which the step time does not count. It "
        f"ends {left}: {needs}.{notes}"
    )


def _evaluations(plan: Plan) -> Iterator[str]:
    """Lines about evaluations: their largest peak, and the time of each kind."""
    if not plan.evaluations:
        return
    largest = max(plan.evaluations, key=lambda one: one.bytes)
    exceeds = any(
        rank.trace.peak.where.startswith(f"{one.kind.name}, ") for rank in plan.ranks for one in plan.evaluations
    )
    beside = "more than a training step" if exceeds else "no more than a training step"
    yield f"Evaluations need up to {format_bytes(largest.bytes)} ({largest.kind.name}, {largest.where}), {beside}."
    if plan.evaluation_seconds is None:
        return
    parts = []
    for one in plan.evaluations:
        passes, each = one.passes, f"{one.kind.name} "
        unknown = f"passes of {one.pass_seconds:.2g} s, of unknown number, because {passes}"
        parts.append(each + (unknown if isinstance(passes, str) else f"{passes:,} x {one.pass_seconds:.2g} s"))
    share = plan.evaluation_seconds / 3600 * plan.layout.devices / (plan.gpu_hours or 1.0)
    whole = f"{plan.evaluation_seconds:.3g} s in all, {share:.1%} of the run" if share else "their time is unknown"
    yield f"{plan.evaluation_times:,} evaluations: {'; '.join(parts)}. {whole[0].upper()}{whole[1:]}."


def _experts(plan: Plan) -> Iterator[str]:
    spec, layout = model_spec(plan.experiment.model), plan.layout
    experts = None if spec is None else next(iter(spec.expert_linears), None)
    if experts is None:
        return
    tokens = layout.micro_batch_size * layout.training.seq_len / layout.parallelism.cp
    # A rank routes its own tokens. Ranks that share experts' channels compute each other's tokens, too.
    tokens *= layout.parallelism.ep * layout.parallelism.etp / layout.parallelism.tp
    rows = tokens * experts.active_experts / experts.experts
    yield f"We assume uniform routing, {rows:,.0f} rows per expert and micro-batch."
    if plan.worst_bytes is not None:
        yield (
            f"A rank whose experts got {plan.experiment.plan.worst_expert_load:g} times the mean "
            f"(plan.worst_expert_load) would need {format_bytes(plan.worst_bytes)}."
        )


def _on_host(plan: Plan) -> Iterator[str]:
    trace, node = plan.largest.trace, plan.host_bytes_per_node
    if (host := trace.host) is None:
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in host.peak.by_category.items() if size >= MIB)
    tensors = f"{format_bytes(host.peak.bytes)} of tensors{f' ({parts})' if parts else ''}"
    together = "" if node is None else f", {format_bytes(node)} for the ranks of a node"
    given = plan.experiment.cluster.memory_gb or 0
    is_over = node is not None and given and node > given * GIB
    held = "is less than that" if is_over else "must hold the processes as well"
    room = f". cluster.memory_gb={given} {held}" if given else ""
    yield f"On the host: {tensors}{together}{room}. The host pins parameters and gradients, in blocks of powers of two."
    if plan.step_seconds is not None:
        reading = format_si(trace.costs.host_bytes, "B")
        yield (
            f"The host clips and updates, and reads {reading} for each rank while the GPU waits. The estimates below "
            "leave that out, because we do not know the host's speed."
        )


def _messages(plan: Plan) -> Table:
    headings, rows = ["axis", "message", "ranks", "nodes", "calls", "MiB"], list[list[object]]()
    headings += [] if plan.device is None else ["ms"]
    for message in sorted(plan.largest.messages, key=itemgetter("bytes"), reverse=True):
        axis, kind, size, calls = message.values()
        ranks, node = plan.largest.trace.axes.get(axis, []), plan.layout.node_size
        nodes = len({rank // node for rank in ranks})
        rows.append([axis, kind, len(ranks) or "", nodes or "", calls, f"{size / MIB:,.2f}"])
        if plan.device is not None:
            seconds = message_seconds(kind, size, ranks, plan.device, node, calls=calls)
            rows[-1].append(f"{seconds * 1e3:,.2f}" if ranks else "")
    return table_of(headings, rows, {"axis", "message"}, f"Messages{_of_largest(plan)} in a step")


def _kernels(plan: Plan) -> Table:
    rows = []
    for part in plan.largest.kernels:
        amounts = (f"{amount:,.2f}" if amount else "" for amount in (part.flops / 1e12, part.bytes / 1e9))
        rows.append((part.name, part.launches, *amounts, "?" if part.seconds is None else f"{part.seconds * 1e3:,.2f}"))
    return table_of(
        ("class", "launches", "TFLOP", "GB", "ms"), rows, {"class"}, f"Kernels{_of_largest(plan)} in a step"
    )


def table_of(
    headings: Iterable[str], rows: Iterable[Iterable[object]], words: Collection[str], title: str | None = None
) -> Table:
    """Table of rows; columns of `words` are left-aligned, columns of numbers right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", no_wrap=heading not in words)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _of_largest(plan: Plan) -> str:
    return f" of pipeline rank {plan.largest.pipeline_rank}" if len(plan.ranks) > 1 else ""


def _emulated(plan: Plan) -> Iterator[str]:
    config, device = plan.experiment.quantization, plan.device
    if plan.layout.device_type == "cpu" or config.recipe == "none" or device is None:
        return
    major, minor = least = MIN_CAPABILITY[config.recipe]
    if device.capability is None or device.capability < least:
        needed = f"its instructions need CUDA capability {major}.{minor}"
        yield f"A run emulates {config.recipe} on {device.name}, because {needed}. So does this plan."


def _speed(plan: Plan) -> Iterator[str]:
    flops = sum(rank.trace.costs.flops for rank in plan.ranks) / len(plan.ranks)
    yield f"{format_si(flops, 'FLOP')} per rank and step"
    seconds = plan.checkpoint_bytes_per_node / 1e9
    yield f"checkpoint: {format_si(plan.checkpoint_bytes, 'B')}, {seconds:.2g} s at 1 GB/s per node"
    yield from plan.exchange.lines(plan.weights)
    times = [rank.time for rank in plan.ranks if rank.time is not None]
    if not times or plan.step_seconds is None:
        yield f"no time: {plan.why_no_time}."
        return
    slowest = max(times, key=lambda time: time.total)
    operators = f"launches beyond these {slowest.operators:.3g}, " if slowest.operators else ""
    exchange = f", {plan.exchange.seconds_name} {slowest.exchange:.3g}" if slowest.exchange else ""
    computed = f"matmuls {slowest.matmuls:.3g}, elementwise {slowest.elementwise:.3g}, {operators}"
    sent = f"communication {slowest.exposed:.3g} exposed and {slowest.behind:.3g} overlapped{exchange}"
    yield f"{plan.step_seconds:.3g} s per step, estimated: {computed}{sent}; bubble {plan.bubble:.0%}"
    hours = plan.gpu_hours or 0.0
    shown = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    mfu, unit = ("", "device-hours") if plan.mfu is None else (f", MFU {plan.mfu:.0%} of the bf16 peak", "GPU-hours")
    run = f"{plan.experiment.training.last_step} steps: {plan.tokens:,} tokens, {shown} {unit}"
    yield f"{plan.tokens_per_second:,.0f} tokens/s per device{mfu}; {run}"
    if plan.mfu is not None:
        yield "How close such numbers came to measured ones: titan-exp help planner-accuracy"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def print_search(result: SearchResult, device: Device, commands: Sequence[str], tokens: int | None) -> None:
    """Print a search result with the command of each row, and GPU-hours if the run's number of tokens is known."""
    console, first = Terminal(), result.rows[0].candidate
    training = first.experiment.training
    devices = f"{exchange_of(first.experiment).title}{first.layout.world_size} x {device.name}"
    step = f"{training.global_batch_size} sequences of {training.seq_len} tokens per step"
    print_lines(console, [f"{first.experiment.model.name} on {devices}: {step}"])
    print_unwrapped(console, _table(result, tokens))
    print_lines(console, [*_left_out(result), "\nTo launch them:"])
    print_lines(console, (f"{number:>3}  {command}" for number, command in enumerate(commands, 1)))
    took = f"\n{result.planned} layouts planned in {result.seconds:.0f} s"
    console.print(took, style="dim", highlight=False)


def search_json(result: SearchResult, commands: Sequence[str], tokens: int | None) -> dict[str, Any]:
    """Search result as JSON values in bytes and seconds."""
    return {
        "layouts": [
            {
                "tokens_per_second_per_device": row.tokens_per_second,
                "step_seconds": row.step_seconds,
                "bubble": row.bubble,
                "peak_allocated_bytes": row.peak_bytes,
                "peak_reserved_bytes": row.reserved,
                "allocation_retries": row.retries,
                "peak_pipeline_rank": row.peak_rank,
                "peak_during": row.peak_where,
                "on_front": front,
                "gpu_hours": None if tokens is None else gpu_hours(row, tokens),
                "days": None if tokens is None else days(row, tokens),
                "command": command,
            }
            for row, front, command in zip(result.rows, result.front, commands, strict=True)
        ],
        "tried": result.tried,
        "left_out": {
            "by_rules": {example.field: count for count, example in result.left_out},
            "not_known": dict(result.unknown),
            "estimated_not_to_fit": result.floor,
            "does_not_fit": result.too_large,
            "estimated_slower_than_the_last": result.slower,
        },
        "stopped": result.stopped,
        "planned": result.planned,
        "seconds": result.seconds,
    }


def gpu_hours(row: LayoutCost, tokens: int) -> float:
    """GPU-hours of a run of `tokens` tokens."""
    return tokens / row.tokens_per_second / 3600


def days(row: LayoutCost, tokens: int) -> float:
    """Days of a run of `tokens` tokens."""
    return gpu_hours(row, tokens) / row.candidate.layout.devices / 24


def steps_for(training: TrainingConfig, tokens: int) -> int:
    """Optimizer steps of a run of `tokens` tokens."""
    return steps_of_ramp(training.batch_ramp, training.global_batch_size, math.ceil(tokens / training.seq_len))


def _table(result: SearchResult, tokens: int | None) -> Table:
    rows, layouts = result.rows, [row.candidate for row in result.rows]
    degrees = [*DEGREES, *(["ep", "etp"] if layouts[0].spec and layouts[0].spec.has_experts else [])]
    columns: list[tuple[str, Iterable[object]]] = [
        ("", range(1, len(rows) + 1)),
        ("tokens/s/GPU", (f"{row.tokens_per_second:,.0f}" for row in rows)),
        ("GiB", (f"{row.reserved / GIB:.1f}{'~' if row.retries else ''}" for row in rows)),
        ("", ("*" if front else "" for front in result.front)),
        *((key.removeprefix("dp_"), [getattr(each.parallelism, key) for each in layouts]) for key in degrees),
        ("schedule", (each.parallelism.pp_schedule if each.parallelism.pp > 1 else "" for each in layouts)),
        ("micro", (f"{each.layout.gradient_accumulation} x {each.layout.micro_batch_size}" for each in layouts)),
        ("recompute", (each.mode for each in layouts)),
        ("more", (" ".join(f"{short_key(key)}={shown(value)}" for key, value in each.refined) for each in layouts)),
        ("bubble", (f"{row.bubble:.0%}" for row in rows)),
    ]
    if tokens:
        columns.append(("GPU-hours", (f"{gpu_hours(row, tokens):,.0f}" for row in rows)))
        columns.append(("days", (f"{days(row, tokens):,.1f}" for row in rows)))
    headings, cells = zip(*columns, strict=True)
    return table_of(headings, zip(*cells, strict=True), {"", "schedule", "recompute", "more"})


def _left_out(result: SearchResult) -> list[str]:
    broken, rooms = sum(count for count, _ in result.left_out), sorted({f"{row.room / GIB:.1f}" for row in result.rows})
    room = " to ".join(dict.fromkeys((rooms[0], rooms[-1])))
    slower = "their compute alone takes as long as the first row's step"
    if result.stopped:
        slower = "the search was stopped. Some may be faster"
    roomy = next((place for place, row in enumerate(result.rows, 1) if not row.retries), None)
    other = "No row has room" if roomy is None else f"Row {roomy} is the fastest with room"
    more = f" {other}." if result.rows[0].retries else ""
    pressure = []
    if any(row.retries for row in result.rows):
        pressure = [f"~ the allocator is under pressure and waits for the GPU, which the speeds do not count.{more}"]
    counts = (
        (result.floor, "not planned, because an estimate says that they do not fit."),
        (result.too_large, f"of {result.planned:,} planned ones do not fit."),
        (result.slower, f"not planned, because {slower}."),
    )
    return [
        "* on the Pareto front: no faster layout needs less memory. Times are estimates. GiB is what torch's allocator "
        f"reserves, and {room} GiB of the device are left for it beside CUDA's context and NCCL's buffers.",
        *pressure,
        f"{broken:,} of {result.tried:,} tried layouts break a rule" + (":" if broken else "."),
        *(f"    {count:>6,}  {example.field}, for example: {example.reason}" for count, example in result.left_out[:4]),
        *(
            f"  {count:,} not planned, because {reason}. Try titan-exp plan with one of them."
            for reason, count in result.unknown
        ),
        *(f"  {count:,} {text}" for count, text in counts if count),
    ]
