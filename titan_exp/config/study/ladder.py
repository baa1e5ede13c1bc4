"""Ladder of sizes: the key `ladder` of a study, published rules for batch and rate, and the steps of its rungs.

Sources: OLMo-core's ladder (batch, rate and warm-up by parameters) and nanochat's (batch, rate and weight decay by
tokens). Both count non-embedding parameters here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from titan_exp.config.errors.explain_values import Check, Read, Unfit
from titan_exp.config.errors.user_error import listed

FEWEST_SIZES = 3
"""Fewest sizes of which a law can be fitted."""
WHOLE_BATCH = 8
"""Number of sequences of which a rule's batch is a multiple, so that data-parallel ranks can share it."""
Rule = Literal["none", "olmo", "nanochat"]


def read_fraction(value: Any) -> Any:
    """Fraction of a number, or of a text such as 1/3. Raises Unfit for anything else."""
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise Unfit("must be a number, or a fraction such as 1/3") from None


def _rise(values: Sequence[Fraction]) -> None:
    if values and (sorted(set(values)) != list(values) or values[0] <= 0):
        found = ", ".join(map(str, sorted({value for value in values if value > 0})))
        raise Unfit("must be numbers above 0, each larger than the one before", f"write [{found}]")


Share = Annotated[Fraction, Read(read_fraction)]
Sizes = Annotated[tuple[Share, ...], Check(_rise)]


@dataclass(frozen=True)
class Ladder:
    """Ladder of sizes: each point of the axes at several sizes and lengths, from which `compare` fits a scaling law."""

    tokens_per_parameter: Annotated[Sizes, MinLen(1)]
    """Lengths, in tokens per non-embedding parameter. With one, the law is over FLOPs alone.
    E.g. `tokens_per_parameter: [10, 20, 40]`."""
    multiples: Sizes = ()
    """Sizes as multiples of the model's width and depth. E.g. `multiples: [1/4, 1/2, 1]`."""
    parameters: Sizes = ()
    """Sizes in non-embedding parameters, instead of `multiples`. Each is the shape within a tenth of the number that is
    most like the model. E.g. `parameters: [1e6, 4e6, 16e6]`."""
    width: tuple[str, ...] = ()
    """Keys of `model` that grow with the width; by default those that it has of `dim`, `heads`, `kv_heads`, `ffn_dim`
    and `moe.ffn_dim`. E.g. `width: [dim, heads, kv_lora_rank]`."""
    depth: tuple[str, ...] = ("layers",)
    """Keys of `model` that grow with the depth, each to the nearest whole number; none keeps the depth.
    E.g. `depth: []`."""
    rule: Rule = "none"
    """Rule for what changes with size: `olmo` sets batch, learning rate and warm-up by parameters, `nanochat` batch,
    learning rate and weight decay by tokens, relative to values that suit its `d12`. `none` leaves them to the study,
    as for `parametrization=mup`. E.g. `rule: olmo`."""
    branches: bool = False
    """True if the shorter runs of a size branch off the longest, where their decay begins, for `lr_schedule=wsd`.
    E.g. `branches: true`."""
    metric: str | None = None
    """Loss at the end of a run: the study's first metric by default. E.g. `metric: validation_loss`."""

    def __post_init__(self) -> None:
        sizes, key = (self.parameters, "parameters") if self.parameters else (self.multiples, "multiples")
        example = "multiples: [1/4, 1/2, 1]"
        if bool(self.multiples) == bool(self.parameters):
            raise Unfit("a ladder has its sizes by exactly one of multiples and parameters", example)
        if len(sizes) < FEWEST_SIZES:
            larger = [*sizes, *(sizes[-1] * 2**power for power in range(1, FEWEST_SIZES))][:FEWEST_SIZES]
            reason = f"a scaling law takes {FEWEST_SIZES} sizes or more, and this ladder has {len(sizes)}"
            raise Unfit(reason, f"{key}: [{', '.join(map(str, larger))}]")
        if self.branches and len(self.tokens_per_parameter) < 2:
            raise Unfit("with one length there is no shorter run to branch off", "branches: false")
        if self.rule == "nanochat" and self.branches:
            reason = "the batch of rule nanochat grows with the tokens, so that runs of one size share no trunk"
            raise Unfit(reason, "branches: false")

    @property
    def sets(self) -> tuple[str, ...]:
        """Keys that the ladder sets at every rung, and the study cannot."""
        batch = ("training.global_batch_size",) if self.rule != "none" else ()
        by_rule = ("optimizer.lr", "lr_schedule.warmup_steps") if self.rule == "olmo" else ()
        return ("training.steps", "training.stop_after", *batch, *by_rule)


