"""Resolved layout of a run (processes, batch, pipeline stages, P2P shapes), derived once from the experiment."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from titan_exp.config.devices import device_type, has_triton, node_size
from titan_exp.config.errors.user_error import UserError, Violation, divisors, listed, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout import pipeline_schedules
from titan_exp.config.layout.axes import world_size
from titan_exp.config.layout.pipeline_schedules import SCHEDULES, is_file, microbatches_of, placement_of, read_schedule
from titan_exp.config.schema.foreign_code import import_paths

SMALLEST_GEMM = 4096
"""Minimum input and output dims for which float8 is faster despite its casts (measured on an H200)."""

LOSS_CHUNK_TOKENS = 16384
"""Tokens per chunk of logits on CUDA. One chunk moves no byte more than whole logits. Each further one reads and writes
the head's gradient in fp32, 2 x vocab x dim x 4 bytes beside 6 x tokens x vocab x dim FLOPs: 212 / tokens of the head's
time on an H200, 1.3 % here. Fewer tokens than `dim` less would save no memory, since that sum is twice the gradient."""

MICROBATCHES_PER_RANK = 4
"""Default micro-batches per pipeline rank."""


@dataclass(frozen=True)
class ResolvedLayout:
    """Layout of a run with known degrees. Properties of stages and micro-batches are valid if no rule is violated."""

    parallelism: ParallelismConfig
    """Degrees and pipeline options; `dp_shard` is resolved."""
    training: TrainingConfig
    """Global batch size, micro-batch size, sequence length."""
    cluster: ClusterConfig
    """Devices and nodes."""
    layers: int
    """Transformer blocks of the whole model."""
    width: int
    """Width of the residual stream."""

    @staticmethod
    def of(experiment: Experiment) -> "ResolvedLayout":
        """Layout of an experiment resolved by `resolve_layout`."""
        assert experiment.parallelism.dp_shard > 0, "the layout is not resolved"
        model, groups = experiment.model, (experiment.parallelism, experiment.training, experiment.cluster)
        return ResolvedLayout(*groups, layers=model.layers, width=model.dim)

    @cached_property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Device type of the ranks."""
        return device_type(self.cluster)

    @cached_property
    def world_size(self) -> int:
        """Number of processes."""
        return world_size(self.parallelism)

    @property
    def devices(self) -> int:
        """Number of processes of all worlds, each on its device."""
        return self.world_size * self.cluster.worlds

    @cached_property
    def node_size(self) -> int:
        """Processes on a full node."""
        return node_size(self.cluster, self.world_size)

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.world_size // self.node_size)

    @cached_property
    def dp_degree(self) -> int:
        """Data-parallel degree: number of shares of the global batch."""
        return self.parallelism.dp_replicate * self.parallelism.dp_shard

    @cached_property
    def sequences_per_dp_rank(self) -> int:
        """Sequences of a data-parallel rank in one optimizer step; with a batch ramp, in one after it."""
        return self.training.global_batch_size // self.dp_degree

    @cached_property
    def common_share(self) -> int:
        """Largest number of sequences that divides a data-parallel rank's share of every batch of a ramp."""
        return math.gcd(*self.training.batch_sizes) // self.dp_degree

    @cached_property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass of a data-parallel rank."""
        if self.training.micro_batch_size:
            return self.training.micro_batch_size
        share, unit = self.common_share, self.parallelism.pp_microbatches or 1
        if self.parallelism.pp > 1 and (self.parallelism.pp_microbatches is None or share % unit):
            return share // self._default_microbatches(share)
        # Every world computes at least one micro-batch, or one pass of a pipeline.
        units = next((number for number in divisors(share // unit) if number >= self.cluster.worlds), 1)
        return share // (units * unit)

    @cached_property
    def gradient_accumulation(self) -> int:
        """Micro-batches of a data-parallel rank in one optimizer step; with a batch ramp, in one after it."""
        return self._microbatches(self.training.global_batch_size)

    def gradient_accumulation_at(self, step: int) -> int:
        """Micro-batches of a data-parallel rank in an optimizer step, counted from 1."""
        return self._microbatches(self.training.batch_size_at(step))

    @cached_property
    def pipeline_microbatches(self) -> int:
        """Micro-batches in one pass through the pipeline."""
        if is_file(self.parallelism.pp_schedule):
            return microbatches_of(read_schedule(self.parallelism.pp_schedule))
        return self.parallelism.pp_microbatches or self.gradient_accumulation

    @property
    def indivisible_microbatches(self) -> int:
        """Micro-batches that one world computes: a pass through a pipeline, else 1."""
        return self.pipeline_microbatches if self.parallelism.pp > 1 else 1

    @cached_property
    def pass_sizes(self) -> tuple[int, ...]:
        """Distinct numbers of micro-batches in a pass: with a batch ramp, a step is one pass unless the number is
        given."""
        if is_file(self.parallelism.pp_schedule) or self.parallelism.pp_microbatches:
            return (self.pipeline_microbatches,)
        return tuple(sorted({self._microbatches(size) for size in self.training.batch_sizes}))

    @cached_property
    def stage_count(self) -> int:
        """Number of pipeline stages of the whole model; by default the schedule's."""
        parallelism = self.parallelism
        if parallelism.pp_layers is not None:
            return len(parallelism.pp_layers)
        if parallelism.pp_layers_per_stage is not None:
            held = self.layers + parallelism.pp_first_stage_less + parallelism.pp_last_stage_less
            return -(-held // parallelism.pp_layers_per_stage)
        if is_file(parallelism.pp_schedule):
            return len(placement_of(read_schedule(parallelism.pp_schedule)))
        return parallelism.pp * SCHEDULES[parallelism.pp_schedule].stages_per_rank

    @cached_property
    def layer_counts(self) -> list[int]:
        """Number of layers of each stage; a rule rejects negative numbers."""
        if self.parallelism.pp_layers is not None:
            return list(self.parallelism.pp_layers)
        first, last = self.parallelism.pp_first_stage_less, self.parallelism.pp_last_stage_less
        # Divide as if the first and the last stage had their missing layers.
        share, rest = divmod(self.layers + first + last, self.stage_count)
        counts = [share] * self.stage_count
        for stage in [*range(1, self.stage_count - 1), 0, self.stage_count - 1][:rest]:
            counts[stage] += 1
        counts[0] -= first
        counts[-1] -= last
        return counts

    @cached_property
    def stage_layers(self) -> list[list[int]]:
        """Layer numbers of each stage."""
        counts = self.layer_counts
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]

    @cached_property
    def stage_placement(self) -> list[int]:
        """Pipeline rank of each stage."""
        if is_file(self.parallelism.pp_schedule):
            return [rank for _, rank in sorted(placement_of(read_schedule(self.parallelism.pp_schedule)).items())]
        traits = SCHEDULES[self.parallelism.pp_schedule]
        return pipeline_schedules.placement(traits, self.parallelism.pp, self.stage_count)

    @cached_property
    def splits_backward(self) -> bool:
        """True if the schedule computes weight gradients after input gradients; False without a pipeline."""
        if self.parallelism.pp == 1:
            return False
        if is_file(self.parallelism.pp_schedule):
            return pipeline_schedules.splits_backward(read_schedule(self.parallelism.pp_schedule))
        return SCHEDULES[self.parallelism.pp_schedule].splits_backward

    @cached_property
    def reshard_policy(self) -> Literal["always", "never", "all_but_last"]:
        """FSDP's reshard-after-forward policy, with `auto` resolved."""
        if self.parallelism.reshard_after_forward != "auto":
            return self.parallelism.reshard_after_forward
        return "never" if self.parallelism.pp > 1 else "all_but_last"

    @cached_property
    def loss_chunk_tokens(self) -> int | None:
        """Tokens per chunk of logits, with `auto` resolved for models and objectives that compute a loss in chunks."""
        chunk = self.training.loss_chunk_tokens
        return _automatic_chunk(self.training, self.parallelism, self.cluster) if chunk == "auto" else chunk

    @cached_property
    def tokens_per_rank(self) -> int:
        """Tokens of a sequence in a rank's hidden states between blocks."""
        divided_by_tp = self.parallelism.tp if self.parallelism.sequence_parallel else 1
        return self.training.seq_len // self.parallelism.cp // divided_by_tp

    @cached_property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Shape of hidden states sent between pipeline stages: [micro-batch, tokens, width]."""
        return self.micro_batch_size, self.tokens_per_rank, self.width

    def _microbatches(self, batch_size: int) -> int:
        sequences = self.dp_degree * self.micro_batch_size
        assert batch_size % sequences == 0, "checked by the rules"
        return batch_size // sequences

    def _default_microbatches(self, share: int) -> int:
        """Minimum number of micro-batches of `share` that is valid for every batch of a ramp, with at least
        `MICROBATCHES_PER_RANK` per pipeline rank, else the maximum."""
        shares = [size // self.dp_degree for size in self.training.batch_sizes]

        def works_for_all(number: int) -> bool:
            return all(pipeline_schedules.takes(self.parallelism, number * batch // share) for batch in shares)

        works = [*filter(works_for_all, divisors(share))]
        enough = [number for number in works if number >= MICROBATCHES_PER_RANK * self.parallelism.pp]
        return (enough or works[-1:] or [1])[0]


def share_of_world(experiment: Experiment) -> Experiment:
    """The run as one of its worlds trains it: with the largest share of a step that one has while all are alive."""
    worlds = experiment.cluster.worlds
    if worlds == 1:
        return experiment
    layout = ResolvedLayout.of(experiment)
    unit = layout.indivisible_microbatches
    own = -(-layout.gradient_accumulation // (unit * worlds)) * unit
    micro = layout.micro_batch_size
    sizes: dict[str, Any] = {"global_batch_size": own * micro * layout.dp_degree, "micro_batch_size": micro}
    return replace(experiment, training=replace(experiment.training, **sizes, batch_ramp=[]))


def head_is_fp32(training: TrainingConfig) -> bool:
    """True if the LM head is one of `training.fp32_modules`."""
    return any(fnmatchcase("head", pattern) for pattern in training.fp32_modules)


def resolve_layout(experiment: Experiment, offered: int) -> Experiment:
    """Resolve `parallelism.dp_shard=-1` to the quotient of offered devices and the other degrees, and options as in
    `resolve_kernels`. If the other degrees exceed the offered devices, `dp_shard` becomes 1: on CPU, degrees are
    numbers of processes. Raises UserError if the other degrees do not divide the offered devices."""
    experiment = resolve_kernels(experiment)
    parallelism = experiment.parallelism
    if parallelism.dp_shard != -1:
        return experiment
    others = world_size(replace(parallelism, dp_shard=1))
    if offered > others and offered % others:
        reason = f"the product of the other degrees is {others}, which does not divide the {offered} devices there are"
        remedy = f"choose degrees whose product is {listed(divisors(offered))}, or give parallelism.dp_shard a number"
        violation = Violation("parallelism.dp_shard", -1, reason, remedy)
        raise UserError("The layout does not fit the devices.", [violation])
    return replace(experiment, parallelism=replace(parallelism, dp_shard=max(1, offered // others)))


def resolve_kernels(experiment: Experiment) -> Experiment:
    """Resolve `quantization.smallest_gemm=null` to a number, `optimizer.implementation=auto` to a kernel,
    `compile.enabled=auto` to true or false, and `training.loss_chunk_tokens=auto` to null where the layout takes whole
    logits. Elsewhere it stays: model and objective have a say when they are built."""
    quantization = experiment.quantization
    if quantization.smallest_gemm is None:
        emulated = quantization.emulate is True or device_type(experiment.cluster) == "cpu"
        smallest = 0 if emulated or quantization.recipe == "none" else SMALLEST_GEMM
        experiment = replace(experiment, quantization=replace(quantization, smallest_gemm=smallest))
    return _resolve_compile(_resolve_loss_chunk(_resolve_adamw(experiment)))


def with_automatic_kernels(experiment: Experiment) -> Experiment:
    """Run whose kernels are chosen automatically, if that chooses the ones of this run; else the run itself."""
    chunks = replace(experiment, training=replace(experiment.training, loss_chunk_tokens="auto"))
    if _resolve_loss_chunk(chunks) == experiment:
        experiment = chunks
    compiled = replace(experiment, compile=replace(experiment.compile, enabled="auto"))
    if _resolve_compile(compiled) == experiment:
        experiment = compiled
    if not isinstance(experiment.optimizer, AdamWConfig):
        return experiment
    automatic = replace(experiment, optimizer=replace(experiment.optimizer, implementation="auto"))
    return automatic if _resolve_adamw(automatic) == experiment else experiment


def why_eager(experiment: Experiment) -> str | None:
    """Reason for which `compile.enabled=auto` compiles nothing; None if it compiles."""
    if device_type(experiment.cluster) == "cpu":
        return "this run trains on the CPU"
    if not has_triton():
        return "the compiler writes its kernels for Triton, which is not installed"
    if not experiment.compile.components:
        return "compile.components names no part"
    if "blocks" not in experiment.compile.components:
        return None
    if import_paths(experiment, ["model.architecture"]) or not experiment.model.has_own_blocks:
        return f"model.architecture={experiment.model.architecture} has code of its own (compile=blocks tries it)"
    inside = [pattern for pattern in experiment.training.fp32_modules if cuts_blocks(pattern)]
    return f"training.fp32_modules={shown(inside)} names modules inside blocks" if inside else None


def compilation(experiment: Experiment) -> Iterator[str]:
    """Sentence about what `compile.enabled=auto` becomes on a GPU; none on a CPU, or about another value."""
    if experiment.compile.enabled != "auto" or device_type(experiment.cluster) == "cpu":
        return
    reason = why_eager(experiment)
    if reason is None:
        parts = listed(experiment.compile.components, "and")
        yield f"compile=auto compiles {parts}, since this run is on a GPU (compile=none runs eagerly, for debugging)"
    else:
        yield f"compile=auto runs eagerly: {reason}"


def cuts_blocks(pattern: str) -> bool:
    """True if a pattern of `training.fp32_modules` names modules inside blocks, each of which is one compiled graph."""
    return fnmatchcase("blocks.0.part", pattern) or pattern.count(".") > 1


def _resolve_compile(experiment: Experiment) -> Experiment:
    if experiment.compile.enabled != "auto":
        return experiment
    return replace(experiment, compile=replace(experiment.compile, enabled=why_eager(experiment) is None))


def _resolve_adamw(experiment: Experiment) -> Experiment:
    optimizer = experiment.optimizer
    if not isinstance(optimizer, AdamWConfig) or optimizer.implementation != "auto" or optimizer.name != "adamw":
        return experiment
    fits = optimizer.state_precision in ("fp32", "bf16") and not experiment.parallelism.cpu_offload
    triton = fits and device_type(experiment.cluster) == "cuda" and has_triton()
    return replace(experiment, optimizer=replace(optimizer, implementation="triton" if triton else "fused"))


def _resolve_loss_chunk(experiment: Experiment) -> Experiment:
    training = experiment.training
    whole = _automatic_chunk(training, experiment.parallelism, experiment.cluster) is None
    if training.loss_chunk_tokens != "auto" or not whole:
        return experiment
    return replace(experiment, training=replace(training, loss_chunk_tokens=None))


def _automatic_chunk(training: TrainingConfig, parallelism: ParallelismConfig, cluster: ClusterConfig) -> int | None:
    shards = parallelism.tp == 1 or parallelism.loss_parallel
    computes = device_type(cluster) == "cuda" and shards and not head_is_fp32(training)
    return LOSS_CHUNK_TOKENS if computes else None
