"""Mesh rules: devices for the degrees, tensor and context parallelism."""

import math
from collections.abc import Iterator
from dataclasses import replace

from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.user_error import Violation, divisors, listed, multiples_near
from titan_exp.config.groups.parallelism import BLOCK_SCALED, CompileConfig, ParallelismConfig, QuantizationConfig
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import BLOCK_DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.torch_features import ATTENTION_BACKEND, FLASH_WITH_LSE, MERGING
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LinearSpec, ModelSpec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.rules.compile import compiled_blocks
from titan_exp.rules.rule import Refuse, check_multiple, check_number, rules


def ranks_have_gpus(
    cluster: ClusterConfig, parallelism: ParallelismConfig, layout: ResolvedLayout, device: str
) -> Iterator[Violation]:
    """On CUDA, every rank has its own GPU."""
    offered, world = offered_devices(cluster), layout.world_size
    if device == "cuda" and offered and world > offered and cluster.worlds == 1:
        field = "dp_shard" if parallelism.dp_shard >= parallelism.dp_replicate else "dp_replicate"
        degree = getattr(parallelism, field)
        room = offered // (world // degree)
        reason = f"the layout needs {world} processes, and this machine offers {offered} GPU{'s' * (offered > 1)}"
        fits, more = [size for size in divisors(offered) if size <= room], "lower the other degrees as well"
        yield from check_number(
            f"parallelism.{field}", degree, lambda one: one in fits, reason, largest=room, otherwise=more
        )


