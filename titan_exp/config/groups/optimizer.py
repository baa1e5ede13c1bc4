"""Groups `optimizer` and `lr_schedule`."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Ratio

Role = Literal["embedding", "head", "matrix", "vector", "expert"]
"""Kind of a parameter: token embedding, LM head, weight of a linear layer (a router's too), one-dimensional (norm,
bias), or stacked weights of experts."""

MOMENT_BLOCK = 32
"""Block size of 8-bit AdamW moments: numbers of a row that share a scale."""


Betas = Annotated[tuple[Annotated[float, Interval(ge=0, lt=1)], ...], Len(2, 2)]
"""Decay rates of the first and second moment."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with hyperparameters of their own, in place of the optimizer's and of their role's."""

    match: Annotated[tuple[str, ...], Len(1)]
    """Full names of the group's parameters, or patterns (`blocks.0.*`, `*.router.weight`), or roles."""
    lr_scale: NonNegativeFloat | None = None
    """Factor of the learning rate; null takes the role's."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; null takes the role's."""
    betas: Betas | None = None
    """Decay rates of AdamW's moments; null takes the optimizer's."""
    max_grad_norm: PositiveFloat | None = None
    """Norm above which the group's gradients are scaled down to it. `training.max_grad_norm` then limits the norm of
    the other parameters. null counts the group in that norm."""
    frozen: bool = False
    """True if the parameters stay as they are, without gradients and optimizer state."""

    def has(self, name: str, role: str) -> bool:
        """True if a parameter with this name and role is in the group."""
        return any(self.matches(pattern, name, role) for pattern in self.match)

    @staticmethod
    def matches(pattern: str, name: str, role: str) -> bool:
        """True if an element of `match` is this role, or matches this name."""
        return pattern == role or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class OptimizerConfig:
    """Fields of every optimizer. Each adds its own, here where its file of `titan_exp/optim` holds an update too, which
    imports torch; composing does not."""

    name: str
    """Optimizer: a file of `titan_exp/optim` (`adamw`, `muon`, ...), or an import path of your own.

    The path leads to a module with the same public names, or to a `torch.optim.Optimizer` class, which is called with
    parameter groups, `lr` and `options`. E.g. `optimizer=adamw optimizer.name=torch.optim.NAdam`."""
    lr: PositiveFloat
    """Peak learning rate. E.g. `optimizer.lr=3e-4`."""
    weight_decay: NonNegativeFloat
    """Decoupled weight decay: each step shrinks weights by it, times the learning rate. SGD adds it to the gradient
    instead. E.g. `optimizer.weight_decay=0.01`."""
    decay_vectors: bool
    """True if weight decay also applies to one-dimensional parameters (norms, biases).
    E.g. `optimizer.decay_vectors=true`."""
    lr_scales: dict[Role, NonNegativeFloat] = field(default_factory=dict)
    """Factors of the learning rate by role: `embedding`, `head`, `matrix`, `vector`, `expert`. A role without one has
    1, and 0 leaves its parameters as they are. E.g. `+optimizer.lr_scales.expert=0.5`."""
    weight_decays: dict[Role, NonNegativeFloat] = field(default_factory=dict)
    """Weight decay by role, which replaces `weight_decay` and `decay_vectors` there.
    E.g. `+optimizer.weight_decays.embedding=0`."""
    groups: dict[str, ParameterGroup] = field(default_factory=dict)
    """Parameter groups with values of their own, each under a name that you choose: `match` has names, patterns or
    roles, and the values are `lr_scale`, `weight_decay`, `betas`, `max_grad_norm` or `frozen`. A parameter can be in
    one group only. E.g. `+optimizer.groups.gates='{match:[*.router.weight],lr_scale:0.1}'`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for an optimizer class of your own. E.g. `+optimizer.options.rho=0.1`."""

    def group_of(self, name: str, role: Role) -> ParameterGroup | None:
        """Group of a parameter; None if it is in none."""
        return next((group for group in self.groups.values() if group.has(name, role)), None)

    @property
    def max_logit(self) -> float | None:
        """Attention logit to which QK-Clip limits every head; None does not."""
        return None

    @property
    def is_scale_invariant(self) -> bool:
        """True if updates do not depend on the scale of gradients, as Adam's do not: parametrizations by width and
        depth have rules for such optimizers."""
        return False

    def matrix_scale(self, rows: float, columns: float) -> float | None:
        """Spectral norm of a matrix's update at a learning rate of 1; None if updates are elementwise, as Adam's."""
        return None

    @property
    def max_state(self) -> float | None:
        """Upper bound of the numbers of optimizer state per parameter; None if it is unknown."""
        return None

    @property
    def averages_weights(self) -> bool:
        """True if the weights of a run are an average already, so that `weight_average` has nothing to add."""
        return False

    @property
    def sends_messages(self) -> bool:
        """True if ranks that share a weight exchange parts of it, or sums over it, in an update."""
        return False

    @property
    def costliest(self) -> "OptimizerConfig":
        """Configuration whose every step takes as much memory and work as this one's costliest: the planner's."""
        return self


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Fields of AdamW, which rules and the planner read."""

    betas: Betas
    """Decay rates of AdamW's first and second moment. E.g. `optimizer.betas='[0.9,0.99]'`."""
    eps: PositiveFloat
    """Epsilon, which is added to AdamW's denominator. E.g. `optimizer.eps=1e-15`."""
    implementation: Literal["auto", "fused", "foreach", "for_loop", "triton"]
    """AdamW kernel: torch's `fused`, `foreach` or `for_loop`, or `triton`, our kernel for CUDA that clips and updates
    in one pass over memory. `auto` takes triton where it runs, and else fused.

    `fused` is the fastest of torch's own on CPU and CUDA. On one data rank, `triton` reads bf16 gradients and writes
    bf16 weights in the same pass. `auto` takes it on CUDA with fp32 or bf16 moments, if Triton is installed and nothing
    is offloaded. A run's config and log name the kernel that runs. E.g. `optimizer.implementation=fused`."""
    state_precision: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Precision of AdamW's moments, which take 4 bytes per number in `fp32`, 2 in `bf16`, and 1.125 in `int8` and
    `fp8`. The update is computed in fp32.

    `bf16` loses changes of the second moment below 2^-9 of it, so that betas near 1 learn it late. `int8` (256 values,
    denser around zero) and `fp8` (e4m3, and the root of the second moment) have a scale for every 32 numbers of a row,
    and norms stay in fp32. All but `fp32` update one parameter at a time, whatever `implementation` is, except `bf16`
    with `triton`. E.g. `optimizer.state_precision=bf16`."""

    @property
    def max_state(self) -> float | None:
        """Two moments."""
        return 2

    @property
    def is_scale_invariant(self) -> bool:
        """True: gradients are divided by their root mean square."""
        return True


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamWConfig(OptimizerConfig):
    """Fields of schedule-free AdamW, for a learning rate that is constant after its warm-up."""

    betas: Annotated[tuple[Annotated[float, Interval(gt=0, lt=1)], ...], Len(2, 2)]
    """Interpolation and decay rate: the share of the averaged weights x in the point y at which gradients are computed,
    and the decay rate of the second moment. E.g. `optimizer.betas='[0.95,0.99]'`."""
    eps: PositiveFloat
    """Epsilon, which is added to the denominator. E.g. `optimizer.eps=1e-15`."""
    averaging_power: Annotated[float, Interval(ge=0)]
    """Exponent p of a step's weight in the average, (largest learning rate so far)^p, so that steps of the warm-up
    count less. E.g. `optimizer=schedule_free_adamw optimizer.averaging_power=0`."""

    @property
    def max_state(self) -> float | None:
        """The weights z that steps are added to, and the second moment."""
        return 2

    @property
    def averages_weights(self) -> bool:
        """True: evaluations and checkpoints have the averaged weights x."""
        return True


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Fields of Lion, whose learning rate is three to ten times smaller than AdamW's."""

    betas: Betas
    """Share of the momentum in the update's direction, and decay rate of the momentum.
    E.g. `optimizer=lion optimizer.betas='[0.95,0.98]'`."""
    state_precision: Literal["fp32", "bf16"]
    """Precision of the momentum, `fp32` or `bf16`. The update is computed in fp32.
    E.g. `optimizer=lion optimizer.state_precision=bf16`."""

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are signs, whose rules are Adam's (Yang and Littwin 2023, arXiv 2308.01814)."""
        return True

    @property
    def max_state(self) -> float | None:
        """The momentum."""
        return 1


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Fields of Adafactor; `lr` is relative to the root mean square of a matrix, as in torch's."""

    beta2_decay: Annotated[float, Interval(lt=0)]
    """Exponent of the step in the decay rate of the second moment, which is 1 - step ** beta2_decay.
    E.g. `optimizer=adafactor optimizer.beta2_decay=-0.5`."""
    eps: PositiveFloat
    """Lower bound of the root of a second moment. E.g. `optimizer=adafactor optimizer.eps=1e-8`."""
    min_rms: PositiveFloat
    """Lower bound of a parameter's root mean square, which the learning rate is relative to.
    E.g. `optimizer=adafactor optimizer.min_rms=1e-2`."""
    clip_threshold: PositiveFloat
    """Upper bound of an update's root mean square, before the learning rate.
    E.g. `optimizer=adafactor optimizer.clip_threshold=2.0`."""

    @property
    def sends_messages(self) -> bool:
        """True: means are over whole rows and columns."""
        return True

    @property
    def max_state(self) -> float | None:
        """A second moment in vectors; less in matrices."""
        return 2


