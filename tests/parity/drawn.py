"""Layouts drawn at random, among everything that must not change the curve.

Keys are drawn with little regard for each other, and what the rules accept is run: so a combination that is neither
refused nor correct shows itself.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.config.composing import experiment
from tests.parity.runs import LINES, SMALL
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.rules import violations


@dataclass(frozen=True)
class Drawn:
    """A layout, and the experiment that it computes."""

    experiment: tuple[str, ...]
    """Overrides that change what is computed."""
    layout: tuple[str, ...]
    """Overrides that do not."""

    def __str__(self) -> str:
        return " ".join((*self.experiment, *self.layout))


DEGREES = {
    "dp_replicate": (1, 1, 1, 2, 4),
    "dp_shard": (1, 1, 2, 2, 3, 4, 8),
    "cp": (1, 1, 1, 2, 3, 4),
    "tp": (1, 1, 2, 2, 3, 4),
    "pp": (1, 1, 2, 2, 3, 4),
}

Keys = dict[str, tuple[object, ...]]

STEPS: Keys = {
    "training.seq_len": (48, 64, 64, 96),
    "training.z_loss": (0.0, 1e-3),
    "training.global_batch_size": (8, 8, 12),
}

DECODER: Keys = {
    "model.heads": (4, 4, 6),
    "model.vocab_size": (320, 257, 263),
    "model.layers": (3, 4, 5, 6),
    "model.tied_embeddings": ("false", "false", "true"),
}

GROUPED: Keys = {"model.kv_heads": (1, 2, 2, 3, 4, 6), "model.head_dim": (16,)}

DENSE: Keys = {"model.ffn_dim": (96, 192, 256)}

EXPERTS: Keys = {
    "model.moe.experts": (4, 6, 8),
    "model.moe.active_experts": (1, 2, 3),
    "model.moe.ffn_dim": (64, 96, 128),
    "model.moe.balance.loss": ("switch", "sequence", "global_batch"),
    "model.moe.balance.coefficient": (1e-3, 1e-2),
}

ROUTERS: Keys = {
    "model.moe.shared_experts": (0, 0, 1),
    "model.moe.score": ("softmax", "sigmoid"),
    "model.moe.router_bias": ("false", "true"),
    "model.moe.balance.bias_rate": (0.0, 1e-2),
    "model.moe.groups": (1, 1, 2),
    "model.moe.active_groups": (1, 1, 2),
    "model.moe.group_score": ("max", "top2_sum"),
}

LATENT: Keys = {
    "model.q_lora_rank": ("null", 32, 48),
    "model.kv_lora_rank": (32, 48),
    "model.dense_layers": (0, 1, 2),
}

FAMILIES: dict[str, Keys] = {
    "llama_debug": DECODER | GROUPED | DENSE,
    "qwen3_debug": DECODER | GROUPED | DENSE,
    "olmo2_debug": DECODER | GROUPED | DENSE,
    "qwen3_moe_debug": DECODER | GROUPED | EXPERTS | ROUTERS,
    "deepseek_debug": DECODER | LATENT | EXPERTS | ROUTERS,
    "gpt_oss_debug": DECODER | GROUPED | EXPERTS | {"model.window": (8, 16)},
    "llama4_debug": DECODER
    | GROUPED
    | DENSE
    | EXPERTS
    | {"model.moe.active_experts": (1,), "model.chunk": (16, 24), "model.moe_every": (1, 2)},
}
"""Keys of each family's experiments."""

EXPERT_DEGREES = (1, 2, 2, 3, 4, 8)

LAYOUT = {
    "parallelism.cp_method": ("ring", "allgather", "ulysses"),
    "parallelism.cp_ulysses": (1, 1, 1, 2),
    "parallelism.sequence_parallel": ("true", "true", "false"),
    "parallelism.loss_parallel": ("true", "true", "false"),
    "parallelism.reshard_after_forward": ("auto", "auto", "always", "never", "all_but_last"),
    "parallelism.prefetch_blocks": (1, 2, 3),
    "parallelism.cpu_offload": ("false", "false", "false", "true"),
    "activation_checkpoint.mode": ("none", "full", "every_n", "selective", "budget"),
    "training.micro_batch_size": ("null", 1, 2, 4),
    "training.loss_chunk_tokens": ("null", "null", 37, 64, 100),
    "model.attention_backend": ("auto", "auto", "auto", "math"),
}

COMPILE = ("none", "none", "blocks", "all")


Training = Callable[[random.Random, Sequence[str]], list[str]]


def trained_on_text(chance: random.Random, shape: Sequence[str]) -> list[str]:
    """Further overrides of an experiment with these of a language model."""
    return ["optimizer.lr=5e-4", *_each(chance, STEPS), *(LINES if chance.random() < 0.3 else [])]


def draw(
    chance: random.Random,
    most_ranks: int,
    families: dict[str, Keys] = FAMILIES,
    trained: Training = trained_on_text,
) -> Drawn:
    """One layout on 2 to `most_ranks` processes that the rules accept; sizes and families are about equally likely.

    `trained` returns the overrides of the experiment beside the family's keys, of which it is given the drawn ones.
    """
    ranks = chance.choice([size for size in (2, 4, 8, 16) if size <= most_ranks])
    family = chance.choice([*families])
    while True:
        degrees = {axis: chance.choice(values) for axis, values in DEGREES.items()}
        if not ranks // 2 < math.prod(degrees.values()) <= ranks:
            continue
        drawn = _draw_keys(chance, families[family], family, degrees, trained)
        made = experiment(*SMALL[1:], *drawn.experiment, *drawn.layout)
        if not violations(made) and 1 < ResolvedLayout.of(resolve_layout(made, 1)).world_size <= most_ranks:
            return drawn


def _draw_keys(
    chance: random.Random,
    shapes: Keys,
    family: str,
    degrees: dict[str, int],
    trained: Training,
) -> Drawn:
    # Rounding grows from step to step with the learning rate, and with some of these shapes soon.
    computed = [f"model={family}", *_each(chance, shapes)]
    computed += trained(chance, computed)
    layout = [*(f"parallelism.{axis}={degree}" for axis, degree in degrees.items()), *_each(chance, LAYOUT)]
    if "model.moe.experts" in shapes:
        layout.append(f"parallelism.ep={chance.choice(EXPERT_DEGREES)}")
        layout.append(f"parallelism.etp={chance.choice((1, degrees['tp'], degrees['tp']))}")
    layout.append(f"compile={chance.choice(COMPILE)}")
    layout.append("compile.backend=aot_eager")
    if degrees["pp"] > 1:
        layout += _draw_pipeline(chance, degrees["pp"])
    return Drawn(tuple(computed), tuple(layout))


def _draw_pipeline(chance: random.Random, ranks: int) -> list[str]:
    keys = [f"parallelism.pp_schedule={chance.choice(list(SCHEDULES))}"]
    match chance.randrange(5):
        case 0:
            stages = ranks * chance.choice((1, 2))
            keys.append(f"parallelism.pp_layers=[{','.join(str(chance.randint(0, 2)) for _ in range(stages))}]")
        case 1:
            keys.append(f"parallelism.pp_layers_per_stage={chance.choice((1, 2))}")
        case 2:
            keys.append(f"parallelism.pp_last_stage_less={chance.choice((1, 2))}")
    if chance.random() < 0.3:
        keys.append(f"parallelism.pp_microbatches={chance.choice((1, 2, 4))}")
    return keys


def _each(chance: random.Random, keys: Keys) -> list[str]:
    return [f"{key}={chance.choice(values)}" for key, values in keys.items()]