@dataclass(frozen=True)
class LadderRung:
    """One run of a ladder, as planned and recorded."""

    scale: str
    """Size as in labels: `multiple=1/2` or `parameters=1M`."""
    per_parameter: str
    """Length in tokens per parameter."""
    arm: str
    """Values of the study's axes; empty without axes."""
    parameters: int
    """Non-embedding parameters N of the baseline at this size; of experts, those that a token uses."""
    tokens: int
    """Tokens D from the beginning of the trunk."""
    flops_per_token: float
    """FLOPs of a token in this arm, head and attention included."""
    begins: int
    """Step at which the run branches off its trunk; 0 for a run of its own."""
    steps: int
    """Steps from the beginning of the trunk."""
    sequences: int
    """Sequences per step."""

    @property
    def flops(self) -> float:
        """FLOPs C of all these tokens."""
        return self.flops_per_token * self.tokens


def olmo_batch(parameters: float) -> float:
    """Tokens per step of OLMo-core's ladder."""
    return 2048 * 160 * (parameters / 108e6) ** (2 / 3)


def olmo_rate(parameters: float) -> float:
    """Peak learning rate of OLMo-core's ladder. Its warm-up has as many tokens as the model has parameters."""
    return 0.0047 * (parameters / 108e6) ** (-1 / 3) / 2


NANOCHAT_BATCH, NANOCHAT_TOKENS = 2**19, 12 * 110_100_480
"""Tokens per step and tokens of nanochat's `d12`, for which its learning rate and weight decay are made."""


def nanochat_batch(tokens: float) -> float:
    """Tokens per step of nanochat's ladder, before rounding."""
    return NANOCHAT_BATCH * (tokens / NANOCHAT_TOKENS) ** 0.383


def nanochat_factors(batch: float, tokens: float) -> tuple[float, float]:
    """Factors of learning rate and weight decay, for a batch in tokens."""
    root = math.sqrt(batch / NANOCHAT_BATCH)
    return root, root * NANOCHAT_TOKENS / tokens


def batch_sequences(tokens: float, seq_len: int) -> int:
    """Sequences of a rule's batch."""
    return max(1, round(tokens / seq_len / WHOLE_BATCH)) * WHOLE_BATCH


@dataclass(frozen=True)
class Lengths:
    """Steps of the runs of one size, shortest first."""

    steps: tuple[int, ...]
    """Steps of each, trunk included."""
    decays: tuple[int, ...]
    """Steps of decay at the end of each."""
    branches: tuple[int, ...]
    """Steps at which the decays of all but the longest begin."""

    @property
    def interval(self) -> int:
        """Steps between checkpoints of the trunk, a divisor of every branch."""
        return math.gcd(*self.branches)


def lengths(parameters: int, per_parameter: Sequence[Fraction], batch_tokens: int, decay: float) -> Lengths:
    """Steps for each number of tokens per parameter, all multiples of a shared unit, so that a few checkpoints of the
    trunk serve all branches. `decay` is the share of a run in which its rate decays."""
    common = math.lcm(*(each.denominator for each in per_parameter))
    unit = Fraction(math.gcd(*(int(each * common) for each in per_parameter)), common)
    whole = max(2, round(unit * parameters / batch_tokens))
    falling = min(max(1, round(decay * whole)), whole - 1)
    counts = [int(each / unit) for each in per_parameter]
    begins = tuple(count * (whole - falling) for count in counts[:-1])
    return Lengths(tuple(count * whole for count in counts), tuple(count * falling for count in counts), begins)


def nearest_multiples(wanted: Sequence[Fraction], allowed: Sequence[Fraction]) -> str:
    """Line for a study with multiples that a model can have, the nearest to those wanted, at least as many as a law
    needs."""
    found = {min(allowed, key=lambda other: abs(other - multiple)) for multiple in wanted}
    found |= set([other for other in allowed if other not in found][: max(0, FEWEST_SIZES - len(found))])
    return f"multiples: [{', '.join(map(str, sorted(found)))}]"


def set_by_ladder(ladder: Ladder, keys: Sequence[str]) -> str:
    """Reason for refusing a study that sets keys of the ladder; empty if it sets none."""
    taken = [key for key in keys if key in ladder.sets]
    if not taken:
        return ""
    rule = "" if taken == ["training.steps"] else f", with rule: {ladder.rule}"
    return f"the ladder sets {listed(dict.fromkeys(taken), 'and')} at every rung{rule}. Leave {listed(taken)} out"
