"""Layouts drawn at random, among everything that must not change the curve."""

import random
from dataclasses import dataclass

from tests.parity.runs import LINES
from titan_exp.config.schedule import SCHEDULES


@dataclass(frozen=True)
class Drawn:
    """A layout, and the experiment that it computes."""

    experiment: tuple[str, ...]
    """Overrides that change what is computed."""
    layout: tuple[str, ...]
    """Overrides that do not."""

    def __str__(self) -> str:
        return " ".join((*self.experiment, *self.layout))


MODES = ["none", "full", "every_n", "selective"]
"""Ways to recompute; `budget` is for compiled blocks."""


RESHARD = ["auto", "always", "never", "all_but_last"]
"""When gathered parameters are freed."""


def draw_pipeline(chance: random.Random, ranks: int, layers: int, microbatches: int) -> tuple[list[str], bool]:
    """How a model of so many layers is cut for so many pipeline ranks; and whether backward passes are in two."""
    if ranks == 1:
        return [], False
    names = [
        name
        for name, schedule in SCHEDULES.items()
        if schedule.takes(microbatches, ranks) and layers >= ranks * schedule.stages_per_rank
    ]
    name = chance.choice(names)
    stages = ranks * SCHEDULES[name].stages_per_rank
    borders = sorted(chance.sample(range(1, layers), stages - 1))
    explicit = [end - start for start, end in zip([0, *borders], [*borders, layers], strict=True)]
    splits = [[], [f"parallelism.pp_layers=[{','.join(map(str, explicit))}]"]]
    return [
        f"parallelism.pp={ranks}",
        f"parallelism.pp_schedule={name}",
        *chance.choice(splits),
    ], SCHEDULES[name].splits_backward


def draw(chance: random.Random, most_ranks: int) -> Drawn:
    """One legal layout on at most `most_ranks` processes."""
    degrees = [
        (r, s, c, p)
        for r in (1, 2, 4)
        for s in (1, 2, 4, 8)
        for c in (1, 1, 2, 4)
        for p in (1, 2, 4)
        if 1 < r * s * c * p <= most_ranks
    ]
    replicate, shard, context, ranks = chance.choice(degrees)
    data, kv_heads = replicate * shard, chance.choice([1, 2, 4])
    # Ulysses divides heads among the ranks that share a sequence.
    methods = ["ring", "allgather", *(["ulysses"] if kv_heads % context == 0 else [])]
    compiled = chance.random() < 0.25
    size = chance.choice([size for size in (1, 2, 4) if 8 % (data * size) == 0])
    layers = chance.choice([4, 5, 6])
    cut, split = draw_pipeline(chance, ranks, layers, 8 // data // size)
    modes = [mode for mode in MODES if not (split and mode == "selective")]
    layout = [
        f"parallelism.dp_replicate={replicate}",
        f"parallelism.dp_shard={shard}",
        f"parallelism.cp={context}",
        f"parallelism.cp_method={chance.choice(methods)}",
        f"training.micro_batch_size={size}",
        f"parallelism.reshard_after_forward={'auto' if split else chance.choice(RESHARD)}",
        f"parallelism.prefetch_blocks={chance.choice([1, 2, 3])}",
        f"parallelism.cpu_offload={str(chance.random() < 0.2).lower()}",
        f"activation_checkpoint.mode={chance.choice([*modes, *(['budget'] if compiled else [])])}",
        f"training.loss_chunk_tokens={chance.choice(['null', 37, 64, 100])}",
        *(["compile.enabled=true", "compile.backend=aot_eager"] if compiled else []),
        *cut,
    ]
    experiment = [
        f"model.layers={layers}",
        # Deeper and as narrow, they amplify rounding at the usual learning rate, on one device too.
        *(["optimizer.lr=5e-4"] if layers > 4 else []),
        f"model.tied_embeddings={str(chance.random() < 0.3).lower()}",
        f"model.kv_heads={kv_heads}",
        *(LINES if chance.random() < 0.3 else []),
        f"training.z_loss={chance.choice([0.0, 1e-3])}",
        f"model.vocab_size={chance.choice([320, 257, 263])}",
    ]
    return Drawn(tuple(experiment), tuple(layout))