def model_is_divided_so(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """The model can be divided along every axis of the layout."""
    for axis in spec.unsupported:
        degree = getattr(parallelism, axis.key.removeprefix("parallelism."))
        if degree > 1:
            yield Violation(axis.key, degree, axis.reason, f"use {axis.key}=1 parallelism.dp_shard={degree}")


DEGREE_RULES = (
    *rules(
        Refuse(
            "cluster.device",
            lambda cluster, gpus: cluster.device == "cuda" and not gpus,
            "torch sees no GPU on this machine (CUDA_VISIBLE_DEVICES may hide them)",
            "use cluster.device=cpu, or auto to take the device that is there",
        ),
        Refuse(
            "cluster.gpus_per_node",
            lambda cluster, gpus: 0 < gpus < (cluster.gpus_per_node or 0),
            "torch sees {gpus} GPU(s) on this machine",
            "use cluster.gpus_per_node={gpus} or less",
        ),
        Refuse(
            "cluster.gpus_per_node",
            lambda cluster, gpus: not gpus and cluster.gpus_per_node is not None and cluster.device != "cuda",
            "torch sees no GPU on this machine",
            "on a CPU the degrees alone set the number of processes: cluster.gpus_per_node=null "
            "parallelism.dp_shard={cluster.gpus_per_node}",
        ),
        Refuse(
            "cluster.nodes",
            lambda cluster: cluster.nodes != 1,
            "cluster=local uses this machine only",
            "use cluster.nodes=1",
        ),
        # `auto` does not fall back to the CPU beside a GPU or driver that torch cannot use.
        Refuse(
            "cluster.device",
            lambda cluster, unusable_cuda: cluster.device == "auto" and unusable_cuda,
            "{found[0]}",
            "{found[1]}",
        ),
        ranks_have_gpus,
        when=lambda cluster: not cluster.is_remote,
    ),
    *rules(
        # Replaying collectives of compiled blocks is untested.
        Refuse(
            "compile.backend",
            lambda compile, parallelism: (
                compile.compiles("blocks")
                and compile.backend == "cudagraphs"
                and listed(
                    [f"parallelism.{key}={n}" for key in BLOCK_DEGREES if (n := getattr(parallelism, key)) > 1], "and"
                )
            ),
            "with {found} the blocks contain collectives, which a CUDA graph cannot capture",
            "use compile.backend=inductor or aot_eager",
        ),
        model_is_divided_so,
    ),
)


TP = "parallelism.tp"


def async_tp_is_supported(
    parallelism: ParallelismConfig, compile: CompileConfig, quantization: QuantizationConfig, device: str
) -> Iterator[Violation]:
    """Async tensor parallelism, a compiler pass over symmetric memory, is supported."""
    field = "parallelism.async_tp"
    if not parallelism.async_tp:
        return
    if parallelism.tp == 1:
        reason, remedy = "with parallelism.tp=1 there is no communication to overlap", ""
    elif device == "cpu":
        reason, remedy = "it needs symmetric memory, which a CPU lacks", ""
    elif not compile.compiles("blocks") or compile.backend != "inductor":
        reason = "inductor does the overlapping when it compiles the blocks, and this run does not let it"
        backend = replace(compile, backend="eager") if compile.backend != "inductor" else compile
        remedy = f"{compiled_blocks(backend)}, or "
    elif not parallelism.sequence_parallel:
        overlapped = "the all-gather and reduce-scatter of sequence parallelism"
        reason = f"it overlaps {overlapped}, and parallelism.sequence_parallel is false"
        remedy = "parallelism.sequence_parallel=true, or "
    elif quantization.recipe in BLOCK_SCALED and quantization.emulate is not True:
        reason = f"torch's fused operators cannot take the block scales of quantization={quantization.recipe}"
        remedy = "quantization=float8_rowwise, or "
    else:
        return
    yield Violation(field, True, reason, f"use {remedy}{field}=false")


def units_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Every rank has equal outputs of a column-parallel linear: head groups or feed-forward channels."""
    degree = parallelism.tp
    unsharded = next((name for name, linear in spec.linears() if linear.tp is None and linear.experts == 1), None)
    refused = any(axis.key == TP for axis in spec.unsupported)
    if unsharded is not None and not refused:
        yield Violation(TP, degree, f"the spec of {unsharded} does not say how to shard it", f"use {TP}=1")
    # Modulations have the units of other linears.
    for style in dict.fromkeys(replace(style, vector=False) for _, style in _colwise(spec) if style.units):
        step = math.lcm(style.width, degree) if style.common else style.width * degree
        widths = listed(multiples_near(style.units * style.width, step))
        more = f", or use {style.key}={widths}" if style.key else ""
        reason, largest = f"{degree} ranks cannot share {style.described} evenly", style.units * style.pieces
        yield from check_number(TP, degree, style.divides, reason, largest=largest, more=more)


def vocabulary_divides(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Every rank has rows of the embedding; the last rank may have fewer."""
    rows, degree = spec.vocab_size, parallelism.tp
    if not spec.vocab_size:
        return
    reason = f"each rank takes {-(-rows // degree)} of the embedding's {rows} rows, which leaves some ranks without any"
    yield from check_number(TP, degree, lambda tp: (tp - 1) * -(-rows // tp) < rows, reason, largest=degree)


def tokens_divide(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """With sequence parallelism, every rank has the same number of tokens of each sequence."""
    cp, tp, chunks, seq_len = parallelism.cp, parallelism.tp, parallelism.sequence_chunks, training.seq_len
    # Indivisible chunks violate the context parallelism rules, and other inputs have rules of their own.
    if spec.inputs is None and parallelism.sequence_parallel and seq_len % chunks == 0:
        among = f" and parallelism.cp={cp}" if cp > 1 else ""
        reason = f"sequence parallelism cuts each sequence into equal parts for parallelism.tp={tp}{among}"
        more = ", or use parallelism.sequence_parallel=false"
        yield from check_multiple("training.seq_len", seq_len, math.lcm(chunks, cp * tp), reason, more)


def shards_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """FSDP can shard every column-parallel weight evenly, by rows or else by columns."""
    cp, tp, dp_shard = parallelism.cp, parallelism.tp, parallelism.dp_shard
    weights = {"model.vocab_size": (spec.vocab_size, spec.dim)}
    weights |= {
        f"the rows of {linear.name}": (linear.outputs, linear.inputs)
        for linear, style in _colwise(spec)
        if not style.is_replicated(tp)
    }

    def uneven(degree: int) -> dict[str, tuple[int, int]]:
        shards = degree * cp
        return {name: (rows, of) for name, (rows, of) in weights.items() if rows % (tp * shards) and of % shards}

    named = listed([f"{name} ({rows}) nor its columns ({of})" for name, (rows, of) in uneven(dp_shard).items()], "and")
    reason = f"with parallelism.tp={tp} FSDP cuts a weight into equal shards, by its rows or its columns, and "
    reason += f"{dp_shard * cp} shards divide neither {named}"
    more, largest = "use a parallelism.cp that divides model.dim" if uneven(1) else "", 2 * dp_shard - 1
    yield from check_number(
        "parallelism.dp_shard", dp_shard, lambda n: not uneven(n), reason, largest=largest, more=more
    )


def _colwise(spec: ModelSpec) -> list[tuple[LinearSpec, Colwise]]:
    """Distinct column-parallel linears, with their sharding; those of experts have rules of their own."""
    linears = dict.fromkeys(linear for layer in spec.blocks for linear in layer.linears)
    return [(linear, linear.tp) for linear in linears if linear.experts == 1 and isinstance(linear.tp, Colwise)]


TENSOR_RULES = (
    *rules(async_tp_is_supported),
    *rules(
        Refuse(
            TP,
            lambda model: model_spec(model) is None,
            "{model.architecture} is a plain class, which does not say how to shard its linear layers",
            "use parallelism.tp=1 parallelism.dp_shard={parallelism.tp}, or a module with a spec, "
            "such as model.architecture=llama",
        ),
        units_divide,
        vocabulary_divides,
        tokens_divide,
        shards_divide,
        Refuse(
            "training.loss_chunk_tokens",
            lambda parallelism, training: training.has_given_chunks and not parallelism.loss_parallel,
            "to compute the loss in chunks, each tensor-parallel rank takes its own part of the vocabulary, and "
            "parallelism.loss_parallel is false",
            "use parallelism.loss_parallel=true, or training.loss_chunk_tokens=null",
        ),
        when=lambda parallelism: parallelism.tp > 1,
    ),
)


def groups_divide(parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Ranks that share a sequence form equal Ulysses groups; with cp_method=ulysses there is one group."""
    cp, degree, field = parallelism.cp, parallelism.cp_ulysses, "parallelism.cp_ulysses"
    if degree > 1 and parallelism.cp_method == "ulysses":
        reason = "with parallelism.cp_method=ulysses all ranks of parallelism.cp form one Ulysses group"
        yield Violation(field, degree, reason, f"use {field}=1, or parallelism.cp_method=ring or allgather")
        return
    reason = f"it does not divide the {cp} ranks of parallelism.cp into equal groups"
    yield from check_number(field, degree, lambda size: cp % size == 0, reason, largest=cp)


def sequence_divides(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Every rank has the same number of tokens and the same amount of causal attention."""
    if spec.inputs is not None:  # whose streams are divided each, by a rule of theirs
        return
    chunks, cp = parallelism.sequence_chunks, parallelism.cp
    per_rank = "" if chunks == cp else f", two for each of {cp} ranks"
    reason = f"parallelism.cp={cp} with {parallelism.cp_method} cuts each sequence into {chunks} equal chunks{per_rank}"
    yield from check_multiple("training.seq_len", training.seq_len, chunks, reason)


def filters_reach(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """No filter of linear attention reaches beyond the chunk before its own."""
    reach = max((layer.linear_attention.taps - 1 for layer in spec.layers if layer.linear_attention), default=0)
    chunks, seq_len, own = parallelism.sequence_chunks, training.seq_len, f"parallelism.cp={parallelism.cp}"
    if seq_len < reach * chunks:
        reads = f"the convolution of linear attention reads {reach} tokens before each"
        reason = f"{own} cuts each sequence into {chunks} chunks, and {reads}"
        remedy = f"use training.seq_len={reach * chunks} or more, or parallelism.cp=1"
        yield Violation("training.seq_len", seq_len, reason, remedy)


def heads_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """The Ulysses degree divides the heads of a tensor-parallel rank in every layer."""
    degree, tp = parallelism.ulysses_degree, parallelism.tp
    if not spec.attentions or degree == 1:
        return
    whole = [attention for attention in spec.attentions if attention.heads % tp == 0]
    of_a_rank = [(attention.heads // tp, max(1, attention.kv_heads // tp)) for attention in whole]
    common = math.gcd(*(size for sizes in of_a_rank for size in sizes))
    indivisible = [sizes for sizes in of_a_rank if math.gcd(*sizes) % degree]
    if not indivisible:
        return
    heads, kv_heads = indivisible[0]
    in_layers = "" if len(of_a_rank) == 1 else " of some layers"
    with_tp = f" (those of one rank of parallelism.tp={tp})" if tp > 1 else ""
    of_layers = f"{heads} query heads with {kv_heads} key and value heads{in_layers}{with_tp}"
    reason = f"ulysses divides heads among {degree} ranks, and {of_layers} do not divide evenly"
    if parallelism.cp_method == "ulysses":
        field, more = "parallelism.cp", ", or use parallelism.cp_method=ring or allgather, which divide no heads"
    else:
        field, more = "parallelism.cp_ulysses", ""
    yield from check_number(field, degree, lambda size: common % size == 0, reason, largest=common, more=more)


def kernel_merges(spec: ModelSpec, parallelism: ParallelismConfig, device: str) -> Iterator[Violation]:
    """With ring and all-gather, the attention kernel returns the log-sum-exp for merging partial results."""
    backend, method = spec.attention_backend, parallelism.cp_method
    if method == "ulysses":
        return
    # Kernels unavailable on CPUs violate the attention rules.
    if backend not in MERGING and (device == "cuda" or backend == "math"):
        reason = f"parallelism.cp_method={method} merges parts of a softmax, and this kernel does not return what that "
        works = "auto, flash or efficient" if device == "cuda" else "auto or flash"
        remedy = f"use {ATTENTION_BACKEND}={works}, or parallelism.cp_method=ulysses, which works with every kernel"
        yield Violation(ATTENTION_BACKEND, backend, f"{reason}takes", remedy)
    multiple, more = FLASH_WITH_LSE.multiple, ", or use parallelism.cp_method=ulysses"
    reason = f"on CUDA parallelism.cp_method={method} needs multiples of {multiple}"
    for key, head_dim in spec.head_dims if device == "cuda" else ():
        yield from check_multiple(key, head_dim, multiple, reason, more)


CONTEXT_RULES = (
    *rules(groups_divide),
    *rules(
        Refuse(
            "parallelism.cp",
            lambda model: (spec := model_spec(model)) is None or not spec.describes_mixers,
            "context parallelism exchanges the keys and values of attention, and {model.architecture} does not "
            "describe its attention",
            "use parallelism.cp=1 parallelism.dp_shard={parallelism.cp}, or model.architecture=llama",
        ),
        sequence_divides,
        filters_reach,
        heads_divide,
        kernel_merges,
        when=lambda parallelism: parallelism.cp > 1 and parallelism.cp % parallelism.cp_ulysses == 0,
    ),
)
