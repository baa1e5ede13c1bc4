"""Part of training that scores fixed rows at the end, as the run's layout does and, on one device, each row alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_exp.extensions.tasks.encoding import Row
from titan_exp.extensions.tasks.scorer import Scorer
from titan_exp.trainer.part import Part, Phase, Run, Step

VOCABULARY = 256


def rows(seq_len: int, ids: int) -> list[Row]:
    """Rows of many lengths, from two tokens to `seq_len` + 1, in no order; and every id after one context, of which a
    model that decodes greedily writes one."""
    draw = np.random.default_rng(0)
    lengths = [2, seq_len + 1, *draw.integers(3, seq_len + 1, 21).tolist(), 2]
    made = []
    for number, length in enumerate(lengths):
        tokens = draw.integers(0, VOCABULARY, length)
        made.append(Row(number, 0, tokens, int(draw.integers(1, length))))
    after = [Row(len(made) + number, 0, np.array([5, 7, number]), 2) for number in range(ids)]
    return made + after


class Scores(Part):
    """Scores after the last step."""

    phase = Phase.OBSERVE

    def __init__(self, out: str, alone: bool = False) -> None:
        self._out, self._alone = Path(out), alone

    def begin(self, run: Run) -> None:
        self._run = run

    def after(self, step: Step) -> None:
        if not step.last and step.step != 1:
            return
        state, experiment = self._run.state, self._run.experiment
        scorer = Scorer(state.model, state.mesh, experiment)
        given = rows(experiment.training.seq_len, experiment.model.vocab_size)
        found = scorer.log_likelihoods(given)
        values: dict[str, Any] = {"total": found.total.tolist(), "greedy": found.greedy.tolist()}
        if self._alone:
            values["alone"], values["hits"] = zip(*(self._by_itself(row) for row in given), strict=True)
        if dist.get_rank() == 0:
            self._out.write_text(json.dumps(values))

    @torch.no_grad()
    def _by_itself(self, row: Row) -> tuple[float, bool]:
        """Brute force: whole logits of one row without padding."""
        tokens = torch.from_numpy(row.tokens)
        with self._run.state.model.weights.in_use():
            logits = self._run.state.model.parts[0].eval()(tokens[None, :-1])[0].float().log_softmax(-1)
        targets = tokens[row.first :]
        scored = logits[row.first - 1 :]
        picked = scored.gather(1, targets[:, None]).double().sum()
        return float(picked), bool((scored.argmax(-1) == targets).all())
