"""Batch prediction: each distinct run once, its pipeline ranks in parallel child processes.

Child processes keep torch out of the launcher and isolate failures of user-defined models. Pipeline ranks that share
traces share a process.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.local_machine import usable_cores
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.gate.child_process import end_with_parent
from titan_exp.plan.gate.prediction_cache import cache_key, get, put
from titan_exp.plan.plan_json import NotPredicted, Prediction, merge_ranks
from titan_exp.plan.supported import check_supported

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_PROCESSES = 8
"""Maximum number of child processes; torch alone takes a third of a GiB in each."""


@dataclass(frozen=True)
class PredictionRequest:
    """Run to predict."""

    experiment: Experiment
    """Run with a resolved layout."""
    device: Device | None
    """Device; None for a CPU of unknown speed."""


def predict_many(
    requests: Sequence[PredictionRequest], cache: Path, say: Callable[[str], None] = lambda _: None
) -> list[Prediction | NotPredicted]:
    """Predict runs, in order; equal runs are predicted once and cached in `cache`.

    `say` is called with a line before slow work.
    """
    keys: list[str] = []
    answers: dict[str, Prediction | NotPredicted] = {}
    pending: dict[str, PredictionRequest] = {}
    for number, request in enumerate(requests):
        uncached = f"request {number}"
        try:
            check_supported(request.experiment)
        except UserError as error:
            keys.append(uncached)
            answers[uncached] = _not_predicted(error)
            continue
        keys.append(cache_key(request.experiment, request.device) or uncached)
        if keys[-1] not in answers and (known := get(cache, keys[-1])) is not None:
            answers[keys[-1]] = known
        if keys[-1] not in answers:
            pending.setdefault(keys[-1], request)
    if pending:
        ranks = sum(request.experiment.parallelism.pp for request in pending.values())
        runs = f"{len(pending)} runs" if len(pending) > 1 else "the run"
        of = f", {ranks} pipeline ranks" if ranks > len(pending) else ""
        say(f"Predicting the memory of {runs}{of} ...")
        for key, answer in _predict_in_processes(pending).items():
            answers[key] = answer
            if isinstance(answer, Prediction) and not key.startswith("request "):
                put(cache, key, answer)
    return [answers[key] for key in keys]


def _predict_in_processes(pending: dict[str, PredictionRequest]) -> dict[str, Prediction | NotPredicted]:
    # Imported lazily: most launches need no prediction.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    groups = {key: _rank_groups(request) for key, request in pending.items()}
    processes = min(usable_cores(), sum(map(len, groups.values())), MAX_PROCESSES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool:
        futures = {
            key: [pool.submit(_predict_ranks, request, ranks) for ranks in groups[key]]
            for key, request in pending.items()
        }
        return {key: _merge(parts) for key, parts in futures.items()}


def _rank_groups(request: PredictionRequest) -> list[tuple[int, ...]]:
    """Groups of pipeline ranks that share traces and a process."""
    experiment, layout = request.experiment, ResolvedLayout.of(request.experiment)
    ranks = tuple(range(experiment.parallelism.pp))
    worthwhile = is_worthwhile(layout, experiment.activation_checkpoint, len(ranks))
    if worthwhile and unsupported_reason(experiment) is None:
        return [ranks]
    return [(rank,) for rank in ranks]


def _predict_ranks(request: PredictionRequest, ranks: tuple[int, ...]) -> dict[str, Any]:
    from titan_exp.plan.plan_table import plan_to_json
    from titan_exp.plan.predict import predict

    return plan_to_json(predict(request.experiment, request.device, ranks))


def _merge(parts: "Sequence[Future[dict[str, Any]]]") -> Prediction | NotPredicted:
    from concurrent.futures.process import BrokenProcessPool

    try:
        return merge_ranks([part.result() for part in parts])
    except UserError as error:
        return _not_predicted(error)
    except BrokenProcessPool:
        return NotPredicted("the planner's process was killed; titan-exp plan shows why")
    except Exception as error:
        # A user-defined model may raise anything here and still train.
        return NotPredicted(f"planning it failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _not_predicted(error: UserError) -> NotPredicted:
    return NotPredicted("; ".join(str(violation).partition("\n")[0] for violation in error.violations) or str(error))


def _start_worker() -> None:
    """Silence a worker, give it one thread, and end it with its parent or at Ctrl-C."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.environ["OMP_NUM_THREADS"] = "1"
