"""Predictions before a launch: each distinct run is predicted once, by pipeline rank in parallel child processes, and
cached on disk.

Child processes keep torch out of the launcher and isolate failures of user-defined models. Pipeline ranks that share
traces share a process. The cache key has the options that affect memory or speed (not learning rate, seed or name), a
digest of this package's code, and the versions of torch, torchao and transformers.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import titan_exp
from titan_exp.config.devices import usable_cores, uses_expandable_segments
from titan_exp.config.errors.explained_errors import UserCodeError
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import is_file
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.config.secrets import concealed
from titan_exp.plan.devices import Device
from titan_exp.plan.evaluation import evaluated
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.prediction import NotPredicted, Prediction, check_supported, exchange_of, from_json, merge_ranks
from titan_exp.tracking.run_folder.files import write_atomically

FOLDER = "plan"
IRRELEVANT_KEYS = {
    "model": ("name", "init_std", "norm_eps"),
    "training": ("steps", "stop_after", "gc_every", "deterministic", "stop_on_nonfinite"),
    "optimizer": ("lr", "betas", "eps"),
    "grad_clip": ("max_value", "relative", "decay", "warmup_steps"),
    "weight_average": ("decay", "steps"),
}
"""Keys of relevant groups that do not affect predictions."""
ON_OFF_KEYS = {"training": ("max_grad_norm", "z_loss"), "optimizer": ("weight_decay",)}
"""Keys of which only set or unset matters."""
STEP_KEYS = ("model.architecture", "parametrization.name", "training.objective", "training.parts", "tracking.metrics")
"""Keys that may name your code in a step, beside `optimizer.name`, whose `max_state` is then None."""
RELEVANT_GROUPS = (
    *("model", "training", "parallelism", "optimizer", "parametrization", "quantization"),
    *("grad_clip", "weight_average", "activation_checkpoint", "compile"),
)


def cache_key(experiment: Experiment, device: Device | None) -> str | None:
    """Cache key of a prediction: the planner's code and every value that affects it; None with user-defined code."""
    if import_paths(experiment, STEP_KEYS) or experiment.optimizer.max_state is None:
        return None
    config = to_dict(experiment)
    inputs: dict[str, Any] = {group: config[group] for group in RELEVANT_GROUPS}
    for group, names in IRRELEVANT_KEYS.items():
        inputs[group] = {name: value for name, value in inputs[group].items() if name not in names}
    for group, names in ON_OFF_KEYS.items():
        inputs[group] |= {name: bool(inputs[group][name]) for name in names}
    inputs["exchange"] = exchange_of(experiment).inputs
    schedule = experiment.parallelism.pp_schedule
    if is_file(schedule):
        inputs["parallelism"]["pp_schedule"] = Path(schedule).expanduser().read_text(encoding="utf-8")
    inputs["data"] = {name: config["data"][name] for name in ("document_mask", "reset_positions")}
    layout = ResolvedLayout.of(experiment)
    expandable = uses_expandable_segments(experiment.cluster, experiment.compile)
    inputs["cluster"] = [layout.device_type, layout.node_size, expandable, experiment.cluster.worlds]
    inputs["device"] = None if device is None else asdict(device)
    inputs["metrics"] = experiment.tracking.metrics
    inputs["evaluations"] = [(one.name, one.inputs) for one in evaluated(experiment)]
    return hashlib.sha256(f"{code_digest()} {json.dumps(inputs, sort_keys=True)}".encode()).hexdigest()[:24]


