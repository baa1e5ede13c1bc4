"""Groups `parallelism`, `activation_checkpoint`, `compile` and `quantization`: how a step is computed."""

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

from annotated_types import Predicate

from titan_exp.config.groups.types import Count, PositiveInt, Ratio


def minus_one_or_positive(degree: int) -> bool:
    """-1 or at least 1."""
    return degree == -1 or degree >= 1


Degree = PositiveInt
ShardDegree = Annotated[int, Predicate(minus_one_or_positive)]


@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of the mesh; their product is the number of processes. None of them changes what is computed."""

    dp_replicate: Degree
    """Replicated data parallelism: number of copies of the model, each of which trains on its own sequences. Above 1
    this is DDP with dp_shard=1, and HSDP with a larger dp_shard. E.g. `parallelism.dp_replicate=2`."""
    dp_shard: ShardDegree
    """Sharded data parallelism (FSDP2): number of ranks that parameters, gradients and optimizer state are sharded
    over. -1 takes all devices that the other degrees leave, and 1 on a CPU machine. E.g. `parallelism.dp_shard=4`."""
    tp: Degree
    """Tensor parallelism: number of ranks that share the matrices of every block. Each computes some of the heads and
    of the feed-forward channels.

    If there are fewer kv_heads than ranks, several ranks compute each key and value head. E.g. `parallelism.tp=8`."""
    sequence_parallel: bool
    """Sequence parallelism: the tensor-parallel ranks divide the tokens wherever a layer computes each token by itself
    (norms, residual stream). This takes less memory and sends no more.

    The degree tp must then divide the sequence length as well. It has no effect if tp is 1.
    E.g. `parallelism.sequence_parallel=false`."""
    loss_parallel: bool
    """Loss parallelism: each tensor-parallel rank computes the loss from its own part of the vocabulary, and ranks
    exchange three numbers per token. Otherwise every rank gathers all logits.

    It has no effect if tp is 1. E.g. `parallelism.loss_parallel=false`."""
    async_tp: bool
    """Asynchronous tensor parallelism: a block's collectives overlap with its matmuls, piece by piece, through
    symmetric memory. It needs CUDA, blocks compiled by inductor, and sequence_parallel.
    E.g. `parallelism.async_tp=true`."""
    pp: Degree
    """Pipeline parallelism: number of ranks that the layers are divided over, in stages of consecutive layers through
    which micro-batches pass. E.g. `parallelism.pp=4`."""
    pp_schedule: str
    """Pipeline schedule, by torch's name: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble
    or DualPipeV. It may also be the path of a CSV file with a row of actions for each rank.

    The file is in torch's compute-only format, with cells like 2F0 (stage 2, forward, micro-batch 0). GPipe and 1F1B
    have one stage on each rank. The others have several, which makes the bubble smaller and sends more.
    E.g. `parallelism.pp_schedule=ZBVZeroBubble`."""
    pp_microbatches: PositiveInt | None
    """Number of micro-batches in one pass through the pipeline; null takes all of a step's at once.

    More micro-batches make the bubble smaller. Several passes per step bound the memory of GPipe and LoopedBFS, and
    each pass has its own bubble. E.g. `parallelism.pp_microbatches=16`."""
    pp_layers: tuple[Count, ...] | None
    """Number of layers of each pipeline stage, in order, as in [2,3,3,2]. The list has an entry for each stage. null
    divides the layers evenly. E.g. `parallelism.pp_layers='[7,9,9,7]'`."""
    pp_layers_per_stage: PositiveInt | None
    """Number of layers of a pipeline stage, which sets the number of stages. null takes the schedule's default, which
    is one stage on each rank for GPipe and 1F1B, and two for the others. E.g. `parallelism.pp_layers_per_stage=4`."""
    pp_first_stage_less: Count
    """Number of layers that the first pipeline stage has fewer than its even share, because it also holds the
    embedding. E.g. `parallelism.pp_first_stage_less=1`."""
    pp_last_stage_less: Count
    """Number of layers that the last pipeline stage has fewer than its even share, because it also holds the head and
    computes the loss.

    If layers do not divide evenly, the stages in between get the remainder first.
    E.g. `parallelism.pp_last_stage_less=1`."""
    cp: Degree
    """Context parallelism: number of ranks that share every sequence. Each computes a part of its tokens.

    Parameters are sharded over these ranks as over those of `dp_shard`. E.g. `parallelism.cp=2`."""
    cp_method: Literal["ring", "allgather", "ulysses"]
    """Context-parallel attention: `ring` takes the least memory, `allgather` sends the fewest messages, and `ulysses`
    sends the fewest bytes (cp must then divide query heads and kv heads). All have the same result.

    `ring` passes keys and values from rank to rank while attention to the part before is computed: it sends cp - 1
    messages per layer, and holds two parts. `allgather` gathers them in one collective while attention to the rank's
    own part is computed: it sends fewer and larger messages, and holds the keys and values of the whole sequence.
    `ulysses` exchanges heads for sequence in two all-to-alls, which nothing hides, and works with every attention
    kernel. So that causal attention is even work, ring and allgather cut a sequence into 2 · cp pieces, and a rank
    takes one from the head and one from the tail (zigzag sharding). If windows or chunks of the model's layers leave
    that uneven, they cut the sequence into segments first, and each of them into 2 · cp pieces. ulysses cuts a sequence
    into cp parts. The backward pass of ring and allgather sends gradients in fp32.
    E.g. `parallelism.cp_method=allgather`."""
    cp_ulysses: Degree
    """Ulysses degree inside `ring` or `allgather`: number of neighbouring ranks that exchange heads, while groups of
    them exchange keys and values. It must divide cp and the kv heads of a rank.

    Neighbours have the fastest links, and the ring becomes that many times shorter. E.g. `parallelism.cp_ulysses=2`."""
    ep: Degree
    """Expert parallelism: number of ranks, out of those of tp, cp and dp_shard, that each keep different experts.
    Tokens are sent to their experts and back.

    It adds no processes. It takes the ranks of tp first (unless etp does), then those of cp, then those of dp_shard. It
    must divide the product of these degrees, and the number of experts. The remaining ranks shard the same experts.
    E.g. `parallelism.ep=8`."""
    etp: Degree
    """Tensor parallelism inside experts: 1 keeps every expert whole on a rank. For wide experts, the value of
    parallelism.tp divides their channels as well. E.g. `parallelism.etp=2`."""
    token_exchange: Literal["all_to_all", "symmetric_memory"]
    """Token dispatcher of expert parallelism: `all_to_all`, or `symmetric_memory`, which uses NVSHMEM on CUDA and has
    not run on a GPU yet.

    With `all_to_all`, every rank sends the others their rows, and the host waits once per layer for the number of rows.
    With `symmetric_memory`, ranks read each other's rows and the host does not wait. Every tensor of rows then has room
    for the worst case, in which all tokens of the ep ranks go to one of them.
    E.g. `parallelism.token_exchange=symmetric_memory`."""
    cpu_offload: bool
    """True if parameters, gradients and optimizer state stay in CPU memory, and a block's parameters are copied to the
    GPU when it computes. This takes the least GPU memory, and runs at the speed of the link between the two.
    E.g. `parallelism.cpu_offload=true`."""
    prefetch_blocks: PositiveInt
    """Number of blocks whose parameters are gathered ahead of the block that computes. More of them hide slow links and
    cost memory. E.g. `parallelism.prefetch_blocks=2`."""
    reshard_after_forward: Literal["auto", "always", "never", "all_but_last"]
    """Policy of FSDP for a block's gathered parameters: `always` frees them after each forward pass, `never` keeps them
    until backward, and `all_but_last` keeps only those of the last block, which backward needs next. `auto` is never
    with a pipeline, and all_but_last without one.

    In a pipeline, freed parameters would be gathered again for each micro-batch, so never keeps them for the whole
    step. With the other policies, the embedding is freed after its lookup, and norm and head after their backward pass.
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


