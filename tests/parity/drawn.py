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


AXES = {"dp_replicate": 4, "dp_shard": 8, "cp": 4, "tp": 4, "pp": 4}
"""Axes of the mesh, and the largest degree that is drawn: 8 sequences, 4 heads, 4 layers at least."""


def draw_degrees(chance: random.Random, most_ranks: int) -> dict[str, int]:
    """Degrees that multiply to a power of two, every size of the world being as likely as the others."""
    degrees = dict.fromkeys(AXES, 1)
    for _ in range(chance.randint(1, most_ranks.bit_length() - 1)):
        free = [axis for axis, most in AXES.items() if degrees[axis] < most]
        free = [axis for axis in free if axis[:2] != "dp" or degrees["dp_replicate"] * degrees["dp_shard"] < 8]
        degrees[chance.choice(free)] *= 2
    return degrees


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


def draw_exchange(chance: random.Random, degrees: dict[str, int], kv_heads: int) -> list[str]:
    """How ranks that share a sequence attend to each other's parts; heads of a rank divide among those that exchange
    them."""
    heads_of_a_rank = max(1, kv_heads // degrees["tp"])
    within = [degree for degree in (1, 2, 4) if degrees["cp"] % degree == 0 and heads_of_a_rank % degree == 0]
    if degrees["cp"] in within and chance.random() < 0.4:
        return ["parallelism.cp_method=ulysses"]
    method = chance.choice(["ring", "allgather"])
    return [f"parallelism.cp_method={method}", f"parallelism.cp_ulysses={chance.choice(within)}"]


def draw(chance: random.Random, most_ranks: int) -> Drawn:
    """One legal layout on at most `most_ranks` processes."""
    degrees, kv_heads, layers = draw_degrees(chance, most_ranks), chance.choice([1, 2, 4]), chance.choice([4, 5, 6])
    data = degrees["dp_replicate"] * degrees["dp_shard"]
    size = chance.choice([size for size in (1, 2, 4) if 8 % (data * size) == 0])
    cut, split = draw_pipeline(chance, degrees["pp"], layers, 8 // data // size)
    compiled, chunk = chance.random() < 0.25, chance.choice(["null", 37, 64, 100])
    modes = [*(mode for mode in MODES if not (split and mode == "selective")), *(["budget"] if compiled else [])]
    parts = f"compile.components={chance.choice(['[blocks]', '[blocks,loss]'])}"
    layout = [
        *(f"parallelism.{axis}={degree}" for axis, degree in degrees.items() if axis != "pp"),
        f"parallelism.sequence_parallel={chance.choice(['true', 'false'])}",
        f"parallelism.loss_parallel={chance.choice(['true', 'false']) if chunk == 'null' else 'true'}",
        *draw_exchange(chance, degrees, kv_heads),
        *cut,
        f"training.micro_batch_size={size}",
        f"parallelism.reshard_after_forward={'auto' if split else chance.choice(RESHARD)}",
        f"parallelism.prefetch_blocks={chance.choice([1, 2, 3])}",
        f"parallelism.cpu_offload={str(chance.random() < 0.2).lower()}",
        f"activation_checkpoint.mode={chance.choice(modes)}",
        f"training.loss_chunk_tokens={chunk}",
        *(["compile.enabled=true", "compile.backend=aot_eager", parts] if compiled else []),
    ]
    experiment = [
        # Rounding grows from step to step with the learning rate, and with some of these shapes soon.
        "optimizer.lr=5e-4",
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
