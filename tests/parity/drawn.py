"""Layouts drawn at random, among everything that must not change the curve."""

import random
from dataclasses import dataclass

from tests.parity.runs import LINES


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


def draw(chance: random.Random, most_ranks: int) -> Drawn:
    """One legal layout on at most `most_ranks` processes."""
    degrees = [(r, s, c) for r in (1, 2, 4) for s in (1, 2, 4, 8) for c in (1, 1, 2, 4) if 1 < r * s * c <= most_ranks]
    replicate, shard, context = chance.choice(degrees)
    data, kv_heads = replicate * shard, chance.choice([1, 2, 4])
    # Ulysses divides heads among the ranks that share a sequence.
    methods = ["ring", "allgather", *(["ulysses"] if kv_heads % context == 0 else [])]
    compiled = chance.random() < 0.25
    # A memory budget is for compiled blocks.
    parts = f"compile.components={chance.choice(['[blocks]', '[blocks,loss]'])}"
    layout = [
        f"parallelism.dp_replicate={replicate}",
        f"parallelism.dp_shard={shard}",
        f"parallelism.cp={context}",
        f"parallelism.cp_method={chance.choice(methods)}",
        f"training.micro_batch_size={chance.choice([size for size in (1, 2, 4) if 8 % (data * size) == 0])}",
        f"parallelism.reshard_after_forward={chance.choice(['always', 'never', 'all_but_last'])}",
        f"parallelism.prefetch_blocks={chance.choice([1, 2, 3])}",
        f"parallelism.cpu_offload={str(chance.random() < 0.2).lower()}",
        f"activation_checkpoint.mode={chance.choice([*MODES, *(['budget'] if compiled else [])])}",
        f"training.loss_chunk_tokens={chance.choice(['null', 37, 64, 100])}",
        *(["compile.enabled=true", "compile.backend=aot_eager", parts] if compiled else []),
    ]
    experiment = [
        f"model.tied_embeddings={str(chance.random() < 0.3).lower()}",
        f"model.kv_heads={kv_heads}",
        *(LINES if chance.random() < 0.3 else []),
        f"training.z_loss={chance.choice([0.0, 1e-3])}",
        f"model.vocab_size={chance.choice([320, 257, 263])}",
    ]
    return Drawn(tuple(experiment), tuple(layout))
