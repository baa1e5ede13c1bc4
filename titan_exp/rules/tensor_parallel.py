"""Rules about tensor parallelism: what ranks that share matrices can divide among them."""

import math
from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.rules.context_parallel import chunks_of_a_sequence
from titan_exp.rules.model_shape import FFN_MULTIPLE
from titan_exp.rules.rule import rules

FIELD = "parallelism.tp"


def blocks_can_be_divided(experiment: Experiment) -> Iterator[Violation]:
    """Only of the built-in blocks is it known how their matrices may be divided."""
    architecture, degree = experiment.model.architecture, experiment.parallelism.tp
    if architecture not in ARCHITECTURES:
        yield Violation(
            FIELD,
            degree,
            f"the built-in blocks say how their matrices may be divided, and {architecture} is not known to be made of "
            "them",
            f"parallelism.tp=1, spread over ranks with parallelism.dp_shard={degree}; or model.architecture=decoder",
        )


def heads_divide(experiment: Experiment) -> Iterator[Violation]:
    """Every rank has whole query heads, and as many of each key and value head as the others."""
    model, degree = experiment.model, experiment.parallelism.tp
    if model.heads % model.kv_heads or _heads_divide(model.heads, model.kv_heads, degree):
        return
    works = [other for other in divisors(model.heads) if _heads_divide(model.heads, model.kv_heads, other)]
    yield Violation(
        FIELD,
        degree,
        f"{model.heads} query heads with {model.kv_heads} key and value heads cannot be divided evenly among so many "
        "ranks",
        f"parallelism.tp={listed(nearest_numbers(degree, works))}",
    )