@dataclass(frozen=True, kw_only=True)
class MatrixOptimizerConfig(OptimizerConfig):
    """Fields of an optimizer of matrices, which leaves all other parameters to AdamW."""

    betas: Betas
    """Decay rates of AdamW's first and second moment, for embedding, head and vectors.
    E.g. `optimizer.betas='[0.9,0.99]'`."""
    eps: PositiveFloat
    """Epsilon, which is added to AdamW's denominator, for embedding, head and vectors. E.g. `optimizer.eps=1e-15`."""

    @property
    def sends_messages(self) -> bool:
        """True: an update needs whole matrices or their factors."""
        return True


@dataclass(frozen=True, kw_only=True)
class SplitMatrixOptimizerConfig(MatrixOptimizerConfig):
    """Fields of an optimizer of matrices that may split fused weights."""

    split_attention: Literal["fused", "projection", "head"]
    """Division of fused attention weights into matrices that are updated alone: the whole weight (`fused`), each of
    queries, keys and values (`projection`), or each `head` of them.
    E.g. `optimizer=muon optimizer.split_attention=head`."""
    split_feed_forward: Literal["fused", "projection"]
    """Division of the fused weight of gate and up into matrices that are updated alone: the whole weight (`fused`), or
    each of the two (`projection`). E.g. `optimizer=muon optimizer.split_feed_forward=fused`."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(SplitMatrixOptimizerConfig):
    """Fields of Muon."""

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    """Decay rate of a matrix's momentum. E.g. `optimizer=muon optimizer.momentum=0.9`."""
    nesterov: bool
    """True if the momentum is Nesterov's. E.g. `optimizer=muon optimizer.nesterov=false`."""
    newton_schulz_steps: PositiveInt
    """Number of Newton–Schulz iterations. E.g. `optimizer=muon optimizer.newton_schulz_steps=6`."""
    precision: Literal["bf16", "fp32"]
    """Precision of the Newton–Schulz iteration and of the messages with matrices. `bf16` is as published. With `fp32`,
    every layout computes one device's update to rounding. E.g. `optimizer=muon optimizer.precision=bf16`."""
    scale: Literal["match_rms_adamw", "original", "none"]
    """Factor of a matrix's learning rate: `match_rms_adamw` is 0.2 · sqrt(max(rows, columns)), `original` is
    sqrt(max(1, rows / columns)), and `none` is 1.

    The first makes updates as large as AdamW's, so that one learning rate serves all parameters (Liu et al. 2025).
    E.g. `optimizer=muon optimizer.scale=original`."""

    qk_clip: PositiveFloat | None = None
    """QK-Clip (Kimi Team 2025): largest attention logit of a head. If a step's largest logit exceeds it, the head's
    queries and keys are each scaled down after the update, by the square root of the ratio. null does not clip.
    E.g. `optimizer=muon optimizer.qk_clip=100`."""

    @property
    def max_logit(self) -> float | None:
        """`qk_clip`."""
        return self.qk_clip

    def matrix_scale(self, rows: float, columns: float) -> float:
        """`scale` of a matrix; its orthogonalized update has norm 1."""
        match self.scale:
            case "match_rms_adamw":
                return 0.2 * max(rows, columns) ** 0.5
            case "original":
                return max(1.0, rows / columns) ** 0.5
            case "none":
                return 1.0

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are orthogonalized; but a head is not a matrix that grows with the width."""
        return self.split_attention != "head"

    @property
    def max_state(self) -> float | None:
        """AdamW's moments; a matrix has a momentum only."""
        return 2


