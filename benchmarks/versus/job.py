"""Task of one fresh process: a row with its steps and weights, and our configuration of it."""

import dataclasses
from typing import Any

from benchmarks.versus.cases import SEQ_LEN, SEQUENCES, Case, case_of, tiny

LR = 1e-4
"""Constant learning rate of both sides."""
TINY_SEQ_LEN = 64
"""Tokens of a sequence of a tiny run."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Task of one fresh process."""

    row: str
    """Row of the table, as in `case_of`."""
    warmup: int
    """Steps before timing."""
    timed: int
    """Timed steps."""
    tiny: bool = False
    """True for tiny shapes on a CPU."""
    layers: int | None = None
    """Number of layers in place of the case's; blocks share a graph, so one layer fills the compile caches."""
    weights: str | None = None
    """Hugging Face folder of the initial weights; None draws them."""
    tokenizer: str = "bytes"
    """`data.tokenizer` of both sides."""

    @property
    def steps(self) -> int:
        """Warm-up and timed steps."""
        return self.warmup + self.timed

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return TINY_SEQ_LEN if self.tiny else SEQ_LEN

    @property
    def case(self) -> Case:
        """Case of the row at this job's size."""
        case = tiny(case_of(self.row)) if self.tiny else case_of(self.row)
        if self.layers is None:
            return case
        return dataclasses.replace(
            case,
            model=(*case.model, f"model.layers={self.layers}"),
            peer_model={**case.peer_model, "n_layers": self.layers},
        )

    def overrides(self) -> list[str]:
        """Our full configuration."""
        return [
            *self.case.model,
            *(["cluster.device=cpu"] if self.tiny else ["training.mixed_precision=bf16"]),
            *(f"training.seq_len={self.seq_len}", f"training.global_batch_size={SEQUENCES}"),
            *(f"training.steps={self.steps}", "training.evaluate_every=0", "parallelism.dp_shard=1"),
            *(f"optimizer.lr={LR}", "optimizer.decay_vectors=true", "lr_schedule=constant"),
            *("lr_schedule.warmup_steps=0", f"data.tokenizer={self.tokenizer}", "checkpoint=none"),
            # Only the last row synchronizes, after the last timed step.
            f"tracking.log_every={self.steps}",
            *([] if self.weights is None else [f"checkpoint.initial={self.weights}"]),
            *self.case.ours,
        ]

    def experiment(self, *cluster: str) -> Any:
        """Resolved and checked experiment; `cluster` are overrides that come first."""
        from titan_exp.config.hydra.compose import compose
        from titan_exp.config.layout.resolved_layout import resolve_layout
        from titan_exp.config.schema.typed_config import to_experiment
        from titan_exp.rules import check

        return check(resolve_layout(to_experiment(compose([*cluster, *self.overrides()])), 1))
