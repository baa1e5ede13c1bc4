"""lm-evaluation-harness on a model of ours, without export: `titan-exp evaluate RUN --tasks PATH backend=lm-eval`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate  # type: ignore[import-not-found]  # the extra lm-eval
from lm_eval.api.model import LM  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_yaml
from titan_exp.data.tokenizers import Tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.formats import HARNESS_METRICS, Item, Kind, Task
from titan_exp.extensions.tasks.scorer import Scorer, cells


class ScoredLM(LM):
    """Language model of lm-eval that scores requests by `Scorer`. Every rank has one and gets all requests: with a
    world size of its own, lm-eval would deal other few-shot examples."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, max_tokens: int) -> None:
        super().__init__()
        self._scorer, self._tokenizer, self._max_tokens = scorer, tokenizer, max_tokens

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and True if greedy decoding gives it."""
        return self._scored("choice", [request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each document."""
        return [total for total, _ in self._scored("rolling", [("", request.args[0]) for request in requests])]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Refused: our models score here, and do not write."""
        raise UserError("This task generates text (generate_until). Export the run, and give its export to lm-eval.")

    def _scored(self, kind: Kind, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        items = tuple(Item((pair,), (0,), id=str(number)) for number, pair in enumerate(pairs))
        task = Task("requests", kind, items, 0.0, "acc", "whole", "", "lm-eval")
        encoded = encode(task, self._tokenizer, self._max_tokens)
        if encoded.refused:
            raise UserError(f"We cannot score a request of lm-eval: {encoded.refused[0]}.")
        total, greedy = cells(encoded, encoded.rows, self._scorer.log_likelihoods(encoded.rows))
        return [*zip(total[:, 0].tolist(), greedy[:, 0].tolist(), strict=True)]


def lm_eval_scores(
    paths: Sequence[str], scorer: Scorer, tokenizer: Tokenizer, max_tokens: int, most: int | None
) -> dict[str, Any]:
    """Scores of lm-eval's tasks by lm-eval, in the form of `evaluations.values_of`; all ranks must call it. Raises
    UserError: a path is no task of lm-eval, or a task generates text."""
    names = []
    for path in map(Path, paths):
        name = read_yaml(path, "a task of lm-eval").get("task") if path.suffix in (".yaml", ".yml") else None
        if not isinstance(name, str):
            raise UserError(f"{path} is not a task of lm-eval, a YAML file with a key task. Leave backend=lm-eval out.")
        names.append(name)
    folders = list(dict.fromkeys(str(Path(path).parent) for path in paths))
    os.environ.pop("LOCAL_RANK", None)  # lm-eval returns its results to the first rank alone
    found = simple_evaluate(
        model=ScoredLM(scorer, tokenizer, max_tokens),
        tasks=names,
        task_manager=TaskManager(include_path=folders, include_defaults=False),
        limit=most,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None, "every rank is the first one for lm-eval"
    return {name: _scores(found["results"][name], found["samples"][name]) for name in names}


def _scores(results: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    values = {key.partition(",")[0]: value for key, value in results.items() if key.endswith(",none")}
    metrics = {
        HARNESS_METRICS.get(name, name): {
            "value": value,
            "error": _number(results.get(f"{name}_stderr,none")),
            "items": [_number(sample.get(name)) for sample in samples],
        }
        for name, value in values.items()
        if not name.endswith("_stderr")
    }
    ids = [str(sample["doc_id"]) for sample in samples]
    about = {"primary": next(iter(metrics), ""), "chance": 0.0, "truncated": 0, "refused": [], "ids": ids}
    return {**about, "metrics": metrics}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