@dataclass(frozen=True, kw_only=True)
class DionConfig(MatrixOptimizerConfig):
    """Fields of Dion; a fused projection is one matrix."""

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    """Share of the low-rank part that stays in the momentum after an update. The rest of the momentum stays whole
    (error feedback). E.g. `optimizer=dion optimizer.momentum=0.9`."""
    rank_fraction: Annotated[float, Interval(gt=0, le=1)]
    """Rank of the update, as a fraction of a matrix's smaller side.
    E.g. `optimizer=dion optimizer.rank_fraction=0.5`."""
    scale: Literal["match_rms_adamw", "original", "none"]
    """Factor of a matrix's learning rate: `match_rms_adamw` is 0.2 · sqrt(max(rows, columns)), `original` is sqrt(rows
    / columns), and `none` is 1. E.g. `optimizer=dion optimizer.scale=original`."""

    def matrix_scale(self, rows: float, columns: float) -> float:
        """`scale` of a matrix; its orthogonalized update has norm 1."""
        match self.scale:
            case "match_rms_adamw":
                return 0.2 * max(rows, columns) ** 0.5
            case "original":
                return (rows / columns) ** 0.5
            case "none":
                return 1.0

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are orthonormalized."""
        return True

    @property
    def max_state(self) -> float | None:
        """The momentum, and at most as many numbers of the right factor."""
        return 2


@dataclass(frozen=True, kw_only=True)
class SoapConfig(SplitMatrixOptimizerConfig):
    """Fields of SOAP."""

    betas: Betas
    """Decay rates of the first moment, and of the second moment and the covariances. Parameters that are not matrices
    take them for AdamW. E.g. `optimizer.betas='[0.9,0.99]'`."""
    eps: PositiveFloat
    """Epsilon, which is added to the denominator. E.g. `optimizer.eps=1e-15`."""
    precondition_every: PositiveInt
    """Steps between power iterations, which update the eigenbases.
    E.g. `optimizer=soap optimizer.precondition_every=1`."""
    max_dim: PositiveInt
    """Largest side of a matrix that has a covariance and an eigenbasis. A larger side is not rotated.
    E.g. `optimizer=soap optimizer.max_dim=4096`."""
    sides: Literal["both", "smaller"]
    """Sides of a matrix that are rotated: `both`, or only the `smaller` one, which takes less memory and work.
    E.g. `optimizer=soap optimizer.sides=smaller`."""

    @property
    def max_state(self) -> float | None:
        """Two moments, and two numbers per element of a side's covariance."""
        return 4 if self.sides == "smaller" else 4 + 2 * self.max_dim

    @property
    def costliest(self) -> "SoapConfig":
        """A power iteration in every step."""
        return replace(self, precondition_every=1)