def channels_divide(experiment: Experiment) -> Iterator[Violation]:
    """Every rank has whole groups of feed-forward channels."""
    width, degree = experiment.model.ffn_dim, experiment.parallelism.tp
    if width % FFN_MULTIPLE == 0 and width % (FFN_MULTIPLE * degree):
        works = nearest_numbers(degree, divisors(width // FFN_MULTIPLE))
        yield Violation(
            FIELD,
            degree,
            f"model.ffn_dim={width} is divided in groups of {FFN_MULTIPLE} channels, and {width // FFN_MULTIPLE} of "
            "them cannot be divided among so many ranks",
            f"parallelism.tp={listed(works)}; or model.ffn_dim={listed(multiples_near(width, FFN_MULTIPLE * degree))}",
        )


def words_are_enough(experiment: Experiment) -> Iterator[Violation]:
    """Every rank has words of the vocabulary, the last one maybe fewer."""
    words, degree = experiment.model.vocab_size, experiment.parallelism.tp
    if _words_are_enough(words, degree):
        return
    works = [other for other in range(1, degree) if _words_are_enough(words, other)]
    yield Violation(
        FIELD,
        degree,
        f"the embedding's {words} rows are divided into parts of {-(-words // degree)}, which leaves ranks without any",
        f"parallelism.tp={listed(nearest_numbers(degree, works))}",
    )


def tokens_divide(experiment: Experiment) -> Iterator[Violation]:
    """Under sequence parallelism every rank has as many tokens of each sequence."""
    parallelism, seq_len = experiment.parallelism, experiment.training.seq_len
    # How sequences are cut for context parallelism alone is told by its own rules.
    chunks = chunks_of_a_sequence(experiment)
    if not parallelism.sequence_parallel or seq_len % chunks or seq_len % (parallelism.cp * parallelism.tp) == 0:
        return
    among = f" and parallelism.cp={parallelism.cp}" if parallelism.cp > 1 else ""
    nearest = multiples_near(seq_len, math.lcm(chunks, parallelism.cp * parallelism.tp))
    yield Violation(
        "training.seq_len",
        seq_len,
        f"sequence parallelism cuts it into equal parts for parallelism.tp={parallelism.tp}{among}",
        f"nearest: training.seq_len={listed(nearest)}; or parallelism.sequence_parallel=false",
    )


def rows_divide_twice(experiment: Experiment) -> Iterator[Violation]:
    """A weight whose rows tensor parallelism has divided is sharded by rows again where that is even, else by columns,
    where that is."""
    model, parallelism = experiment.model, experiment.parallelism
    shards = parallelism.dp_shard * parallelism.cp
    if model.dim % shards == 0:
        return
    rows = {
        "model.vocab_size": model.vocab_size,
        "the rows of gate and up": 2 * model.ffn_dim,
    }
    if model.kv_heads % parallelism.tp == 0:
        rows["the rows of queries, keys and values"] = (model.heads + 2 * model.kv_heads) * model.head_dim
    uneven = [f"{name} ({count})" for name, count in rows.items() if count % (parallelism.tp * shards)]
    if uneven:
        works = [
            degree
            for degree in range(1, 2 * parallelism.dp_shard)
            if model.dim % (degree * parallelism.cp) == 0
            or all(count % (parallelism.tp * degree * parallelism.cp) == 0 for count in rows.values())
        ]
        yield Violation(
            "parallelism.dp_shard",
            parallelism.dp_shard,
            f"with parallelism.tp={parallelism.tp}, weights are sharded evenly, by rows or by columns: {shards} shards "
            f"divide neither {listed(uneven, 'and')} nor model.dim ({model.dim})",
            f"parallelism.dp_shard={listed(nearest_numbers(parallelism.dp_shard, works))}"
            if works
            else "a parallelism.cp that divides model.dim",
        )


def chunks_are_of_parts(experiment: Experiment) -> Iterator[Violation]:
    """The loss in chunks takes each rank's own words."""
    chunk = experiment.training.loss_chunk_tokens
    if chunk is not None and not experiment.parallelism.loss_parallel:
        yield Violation(
            "training.loss_chunk_tokens",
            chunk,
            "in chunks, tensor-parallel ranks compute the loss from their own parts of the vocabulary, and "
            "parallelism.loss_parallel is false",
            "parallelism.loss_parallel=true, or training.loss_chunk_tokens=null",
        )


def overlap_is_compiled(experiment: Experiment) -> Iterator[Violation]:
    """Async tensor parallelism is a pass of the compiler over symmetric memory."""
    parallelism, compile_ = experiment.parallelism, experiment.compile
    if not parallelism.async_tp:
        return
    reason = remedy = None
    if parallelism.tp == 1:
        reason, remedy = "there is nothing to overlap: parallelism.tp is 1", "parallelism.async_tp=false"
    elif device_type(experiment.cluster) == "cpu":
        reason = "it needs symmetric memory, which GPUs have and a CPU has not"
        remedy = "parallelism.async_tp=false"
    elif not compile_.compiles("blocks") or compile_.backend != "inductor":
        reason = "the compiler does the overlapping, and inductor does not compile the blocks"
        remedy = "compile=blocks compile.backend=inductor, or parallelism.async_tp=false"
    elif not parallelism.sequence_parallel:
        reason = "it overlaps the gathering and scattering of tokens, and parallelism.sequence_parallel is false"
        remedy = "parallelism.sequence_parallel=true, or parallelism.async_tp=false"
    if reason is not None and remedy is not None:
        yield Violation("parallelism.async_tp", parallelism.async_tp, reason, remedy)


def shared_matrices(experiment: Experiment) -> Iterator[Violation]:
    """The rules of this file, where matrices are shared."""
    yield from overlap_is_compiled(experiment)
    if experiment.parallelism.tp == 1:
        return
    yield from blocks_can_be_divided(experiment)
    if experiment.model.architecture in ARCHITECTURES:
        for rule in (heads_divide, channels_divide, words_are_enough, tokens_divide, rows_divide_twice):
            yield from rule(experiment)
    yield from chunks_are_of_parts(experiment)


def _heads_divide(heads: int, kv_heads: int, degree: int) -> bool:
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def _words_are_enough(words: int, degree: int) -> bool:
    return (degree - 1) * -(-words // degree) < words


RULES = rules(
    shared_matrices,
)
