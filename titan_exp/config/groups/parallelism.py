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
    """Activation checkpointing: `none` keeps every activation; `full` keeps each block's input and recomputes the rest;
    `every_n` does that to some blocks; `selective` keeps the outputs of chosen operators too; `budget` lets the
    compiler choose. E.g. `activation_checkpoint.mode=full`."""
    every: PositiveInt
    """Mode `every_n`: 2 recomputes every second block. E.g. `activation_checkpoint.every=3`."""
    save: list[str]
    """Mode `selective`: `[auto]` saves what attention and reducing collectives return, and within `budget` the matmuls
    with the fewest bytes per recomputed FLOP; `[auto/3]` lets every third block save one matmul more if the budget of
    three blocks has room for it. Or operators, named as in `torch.ops`; `aten.mm/2` saves every second call in a block,
    the first included. E.g. `activation_checkpoint.save='[aten.mm/2]'`."""
    budget: Ratio
    """Mode `budget`: memory for activations as a share of the compiler's default, 0 being `full`. Mode `selective` with
    `[auto]`: bytes of saved matmuls as a share of all that backward needs. E.g. `activation_checkpoint.budget=0.3`."""

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
    """Compile the parts in `components`. `auto` does on a GPU, except where a part would be refused, as a line says
    then; it runs eagerly on a CPU. A run's config holds what it chose. E.g. `compile.enabled=false`."""
    components: list[Literal["blocks", "loss"]]
    """Parts to compile: `blocks`, each transformer block (they share one compiled graph), and `loss`, the loss from
    logits. E.g. `compile.components=[loss]`."""
    backend: str
    """torch.compile backend: `inductor`, or `aot_eager`, which traces without generating code.
    E.g. `compile.backend=aot_eager`."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch once and replay that, compiled or not: for models so small that
    launching kernels takes longer than running them. One GPU.

    The pass's activations stay reserved, and gradients are kept between steps. It has not been run on a GPU.
    E.g. `compile.cuda_graphs=true`."""

    autotune_gemms: Literal["auto", "always", "never"] = "auto"
    """Time cuBLAS and Triton kernels for each matmul of compiled blocks, and use the fastest: on CUDA with
    `backend=inductor`, and not with `training.deterministic`. `auto` does on a single GPU; several ranks may choose
    differently.

    Another kernel gives other bits. Timings are cached beside the runs; without them, the first step takes longer, as
    the log says. It has not been run on a GPU. E.g. `compile.autotune_gemms=never`."""

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
    """Recipe of matmuls: `none`, in the type of `training.mixed_precision`; `float8_tensorwise`, one scale for a whole
    tensor; `float8_rowwise`, one for every token and every output; `float8_rowwise_gw_hp`, the same with weight
    gradients in high precision; `mxfp8`, one for every 32 numbers (OCP Microscaling); `nvfp4`, 4 bits and one for every
    16 numbers (NVIDIA 2025).

    `float8_tensorwise` has gradients in e5m2, `float8_rowwise` all in e4m3. `nvfp4` has numbers in e2m1, with an e4m3
    scale for every 16 and an fp32 one for the tensor, weights in blocks of 16 by 16, and weight gradients from
    Hadamard-transformed tokens (arXiv:2509.25149). E.g. `quantization.recipe=none`."""
    filter: list[str] = field(default_factory=list)
    """Names or patterns of linear layers that stay in high precision, as in `blocks.*.attention.*`.
    E.g. `quantization.filter='[blocks.*.attention.*]'`."""
    smallest_gemm: Count | None = 0
    """Fewest inputs and outputs, unsharded, of a linear layer that is quantized: casting costs more than a small matmul
    gains. null is 4096 on GPUs, and 0 if the recipe is emulated.

    The run's config.yaml has the number. E.g. `quantization.smallest_gemm=2048`."""
    high_precision_first: Count = 0
    """Number of first blocks that stay in high precision. E.g. `quantization.high_precision_first=1`."""
    high_precision_last: Count = 0
    """Number of last blocks that stay in high precision. E.g. `quantization.high_precision_last=2`."""
    power_of_two_scales: bool = True
    """Round scales to powers of two, so that the curve does not depend on the layout.

    Of NVFP4 it is the tensor's scale. A number is then rounded to the same value whichever tensor it shares its scale
    with, unless it, or of NVFP4 all of its block, is smaller than about 2^-14 of the largest there. Without, one
    device's results are those of torchao's default, and depend on the micro-batch size, dp and cp.
    E.g. `quantization.power_of_two_scales=false`."""
    stochastic_rounding: bool = False
    """Recipe `nvfp4`: round output gradients stochastically, so that they are unbiased; false rounds to nearest.

    The random numbers depend on the seed, the step, the data-parallel rank and the sharding of tokens and outputs: a
    resumed run repeats them bit for bit, another layout draws others and its curve differs as with another seed.
    E.g. `quantization.stochastic_rounding=true`."""
    float8_all_gather: bool = False
    """Recipe `float8_tensorwise`: quantize a shard before FSDP's all-gather, which sends half the bytes, and no rank
    quantizes the whole weight.

    Results are the same. No effect without sharding. E.g. `quantization.float8_all_gather=false`."""
    precomputed_scales: bool = False
    """Recipes with one scale per weight: compute all scales after each optimizer step, with one all-reduce, instead of
    one by one at use.

    Results are the same. No effect for float8 at one data rank, which quantizes every weight once per optimizer step
    and keeps it in float8 in both layouts. E.g. `quantization.precomputed_scales=false`."""
    fused_casts: Literal["auto", True, False] = "auto"
    """Recipes `float8_tensorwise` and `float8_rowwise`, on GPUs: cast a gradient as it is and transposed, for both
    matmuls that use it, in one pass. `auto` does so where the recipe is not emulated. Results are the same.

    A Triton kernel reads the gradient once; without compilation an activation too, which backward keeps transposed, one
    byte a number. Compiled code casts an activation again in backward, with what recomputes it.
    E.g. `quantization.fused_casts=false`."""
    emulate: Literal["auto", True, False] = "auto"
    """Emulate the recipe on any device: round as it does and multiply in fp32, which is no faster than bf16. `auto`
    emulates if the device lacks the instructions, and logs it. E.g. `quantization.emulate=true`."""

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

        `smallest_gemm` must be resolved.
        """
        assert self.smallest_gemm is not None, "the recipe is not resolved"
        numbered = re.match(r"blocks\.(\d+)\.", name)
        layer = int(numbered[1]) if numbered else None
        return (
            self.recipe != "none"
            and min(inputs, outputs) >= self.smallest_gemm
            and (layer is None or self.high_precision_first <= layer < layers - self.high_precision_last)
            and not any(fnmatchcase(name, pattern) for pattern in self.filter)
        )
