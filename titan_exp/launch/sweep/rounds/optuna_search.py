"""Points that Optuna proposes, a batch at a time, from the results of the batches before.

A batch is a pure function of the search and these results: nothing is stored, and a relaunch proposes the same points.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.search import Range, Search
from titan_exp.config.study.study import Choice
from titan_exp.launch.sweep.rounds.draw import REPEATS, choice_at


def next_batch(search: Search, results: Sequence[tuple[Choice, float]]) -> tuple[Choice, ...]:
    """Propose the batch after `results`, the points so far with their metric; none at the end.

    A diverged point has an infinite metric.

    Raises:
        UserError: Optuna is not installed, or finds too few new points.
    """
    wanted = min(search.batch, search.points - len(results))
    if wanted <= 0:
        return ()
    optuna = import_optuna()
    distributions = {one.key: _distribution(optuna, one) for one in search.ranges}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=search.seed + len(results), constant_liar=True)
    direction = "minimize" if search.better == "min" else "maximize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    for choice, value in results:
        params = _params(search.ranges, choice)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    known, found = {choice for choice, _ in results}, dict[Choice, None]()
    for _ in range(search.points * REPEATS):
        params = study.ask(distributions).params
        texts = [params[one.key] if one.kind == "choice" else one.text(params[one.key]) for one in search.ranges]
        choice = choice_at(search.ranges, texts)
        if choice not in known:
            found.setdefault(choice)
        if len(found) == wanted:
            return tuple(found)
    raise UserError(
        f"search.points={search.points}: Optuna finds only {len(known) + len(found)} different points in these ranges. "
        "Ask for fewer, or widen the ranges."
    )


def import_optuna() -> Any:
    """Import Optuna, quietly. Raises UserError if it is not installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError(
            "search.method=optuna: the package optuna is not installed. pip install 'titan_exp[optuna]', or use "
            "search.method=sobol, which needs nothing more."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, one: Range) -> Any:
    match one.kind:
        case "choice":
            return optuna.distributions.CategoricalDistribution(one.choices)
        case "integer":
            return optuna.distributions.IntDistribution(int(one.low), int(one.high))
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.kind == "log_uniform")


def _params(ranges: Sequence[Range], choice: Choice) -> Mapping[str, Any]:
    """Values of a point as Optuna has them."""
    values = [text.partition("=")[2] for text in choice.overrides]
    convert = {"choice": str, "integer": int, "uniform": float, "log_uniform": float}
    return {one.key: convert[one.kind](value) for one, value in zip(ranges, values, strict=True)}