def get(cache: Path, key: str) -> Prediction | None:
    """Read a cached prediction; None if missing or unreadable."""
    try:
        return from_json(json.loads((cache / FOLDER / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def put(cache: Path, key: str, prediction: Prediction) -> None:
    """Write a prediction. A full disk is not an error."""
    path = cache / FOLDER / f"{key}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(prediction)) + "\n", durable=False)


@cache
def code_digest() -> str:
    """Digest of this package's source and the versions of torch, torchao and transformers."""
    package, digest = Path(titan_exp.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    for name in ("torch", "torchao", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            digest.update(metadata.version(name).encode())
    return digest.hexdigest()


MAX_PROCESSES = 8  # torch alone takes a third of a GiB in each
FAILED = "Your own code fails in the first training step:"
"""Beginning of the message about user code that fails on fake tensors."""


@dataclass(frozen=True)
class PredictionRequest:
    """Run to predict."""

    experiment: Experiment
    device: Device | None  # device; None for a CPU of unknown speed
    answer: Prediction | NotPredicted | None = None  # known answer, if only the run's user code is to be checked


def predict_many(
    requests: Sequence[PredictionRequest], cache: Path, say: Callable[[str], None] = lambda _: None
) -> list[Prediction | NotPredicted]:
    """Predict runs, in order, equal ones once, and cache them in `cache`; `say` gets a line before slow work."""
    keys: list[str] = []
    answers: dict[str, Prediction | NotPredicted] = {}
    pending: dict[str, PredictionRequest] = {}
    for number, request in enumerate(requests):
        key, known = _known_answer(request, cache)
        own = bool(import_paths(request.experiment))
        keys.append(f"request {number}" if own or key is None else key)
        if known is not None and not own:
            answers[keys[-1]] = known
        elif keys[-1] not in answers:
            pending.setdefault(keys[-1], replace(request, answer=known))
    if pending:
        _say([*pending.values()], say)
        answers |= _predict_in_processes(pending)
        for key, request in pending.items():
            answer, stored = answers[key], cache_key(request.experiment, request.device)
            if isinstance(answer, Prediction) and request.answer is None and stored is not None:
                put(cache, stored, answer)
    return [answers[key] for key in keys]


def _known_answer(request: PredictionRequest, cache: Path) -> tuple[str | None, Prediction | NotPredicted | None]:
    """Cache key of a request, and its answer if it is known without a prediction."""
    if request.answer is not None:
        return None, request.answer
    try:
        check_supported(request.experiment)
    except UserError as error:
        return None, _not_predicted(error)
    key = cache_key(request.experiment, request.device)
    return key, None if key is None else get(cache, key)


def _say(pending: Sequence[PredictionRequest], say: Callable[[str], None]) -> None:
    predicted = [request for request in pending if request.answer is None]
    if not predicted:
        own = dict.fromkeys(path for request in pending for path in import_paths(request.experiment).values())
        say(f"Checking your own code ({', '.join(own)}), which can take a minute ...")
        return
    runs = f"{len(predicted)} runs" if len(predicted) > 1 else "the run"
    ranks = sum(request.experiment.parallelism.pp for request in predicted)
    of = f", {ranks} pipeline ranks" if ranks > len(predicted) else ""
    say(f"Predicting the memory of {runs}{of} ...")


def _predict_in_processes(pending: dict[str, PredictionRequest]) -> dict[str, Prediction | NotPredicted]:
    groups = {key: _rank_groups(request) for key, request in pending.items()}
    processes = min(usable_cores(), sum(map(len, groups.values())), MAX_PROCESSES)
    deadline, found = time.monotonic(), dict[str, Prediction | NotPredicted]()
    with PlannerProcesses(processes, alone=True) as pool:
        futures = {
            key: [pool.submit(_predict_ranks, request, ranks) for ranks in groups[key]]
            for key, request in pending.items()
        }
        for key, parts in futures.items():
            deadline += pending[key].experiment.plan.seconds
            found[key] = _merge(pending[key], parts, deadline)
    return found


class _PlanningFailedError(Exception):
    """Exception of the planner, as text."""


def _rank_groups(request: PredictionRequest) -> list[tuple[int, ...]]:
    """Groups of pipeline ranks that share traces and a process; one empty group if only user code is checked."""
    if request.answer is not None:
        return [()]
    experiment, layout = request.experiment, ResolvedLayout.of(request.experiment)
    ranks = tuple(range(experiment.parallelism.pp))
    worthwhile = is_worthwhile(layout, experiment.activation_checkpoint, len(ranks))
    return [ranks] if worthwhile and unsupported_reason(experiment) is None else [(rank,) for rank in ranks]


def _predict_ranks(request: PredictionRequest, ranks: tuple[int, ...]) -> Prediction | None:
    experiment = request.experiment
    explaining = nullcontext()
    if import_paths(experiment):
        from titan_exp.plan.check_user_code import check_user_code, failing_user_code

        check_user_code(experiment)
        explaining = failing_user_code(experiment, FAILED)
    if not ranks:
        return None
    from titan_exp.plan.predict import predict

    try:
        with explaining:
            return predict(experiment, request.device, ranks).prediction
    except UserError:
        raise
    except Exception as error:
        # Torch's exceptions may hold operators, which have no pickle.
        reason = concealed(str(error).partition("\n")[0])
        raise _PlanningFailedError(f"{type(error).__name__}: {reason}") from None


def _merge(
    request: PredictionRequest, parts: Sequence[Future[Prediction | None]], deadline: float
) -> Prediction | NotPredicted:
    """Merge the answers of a request's ranks; `deadline` is on the monotonic clock."""
    try:
        found = [part.result(timeout=max(0.0, deadline - time.monotonic())) for part in parts]
        return request.answer or merge_ranks([part for part in found if part is not None])
    except UserCodeError as error:
        violations = [str(violation).partition("\n")[0] for violation in error.violations]
        first = "; ".join(violations) or str(error).partition("\n")[0]
        return NotPredicted(f"its user code fails: {first}", str(error))
    except UserError as error:
        return _not_predicted(error)
    except TimeoutError:
        return NotPredicted(f"its prediction took more than plan.seconds={request.experiment.plan.seconds:g}")
    except BrokenProcessPool:
        return NotPredicted("the planner's process was killed (titan-exp plan shows why)")
    except _PlanningFailedError as error:
        # A user-defined model may raise anything here and still train.
        return NotPredicted(f"the planner failed with {error}")


def _not_predicted(error: UserError) -> NotPredicted:
    return NotPredicted("; ".join(str(violation).partition("\n")[0] for violation in error.violations) or str(error))
