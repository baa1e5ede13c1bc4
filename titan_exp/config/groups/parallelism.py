"""Group `parallelism`: the degrees of the device mesh."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Predicate

from titan_exp.config.groups.types import Count, PositiveInt


def minus_one_or_positive(degree: int) -> bool:
    """-1 or at least 1."""
    return degree == -1 or degree >= 1


Degree = PositiveInt
ShardDegree = Annotated[int, Predicate(minus_one_or_positive)]


@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of the mesh; their product is the number of processes. None of them changes what is computed."""

    dp_replicate: Degree
    """Copies of the (sharded) model, each on its own data; with dp_shard=1 this is DDP, else HSDP.
    E.g. `parallelism.dp_replicate=2`."""
    dp_shard: ShardDegree
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2); -1 takes every device left, one
    process on a CPU machine. E.g. `parallelism.dp_shard=4`."""
    tp: Degree
    """Tensor-parallel degree: ranks that share the matrices of every block, each with some of its heads and
    feed-forward channels.

    Where it is a multiple of kv_heads, every key and value head serves several ranks. E.g. `parallelism.tp=8`."""
    sequence_parallel: bool
    """Sequence parallelism: divide tokens among the tensor-parallel ranks wherever each token is computed by itself
    (norms, residual stream), which takes less memory and as much to send.

    Sequences are divided by tp as well. Without effect where tp is 1. E.g. `parallelism.sequence_parallel=false`."""
    loss_parallel: bool
    """Compute the loss from each tensor-parallel rank's own part of the vocabulary, exchanging two numbers a token,
    instead of gathering all logits on every rank.

    Without effect where tp is 1. E.g. `parallelism.loss_parallel=false`."""
    async_tp: bool
    """Overlap a block's tensor-parallel exchanges with its matmuls, piece by piece, through symmetric memory: on CUDA
    with compiled blocks and sequence_parallel only. E.g. `parallelism.async_tp=true`."""
    pp: Degree
    """Pipeline-parallel degree: ranks that hold consecutive parts of the layers, and pass micro-batches on.
    E.g. `parallelism.pp=4`."""
    pp_schedule: str
    """Order of a rank's stages and micro-batches: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble or DualPipeV, as torch calls them, or the path of a CSV file with a row of actions for each rank.

    The file is in torch's compute-only format, with cells like 2F0: stage 2, forward, micro-batch 0. GPipe and 1F1B
    have one stage on each rank; the others have several, which makes the bubble smaller and sends more.
    E.g. `parallelism.pp_schedule=ZBVZeroBubble`."""
    pp_microbatches: PositiveInt | None
    """Micro-batches in one pass through the pipeline; null takes all of a step's at once.

    More of them make the bubble smaller. Several passes bound memory with GPipe and LoopedBFS, and each has its own
    bubble. E.g. `parallelism.pp_microbatches=16`."""
    pp_layers: tuple[Count, ...] | None
    """Layers of each stage, in order: [2,3,3,2]. Its length is the number of stages. null divides them evenly.
    E.g. `parallelism.pp_layers='[7,9,9,7]'`."""
    pp_layers_per_stage: PositiveInt | None
    """Layers of a stage, from which the number of stages follows; null has as many stages as the schedule has by
    default (one on each rank for GPipe and 1F1B, else two). E.g. `parallelism.pp_layers_per_stage=4`."""
    pp_first_stage_less: Count
    """Layers that the first stage has fewer than its even share, because it holds the embedding.
    E.g. `parallelism.pp_first_stage_less=1`."""
    pp_last_stage_less: Count
    """Layers that the last stage has fewer than its even share, because it holds the head and computes the loss.

    What does not divide evenly goes to stages in between first. E.g. `parallelism.pp_last_stage_less=1`."""
    cp: Degree
    """Context-parallel degree: ranks that share every sequence, each with a part of its tokens.

    They shard parameters like `dp_shard` ranks. E.g. `parallelism.cp=2`."""
    cp_method: Literal["ring", "allgather", "ulysses"]
    """Attention to the other ranks' parts of a sequence, with the same result: `ring` (least memory), `allgather`
    (fewest messages) or `ulysses` (least to send; cp must divide query heads and kv heads).

    `ring` passes keys and values from rank to rank behind the attention to those before: cp - 1 messages a layer,
    memory for two parts. `allgather` gathers them in one collective behind the attention to the own part: fewer and
    larger messages, memory for the keys and values of the whole sequence. `ulysses` exchanges heads for sequence in two
    all-to-alls that nothing hides, and has every kernel. Sequences are cut into 2 · cp pieces, one from the head and
    one from the tail for each rank, so that causal work is even; where windows or chunks of the model's layers leave it
    uneven, into segments first, and each of them into 2 · cp pieces; for `ulysses` into cp parts. The backward pass of
    ring and allgather sends gradients in fp32. E.g. `parallelism.cp_method=allgather`."""
    cp_ulysses: Degree
    """With ring or allgather: size of groups of neighbours among the ranks of a sequence that exchange heads, as in
    `ulysses`, while the groups exchange keys and values; divides cp and the kv heads of a rank.

    Neighbours sit behind the fastest links, and a round of the ring is so many times shorter.
    E.g. `parallelism.cp_ulysses=2`."""
    ep: Degree
    """Expert-parallel degree: ranks, out of those of tp, cp and dp_shard, that keep other experts each.

    Tokens are sent to their experts and sent back. It adds no processes: it regroups the ranks of tp (or etp does),
    then of cp, then of dp_shard, whose product it divides, as it divides the experts. The ranks that are left shard the
    same experts. E.g. `parallelism.ep=8`."""
    etp: Degree
    """Tensor-parallel degree inside experts: 1 keeps them whole on a rank, parallelism.tp divides their channels too,
    for experts that are wide. E.g. `parallelism.etp=2`."""
    token_exchange: Literal["all_to_all", "symmetric_memory"]
    """Way of tokens to experts on other ranks: `all_to_all`, or `symmetric_memory`, through NVSHMEM on CUDA, which has
    not run on a GPU yet.

    `all_to_all` sends each rank its rows, for which the host waits once a layer, for their number. `symmetric_memory`
    has ranks read each other's rows without the host: room for the worst case (every token of the ep ranks on one of
    them) in every tensor of rows, instead of the rows that come. E.g. `parallelism.token_exchange=symmetric_memory`."""
    cpu_offload: bool
    """Keep parameters, gradients and optimizer state in the CPU's memory and bring a block's parameters to the GPU when
    it computes: the least GPU memory, at the speed of the link between the two. E.g. `parallelism.cpu_offload=true`."""
    prefetch_blocks: PositiveInt
    """Blocks whose parameters are gathered ahead of the one that computes; more hide slow links and cost memory.
    E.g. `parallelism.prefetch_blocks=2`."""
    reshard_after_forward: Literal["auto", "always", "never", "all_but_last"]
    """Time at which a block frees its gathered parameters: after each forward pass (`always`), `never` before backward,
    or after each but the last block's, which backward needs next (`all_but_last`). `auto` is all_but_last without a
    pipeline, and never with one.

    With a pipeline, a stage's parameters would be gathered anew for each micro-batch: they stay for the whole step.
    Other than with `never`, the embedding is freed after its lookup, and norm and head after their backward pass.
    E.g. `parallelism.reshard_after_forward=always`."""

    @property
    def ulysses_degree(self) -> int:
        """Neighbours among the ranks of a sequence that exchange heads for sequence."""
        return self.cp if self.cp_method == "ulysses" else self.cp_ulysses

    @property
    def symmetric_exchange(self) -> bool:
        """True if tokens go to experts through symmetric memory."""
        return self.ep > 1 and self.token_exchange == "symmetric_memory"

    @property
    def sequence_chunks(self) -> int:
        """Equal chunks that context parallelism cuts a sequence into; 1 without it."""
        return self.cp * (1 if self.cp == 1 or self.cp_method == "ulysses" else 2)
