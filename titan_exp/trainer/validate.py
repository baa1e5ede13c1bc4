"""Loss over the whole validation split, the same number in every layout."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from titan_exp.data.batch import Batch
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.progress_tracker import PROGRESS
from titan_exp.trainer.forward_backward import Model


@dataclass(frozen=True)
class ValidationResult:
    """Validation loss of one source."""

    loss: float
    """Mean over its tokens, in nats."""
    tokens: int
    """How many tokens that was."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate_sources(model: Model, sources: Mapping[str, Iterable[Batch]], mesh: Mesh) -> dict[str, float | int]:
    """Validation metrics: `validation_loss` over the tokens of all sources together, and of a
    mixture also `validation_loss/NAME` of each.

    Args:
        model: see `evaluate`.
        sources: this data rank's share of the split of each source, by name.
        mesh: see `evaluate`.
    """
    found = {name: evaluate(model, batches, mesh) for name, batches in sources.items()}
    tokens = sum(each.tokens for each in found.values())
    total = sum(each.loss * each.tokens for each in found.values() if each.tokens)
    # One source's own number, untouched by a multiplication and a division.
    whole = (
        next(iter(found.values()))
        if len(found) == 1
        else ValidationResult(total / tokens if tokens else math.nan, tokens)
    )
    return {
        "validation_loss": whole.loss,
        "validation_perplexity": whole.perplexity,
        "validation_tokens": whole.tokens,
        **{f"validation_loss/{name}": each.loss for name, each in found.items() if len(found) > 1},
    }


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch], mesh: Mesh) -> ValidationResult:
    """Run the model over a split.

    Args:
        model: put back into training mode afterwards.
        batches: this data rank's share; every rank has the same number of them.
        mesh: whose ranks take part.
    """
    for part in model.parts:
        part.eval()
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens, rest = 0, iter(batches)
    while group := list(islice(rest, model.eval_microbatches)):
        tokens += sum(model.objective.count(batch) for batch in group)
        total += model.loss_sum(group)
        PROGRESS.keep_alive()
    for part in model.parts:
        part.train()
    sums = torch.stack((total.cpu(), torch.tensor(float(tokens), dtype=torch.float64)))
    dist.all_reduce(sums, group=mesh.cpu_group)
    # Tokens were counted in whole rows, losses summed over this rank's part of them.
    loss, predicted = sums[0] / mesh.loss_replicas, sums[1] / mesh.batch_replicas
    return ValidationResult(float(loss / predicted) if predicted else math.nan, int(predicted))