class AutomaticSave(NamedTuple):
    """Entry `auto/3` of `activation_checkpoint.save`."""

    every: int
    """Every n-th block saves one call more, if the budget of n blocks has room for it."""
    more: bool | None = None
    """True or False if all blocks do, or none: samples of the planner, whose blocks are alike."""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activations that backward recomputes."""

    mode: Literal["none", "full", "every_n", "selective", "budget"]
    """Activation checkpointing: `none` keeps every activation, `full` keeps each block's input and recomputes the rest,
    and `every_n` does so for every n-th block. `selective` also keeps the outputs of chosen operators, and `budget`
    lets the compiler choose within a memory budget.

    In blocks with experts, every mode keeps the choice of experts and the exchanged tokens. Compiled ones also keep
    attention's output in modes full and every_n. E.g. `activation_checkpoint.mode=full`."""
    every: PositiveInt
    """Interval of recomputed blocks in mode `every_n`: 2 recomputes every second block.
    E.g. `activation_checkpoint.every=3`."""
    save: list[str]
    """Operators whose outputs mode `selective` keeps. `[auto]` keeps those of attention and of reducing collectives,
    and within `budget` those of the matmuls with the fewest bytes per recomputed FLOP. `[auto/3]` also lets every third
    block keep one matmul more, if the budget of three blocks has room for it. A list of your own has names as in
    `torch.ops`; `aten.mm/2` keeps every second call in a block, the first included.
    E.g. `activation_checkpoint.save='[aten.mm/2]'`."""
    budget: Ratio
    """Memory budget. In mode `budget` it is the memory for activations as a fraction of the compiler's default, and 0
    is `full`. In mode `selective` with `[auto]` it is the bytes of kept matmuls as a fraction of all bytes that
    backward needs. E.g. `activation_checkpoint.budget=0.3`."""

    @property
    def automatic(self) -> AutomaticSave | None:
        """Parsed `[auto]` or `[auto/n]` of mode `selective`; None for a list by hand and other modes."""
        if self.mode != "selective" or len(self.save) != 1:
            return None
        found = re.fullmatch(r"auto(?:/([1-9]\d*))?([+-])?", self.save[0])
        return found and AutomaticSave(int(found[1] or 1), {"+": True, "-": False}.get(found[2]))

    def with_blocks_alike(self, *, more: bool) -> "ActivationCheckpointConfig":
        """Variant of an automatic list whose blocks all save one call more, or none does."""
        assert self.automatic is not None, "blocks differ with an automatic list only"
        return replace(self, save=[f"auto/{self.automatic.every}{'+' if more else '-'}"])


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, part by part."""

    enabled: Literal["auto", True, False]
    """True if the parts in `components` are compiled. `auto` compiles on a GPU, and runs eagerly on a CPU, without
    Triton, with a model of your own or of another library, and if training.fp32_modules names modules inside blocks. A
    line says why, and the run's config.yaml has the choice. E.g. `compile.enabled=false`."""
    components: list[Literal["blocks", "loss"]]
    """Parts to compile: `blocks`, each transformer block (they share one compiled graph), and `loss`, the loss from
    logits. E.g. `compile.components=[loss]`."""
    backend: str
    """Backend of torch.compile: `inductor`, or `aot_eager`, which traces without generating code.
    E.g. `compile.backend=aot_eager`."""
    cuda_graphs: bool = False
    """CUDA graphs: the forward and backward pass of a micro-batch is recorded once and then replayed, compiled or not.
    It helps models so small that launching kernels takes longer than running them, and needs a single GPU.

    The activations of the pass stay reserved, and gradients are kept between steps. It has not run on a GPU yet.
    E.g. `compile.cuda_graphs=true`."""

    autotune_gemms: Literal["auto", "always", "never"] = "auto"
    """GEMM autotuning: the compiler times cuBLAS and Triton kernels for each matmul of compiled blocks, and takes the
    fastest. It needs CUDA and `backend=inductor`, and training.deterministic turns it off. `auto` tunes on a single GPU
    only, because several ranks may choose differently.

    Another kernel gives other bits. Timings are cached beside the runs. Without them the first step takes longer, as
    the log says. It has not run on a GPU yet. E.g. `compile.autotune_gemms=never`."""

    def compiles(self, component: Literal["blocks", "loss"]) -> bool:
        """True if this part of a training step is compiled."""
        assert self.enabled != "auto", "resolved before launch"
        return self.enabled and component in self.components

    def autotunes_gemms(self, ranks: int) -> bool:
        """True if matmul kernels are timed in a run of so many ranks on CUDA."""
        return self.autotune_gemms == "always" or (self.autotune_gemms == "auto" and ranks == 1)


