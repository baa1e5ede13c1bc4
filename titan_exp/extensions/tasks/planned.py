"""Scores of tasks in a plan: the largest batch, and the number of batches."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.source_check import SMALL_BYTES
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import Row, RowBatch, encode, row_batches
from titan_exp.extensions.tasks.formats import Task
from titan_exp.extensions.tasks.tasks import tasks_of
from titan_exp.plan.evaluation import Evaluated

if TYPE_CHECKING:
    from titan_exp.trainer.train_state import TrainState


def evaluations(experiment: Experiment) -> Iterator[Evaluated]:
    """Evaluation of a run that scores its tasks itself, for its plan."""
    evaluation: Any = experiment.evaluation
    if evaluation.where == "training":
        yield TaskScoring(experiment, "tasks")


class TaskScoring(Evaluated):
    """Log-likelihoods of all tasks' rows."""

    @property
    def inputs(self) -> Any:
        """Versions of the tasks."""
        return [task.digest for task in self._tasks]

    def passes(self) -> int | str:
        """Passes over the batches, unless the tasks are too large to encode them for a plan."""
        group = ResolvedLayout.of(self.experiment).indivisible_microbatches
        return -(-len(self._batches) // group) or "the tasks are encoded when training begins"

    def pass_of(self, experiment: Experiment, state: "TrainState") -> Callable[[], object]:
        """Pass over batches of the largest shape, with as many scored tokens as any has."""
        import torch

        from titan_exp.extensions.tasks.scorer import ScoredBatch, Scorer

        size, length, scored = ResolvedLayout.of(experiment).micro_batch_size, experiment.training.seq_len, 0
        if self._batches:
            _, size, length = max(self._batches, key=lambda batch: batch.size * batch.length)
            lengths = [len(row.tokens) - row.first for row in self._rows]
            scored = max(sum(lengths[one] for group in batch.groups for one in group) for batch in self._batches)
        scorer = Scorer(state.model, state.mesh, experiment)

        class Fake(ScoredBatch):
            def held(self, scored: torch.Tensor) -> torch.Tensor:
                return scored[:, : -(-scored.shape[1] // experiment.parallelism.cp)]

        def run() -> object:
            tokens = torch.zeros((size, length), dtype=torch.int64)
            number = scored or size * length
            batch = Fake(tokens, tokens, None, None, scored=torch.zeros((3, number), dtype=torch.int64))
            with scorer.scoring(1):
                return state.model.loss_sum([batch] * state.model.eval_microbatches)

        return run

    @cached_property
    def _tasks(self) -> Sequence[Task]:
        return tasks_of(self.experiment)

    @cached_property
    def _rows(self) -> Sequence[Row]:
        """Rows of all tasks; none if their texts are large."""
        texts = (text for task in self._tasks for item in task.items for pair in item.choices for text in pair)
        if sum(map(len, texts)) > SMALL_BYTES:
            return []
        tokenizer, length = build_tokenizer(self.experiment.data), self.experiment.training.seq_len
        encoded = [encode(task, tokenizer, length) for task in self._tasks]
        return [row for one in encoded for row in (*one.rows, *one.neutral)]

    @cached_property
    def _batches(self) -> Sequence[RowBatch]:
        return [*row_batches(self._rows, self.experiment, (0, ResolvedLayout.of(self.experiment).dp_degree))]
