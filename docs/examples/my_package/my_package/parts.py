"""Parts of training: a probe, an early stop, and a schedule of masks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.data.batch import Batch
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.trainer.part import Part, Phase, Run, Step


class LogitProbe(Part):
    """Logs the largest attention logit of the batch at chosen steps, whatever the layout."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps, self.hooks, self.largest = set(steps), list[Any](), list[Tensor]()

    def begin(self, run: Run) -> None:
        modules = (module for part in run.state.model.parts for module in part.modules())
        self.attentions = [module for module in modules if isinstance(module, CausalAttention)]

    def due(self, step: int, *, last: bool) -> bool:
        return step in self.steps

    def before(self, step: int) -> None:
        if step in self.steps:
            self.hooks = [attention.register_forward_pre_hook(self.read) for attention in self.attentions]

    @torch.no_grad()
    def read(self, attention: nn.Module, given: tuple[Tensor, ...]) -> None:
        query, key = given[:2]  # [rows, heads, tokens, head_dim]
        logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        scale = attention.scale or query.shape[-1] ** -0.5
        self.largest.append(logits.masked_fill(hidden, -torch.inf).amax() * scale)

    def after(self, step: Step) -> dict[str, float] | None:
        if not self.hooks:
            return None
        for hook in self.hooks:
            hook.remove()
        largest, self.hooks, self.largest = torch.stack(self.largest).amax(), [], []
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # on all ranks, as every member of a part is called
        return {"max_logit": float(largest)}


class EarlyStop(Part):
    """Ends training when the validation loss has not fallen for `patience` evaluations."""

    phase = Phase.DECIDE

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.worse = patience, None, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "worse": self.worse}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.best, self.worse = (state["best"], state["worse"]) if state else (None, 0)

    def after(self, step: Step) -> dict[str, float] | None:
        loss = step.values.get("validation_loss")
        if loss is None:
            return None
        fell = self.best is None or loss < self.best
        self.best, self.worse = (loss, 0) if fell else (self.best, self.worse + 1)
        if self.worse == self.patience:
            step.stop(f"the validation loss has not fallen below {self.best:.4f} in {self.worse} evaluations")
        return {"evaluations_without_gain": self.worse}


class LateTokensFirst(Part):
    """Learns from the late tokens of a row first: the early ones, whose context is short, join step by step."""

    phase = Phase.ACT

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_batches(self, step: int, batches: Sequence[Batch]) -> Sequence[Batch]:
        tokens = batches[0].labels.shape[1]
        hidden = tokens // 2 * max(0, self.steps - step) // self.steps
        masked = torch.arange(tokens) < hidden
        return [replace(batch, labels=batch.labels.masked_fill(masked, IGNORE_INDEX)) for batch in batches]