BLOCK = {"float8_tensorwise": 16, "float8_rowwise": 16, "float8_rowwise_gw_hp": 16, "mxfp8": 32, "nvfp4": 16}
"""Multiple that every dim of a quantized matmul must be, by recipe: 16 bytes of float8, a block of MX or NVFP4."""

BLOCK_SCALED = ("mxfp8", "nvfp4")
"""Recipes with a scale for every block of a matrix."""

DUAL_CAST_RECIPES = ("float8_tensorwise", "float8_rowwise")
"""Recipes that use a matrix in float8 both untransposed and transposed."""

MIN_TORCHAO = {"nvfp4": (0, 18)}
"""First torchao version with a recipe's kernels, by recipe; the others need the version that the package requires."""

NVFP4_TILE = 128
"""Multiple for torchao's NVFP4 kernels, which lay out scales in tiles."""


@dataclass(frozen=True)
class QuantizationConfig:
    """Recipe for the matmuls of the blocks' linear layers. Embedding, head, norms and attention are never quantized,
    nor modulations, which read one vector per sequence."""

    recipe: Literal["none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8", "nvfp4"] = "none"
    """Low-precision recipe of the blocks' matmuls. `none` multiplies in the dtype of `training.mixed_precision`.
    `float8_tensorwise` has one scale per tensor, `float8_rowwise` one per token and per output, and
    `float8_rowwise_gw_hp` the same with weight gradients in high precision. `mxfp8` has one scale per 32 numbers (OCP
    Microscaling). `nvfp4` has 4-bit numbers with one scale per 16 (NVIDIA 2025).

    `float8_tensorwise` has gradients in e5m2, `float8_rowwise` has everything in e4m3, and `float8_rowwise_gw_hp` has
    one scale per weight where it computes input gradients. `nvfp4` has numbers in e2m1 with an e4m3 scale per 16 and an
    fp32 scale per tensor, weights in blocks of 16 by 16, and weight gradients from Hadamard-transformed tokens
    (arXiv:2509.25149). E.g. `quantization.recipe=none`."""
    filter: list[str] = field(default_factory=list)
    """Names or patterns of linear layers that stay in high precision.
    E.g. `quantization.filter='[blocks.*.attention.*]'`."""
    smallest_gemm: Count | None = 0
    """Smallest linear layer that is quantized: it has at least this many inputs and outputs, unsharded. Casting costs
    more than a smaller matmul gains. null is 4096 on a GPU, and 0 on a CPU or with emulate=true.

    The run's config.yaml has the number. E.g. `quantization.smallest_gemm=2048`."""
    high_precision_first: Count = 0
    """Number of first blocks that stay in high precision. E.g. `quantization.high_precision_first=1`."""
    high_precision_last: Count = 0
    """Number of last blocks that stay in high precision. E.g. `quantization.high_precision_last=2`."""
    power_of_two_scales: bool = True
    """True if scales are rounded to powers of two, so that the curve does not depend on the layout.

    For NVFP4 this is the tensor's scale. A number is then rounded to the same value whichever tensor it shares its
    scale with, unless it (for NVFP4, all of its block) is smaller than about 2^-14 of the largest number there. With
    false, one device's results are those of torchao's default, and depend on the micro-batch size, dp and cp.
    E.g. `quantization.power_of_two_scales=false`."""
    stochastic_rounding: bool = False
    """Stochastic rounding of output gradients in recipe `nvfp4`, which makes them unbiased; false rounds to nearest.

    The random numbers depend on the seed, the step, the data-parallel rank and the sharding of tokens and outputs. A
    resumed run repeats them bit for bit. Another layout draws others, and its curve differs as with another seed.
    E.g. `quantization.stochastic_rounding=true`."""
    float8_all_gather: bool = False
    """All-gather in float8, for recipe `float8_tensorwise`: FSDP quantizes each shard before the all-gather, which then
    sends half the bytes, and no rank quantizes the whole weight. It needs precomputed_scales.

    Results are the same. It has no effect without sharding. E.g. `quantization.float8_all_gather=false`."""
    precomputed_scales: bool = False
    """Precomputed scales, for recipes with one scale per weight: all of them are computed after each optimizer step
    with one all-reduce, instead of one by one at use.

    Results are the same. It has no effect for float8 on one data rank, which quantizes every weight once per optimizer
    step and keeps it in float8 in both layouts. E.g. `quantization.precomputed_scales=false`."""
    fused_casts: Literal["auto", True, False] = "auto"
    """Fused casts, for recipes `float8_tensorwise` and `float8_rowwise` on GPUs: one pass casts a gradient both as it
    is and transposed, for the two matmuls that use it. `auto` fuses casts unless the recipe is emulated. Results are
    the same.

    A Triton kernel reads the gradient once. Without compilation it also casts an activation, which backward keeps
    transposed at one byte per number. Compiled code casts an activation again in backward, together with what
    recomputes it. E.g. `quantization.fused_casts=false`."""
    emulate: Literal["auto", True, False] = "auto"
    """Emulation of the recipe on any device: it rounds as the recipe does and multiplies in fp32, which is no faster
    than bf16. `auto` emulates if the device lacks the instructions, and the log says so.
    E.g. `quantization.emulate=true`."""

    @property
    def has_dual_casts(self) -> bool:
        """True if the recipe uses activations and gradients in float8 in both layouts."""
        return self.recipe in DUAL_CAST_RECIPES

    @property
    def whole_weight_scales(self) -> bool:
        """True if the recipe has one scale per weight."""
        return self.recipe in ("float8_tensorwise", "float8_rowwise_gw_hp", "nvfp4")

    def quantizes(self, name: str, inputs: int, outputs: int, *, layers: int) -> bool:
        """True if the recipe quantizes a linear layer, by its name, its unsharded shape and the number of blocks.
        `smallest_gemm` must be resolved."""
        assert self.smallest_gemm is not None, "the recipe is not resolved"
        numbered = re.match(r"blocks\.(\d+)\.", name)
        layer = int(numbered[1]) if numbered else None
        return (
            self.recipe != "none"
            and min(inputs, outputs) >= self.smallest_gemm
            and (layer is None or self.high_precision_first <= layer < layers - self.high_precision_last)
            and not any(fnmatchcase(name, pattern) for pattern in self.filter)
        )
