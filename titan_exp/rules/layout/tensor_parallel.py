"""Tensor parallelism rules: divisible heads, channels, vocabulary and tokens, and async TP."""

import math
from collections.abc import Iterator
from dataclasses import replace

from titan_exp.config.errors.user_error import Violation, listed, multiples_near
from titan_exp.config.groups.parallelism import BLOCK_SCALED, CompileConfig, ParallelismConfig, QuantizationConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LinearSpec, ModelSpec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.rules.compile import compiled_blocks
from titan_exp.rules.rule import Refuse, check_multiple, check_number, rules

FIELD = "parallelism.tp"


def async_tp_is_supported(
    parallelism: ParallelismConfig, compile: CompileConfig, quantization: QuantizationConfig, device: str
) -> Iterator[Violation]:
    """Async tensor parallelism, a compiler pass over symmetric memory, is supported."""
    field = "parallelism.async_tp"
    if not parallelism.async_tp:
        return
    if parallelism.tp == 1:
        reason, remedy = "there is nothing to overlap: parallelism.tp is 1", ""
    elif device == "cpu":
        reason, remedy = "it needs symmetric memory, which a CPU lacks", ""
    elif not compile.compiles("blocks") or compile.backend != "inductor":
        reason = "the compiler does the overlapping, and inductor does not compile the blocks"
        backend = replace(compile, backend="eager") if compile.backend != "inductor" else compile
        remedy = f"{compiled_blocks(backend)}, or "
    elif not parallelism.sequence_parallel:
        reason = "it overlaps all-gather and reduce-scatter of tokens, and parallelism.sequence_parallel is false"
        remedy = "parallelism.sequence_parallel=true, or "
    elif quantization.recipe in BLOCK_SCALED and quantization.emulate is not True:
        reason = f"torch's fused operators take no scales by blocks, as those of quantization={quantization.recipe}"
        remedy = "quantization=float8_rowwise, or "
    else:
        return
    yield Violation(field, True, reason, f"{remedy}{field}=false")


def units_divide(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Every rank has equal outputs of a column-parallel linear: head groups or feed-forward channels."""
    degree = parallelism.tp
    unsharded = next((name for name, linear in spec.linears() if linear.tp is None and linear.experts == 1), None)
    refused = any(axis.key == FIELD for axis in spec.unsupported)
    if unsharded is not None and not refused:
        yield Violation(FIELD, degree, f"the spec of {unsharded} gives no sharding", f"{FIELD}=1")
    # Modulations have the units of other linears.
    for style in dict.fromkeys(replace(style, vector=False) for _, style in _colwise(spec) if style.units):
        step = math.lcm(style.width, degree) if style.common else style.width * degree
        widths = listed(multiples_near(style.units * style.width, step))
        more = f"; or {style.key}={widths}" if style.key else ""
        reason, largest = f"{style.described} cannot be divided evenly among {degree} ranks", style.units * style.pieces
        yield from check_number(FIELD, degree, style.divides, reason, largest=largest, more=more)


def vocabulary_divides(spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Every rank has rows of the embedding; the last rank may have fewer."""
    rows, degree = spec.vocab_size, parallelism.tp
    if not spec.vocab_size:
        return
    reason = f"the embedding's {rows} rows are divided into parts of {-(-rows // degree)}, which leaves empty ranks"
    yield from check_number(FIELD, degree, lambda tp: (tp - 1) * -(-rows // tp) < rows, reason, largest=degree)


def tokens_divide(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """With sequence parallelism, every rank has the same number of tokens of each sequence."""
    cp, tp, chunks, seq_len = parallelism.cp, parallelism.tp, parallelism.sequence_chunks, training.seq_len
    # Indivisible chunks violate the context parallelism rules, and other inputs have rules of their own.
    if spec.inputs is None and parallelism.sequence_parallel and seq_len % chunks == 0:
        among = f" and parallelism.cp={cp}" if cp > 1 else ""
        reason = f"sequence parallelism cuts it into equal parts for parallelism.tp={tp}{among}"
        more = "; or parallelism.sequence_parallel=false"
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
    reason = f"with parallelism.tp={tp}, weights are sharded evenly, by rows or by columns: "
    reason += f"{dp_shard * cp} shards divide neither {named}"
    more = "a parallelism.cp that divides model.dim" if uneven(1) else ""
    largest = 2 * dp_shard - 1
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
            FIELD,
            lambda model: model_spec(model) is None,
            "the plain class {model.architecture} does not describe how its linear layers are sharded",
            "parallelism.tp=1 parallelism.dp_shard={parallelism.tp}; or a module with a spec, "
            "as model.architecture=llama is",
        ),
        units_divide,
        vocabulary_divides,
        tokens_divide,
        shards_divide,
        Refuse(
            "training.loss_chunk_tokens",
            lambda parallelism, training: training.has_given_chunks and not parallelism.loss_parallel,
            "in chunks, tensor-parallel ranks compute the loss from their own parts of the vocabulary, and "
            "parallelism.loss_parallel is false",
            "parallelism.loss_parallel=true, or training.loss_chunk_tokens=null",
        ),
        when=lambda parallelism: parallelism.tp > 1,
    ),
)
