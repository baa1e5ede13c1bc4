"""Predictions for a launch: each distinct one once, its pipeline ranks side by side in processes of their own.

In processes of their own because the one that launches imports no torch, must outlive whatever a user's own model
does, and plans one rank at a time; ranks that share what is traced for them share a process.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.local_machine import usable_cores
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.gate.child_process import end_with_parent
from titan_exp.plan.gate.prediction_cache import cache_key, get, put
from titan_exp.plan.plan_json import NotPredicted, Prediction, joined
from titan_exp.plan.supported import check_supported

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_PROCESSES = 8
"""At a time; each holds torch, a third of a GiB and more."""


@dataclass(frozen=True)
class PredictionRequest:
    """A run to predict."""

    experiment: Experiment
    """The run, its layout resolved."""
    device: Device | None
    """What it would run on; None is a CPU of which no speed is known."""


def predict_many(
    questions: Sequence[PredictionRequest], cache: Path, say: Callable[[str], None] = lambda _: None
) -> list[Prediction | NotPredicted]:
    """Predict runs, in their order.

    Args:
        questions: the runs; equal ones are predicted once.
        cache: `.cache` of the runs, where predictions are kept.
        say: takes a line before what takes seconds.
    """
    keys: list[str] = []
    found: dict[str, Prediction | NotPredicted] = {}
    asked: dict[str, PredictionRequest] = {}
    lasting: set[str] = set()
    for number, question in enumerate(questions):
        try:
            check_supported(question.experiment)
        except UserError as error:
            keys.append(f"question {number}")
            found[keys[-1]] = NotPredicted("; ".join(_short(it) for it in error.violations) or str(error))
            continue
        key = cache_key(question.experiment, question.device)
        keys.append(key or f"question {number}")
        if key is not None:
            lasting.add(key)
            known = get(cache, key) if key not in found else found[key]
            if known is not None:
                found[key] = known
        if keys[-1] not in found:
            asked.setdefault(keys[-1], question)
    if asked:
        ranks = sum(question.experiment.parallelism.pp for question in asked.values())
        runs = f"{len(asked)} runs" if len(asked) > 1 else "the run"
        of = f", {ranks} pipeline ranks" if ranks > len(asked) else ""
        say(f"Predicting the memory of {runs}{of} ...")
        for key, answer in _answers(asked).items():
            found[key] = answer
            if isinstance(answer, Prediction) and key in lasting:
                put(cache, key, answer)
    return [found[key] for key in keys]


def _answers(asked: dict[str, PredictionRequest]) -> dict[str, Prediction | NotPredicted]:
    # Here, because most launches never come to it.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    shares = {key: _shares(question.experiment) for key, question in asked.items()}
    processes = min(usable_cores(), sum(map(len, shares.values())), MAX_PROCESSES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool:
        waiting = {
            key: [pool.submit(_plan, question.experiment, question.device, ranks) for ranks in shares[key]]
            for key, question in asked.items()
        }
        return {key: _answer(parts) for key, parts in waiting.items()}


def _shares(experiment: Experiment) -> list[tuple[int, ...]]:
    """Pipeline ranks that are planned together."""
    ranks = tuple(range(experiment.parallelism.pp))
    if unsupported_reason(experiment) is None and is_worthwhile(experiment, len(ranks)):
        return [ranks]
    return [(rank,) for rank in ranks]


def _plan(experiment: Experiment, device: Device | None, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The plan of pipeline ranks as `plan.report.as_json` has it.

    Raises:
        UserError: something of it is not modelled.
    """
    from titan_exp.plan.plan_table import as_json
    from titan_exp.plan.predict import predict

    return as_json(predict(experiment, device, ranks))


def _answer(parts: "Sequence[Future[dict[str, Any]]]") -> Prediction | NotPredicted:
    from concurrent.futures.process import BrokenProcessPool

    try:
        return joined([part.result() for part in parts])
    except UserError as error:
        return NotPredicted("; ".join(_short(it) for it in error.violations) or str(error))
    except BrokenProcessPool:
        return NotPredicted("the process that planned it died; titan-exp plan shows why")
    except Exception as error:
        # Whatever a model of the user's own does: that is no reason not to train it.
        return NotPredicted(f"planning it failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _short(violation: Any) -> str:
    return str(violation).partition("\n")[0]


def _begin() -> None:
    """Be quiet, leave the cores to the others, and end at Ctrl-C."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.environ["OMP_NUM_THREADS"] = "1"