def keeps_fp32_moments(config: OptimizerConfig) -> bool:
    """True if the optimizer is AdamW with fp32 moments, which `optimizer.state_precision` can shrink."""
    return isinstance(config, AdamWConfig) and config.name == "adamw" and config.state_precision == "fp32"


@dataclass(frozen=True)
class LRScheduleConfig:
    """Learning rate over steps: warm-up to the peak, stable, then decay towards the floor; once or in cycles."""

    warmup_steps: Count
    """Steps of linear warm-up. Step 1 is already above 0, and the last of them is exactly at the peak.
    E.g. `lr_schedule.warmup_steps=2000`."""
    decay_steps: Count
    """Steps of decay at the end of the run, or at the end of every cycle, which they may fill. The step after the last
    of them would be at the floor. Defaults follow `warmup_steps`. Give a number if you compare warm-ups, so that only
    one thing changes. E.g. `lr_schedule.decay_steps=10000`."""
    decay: str
    """Shape of the decay: a function of `Decays` in `titan_exp/optim/lr_schedule.py`, or the import path of a function
    of your own. It maps progress in [0, 1] to a factor in [0, 1]. E.g. `lr_schedule.decay=sqrt`."""
    min_lr_ratio: Ratio
    """Floor of the decay, as a fraction of the rate before it. E.g. `lr_schedule.min_lr_ratio=0.1`."""
    power: NonNegativeFloat = 0.0
    """Exponent of the stable phase, whose rate is peak · (warmup_steps / step)^power: 0 holds the peak, and 0.5 is the
    inverse square root.

    The rate does not depend on the length of the run, so that a decay may branch off anywhere.
    E.g. `lr_schedule.power=0.5`."""
    cycles: PositiveInt = 1
    """Number of equal cycles after warm-up. Each ends with a decay, and the next one begins at the stable rate again.
    E.g. `lr_schedule.cycles=4`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for a decay function of your own. E.g. `+lr_schedule.options.power=2`."""
