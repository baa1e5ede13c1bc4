"""Predictions as plain values: options that the planner supports, and predictions before a launch.

Before a launch, each distinct run is predicted once, by pipeline rank in parallel child processes, and cached on disk.
Child processes keep torch out of the launcher and isolate failures of user-defined models. Pipeline ranks that share
traces share a process. The cache key has the options that affect memory or speed (not learning rate, seed or name), a
digest of this package's code, and the versions of torch, torchao and transformers.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titan_exp
from titan_exp.config.devices import device_type, usable_cores, uses_expandable_segments
from titan_exp.config.errors.explained_errors import UserCodeError
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import is_file, pipeline_seconds
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.config.secrets import concealed
from titan_exp.config.torch_features import ATTENTION_BACKEND, auto_backend
from titan_exp.models.spec.lookup import attention_backend, model_spec
from titan_exp.plan.devices import Device
from titan_exp.plan.evaluation import evaluated
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.tracking.run_folder.files import write_atomically

if TYPE_CHECKING:
    from titan_exp.plan.trace.memory_tracker import Moment
    from titan_exp.trainer.part import Part
    from titan_exp.trainer.train_state import TrainState


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank's step, without the pipeline bubble."""

    matmuls: float
    elementwise: float  # operators bound by memory bandwidth
    exposed: float
    """Exposed communication: tensor, context and pipeline parallelism, FSDP's first gather and its last reduction."""
    behind: float
    """Overlapped communication in sequence: FSDP, replication, their host copies, and messages beside matmuls."""
    operators: float = 0.0  # host time of all operators beyond the device's time; on a CPU all of it
    exchange: float = 0.0  # seconds for which the step waits for the exchange between worlds

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.matmuls + self.elementwise + self.operators + self.exposed, self.behind) + self.exchange


@dataclass(frozen=True)
class RankPrediction:
    """Prediction for one pipeline rank, identical on all ranks of its stage."""

    pipeline_rank: int
    allocated: int  # peak of allocated tensors in bytes
    reserved: int | None  # peak bytes reserved by the caching allocator; None on a CPU or if not predicted
    by_category: Mapping[str, int]  # breakdown of `allocated`
    during: str  # phase of the peak, e.g. `forward, block 3`.
    seconds: RankTime | None  # step time; None if rates are unknown
    operators: int
    saved: int = 0  # bytes of parameters and optimizer state, which an asynchronous save copies to the host
    retries: int = 0
    """Number of allocations in the first steps that find the device full and free cached memory before they succeed."""

    @property
    def peak(self) -> int:
        """Required device memory in bytes: reserved if predicted, else allocated."""
        return self.reserved or self.allocated


@dataclass(frozen=True)
class Prediction:
    """Prediction of a run; times and rates are None if the device's rates are unknown, and the MFU on a CPU. The
    bubble is a share of the step."""

    ranks: tuple[RankPrediction, ...]
    bubble: float
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    pass_seconds: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def without_unknown(self) -> str:
        """Sentence about what the prediction lacks; empty if it lacks nothing."""
        if not self.unknown:
            return ""
        return (
            f"The planner does not know {listed(self.unknown, 'and')}. It counts the results as memory, and no FLOPs, "
            "messages or memory within a call. So memory and time are at least these. Measure a few steps "
            "(training.steps=5)."
        )

    @property
    def largest(self) -> RankPrediction:
        """Pipeline rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)


@dataclass(frozen=True)
class NotPredicted:
    """Failed prediction of a run."""

    reason: str
    user_error: str = ""  # failure of the run's user code, with its frames; empty if the planner is the reason


def merge_ranks(parts: Sequence[Prediction]) -> Prediction:
    """Merge predictions of a run's pipeline ranks; the slowest rank sets the speed."""
    slowest = max(parts, key=lambda part: part.step_seconds or 0.0)
    ranks = tuple(sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.pipeline_rank))
    totals = {rank.pipeline_rank: rank.seconds.total for rank in ranks if rank.seconds is not None}
    step, speeds = slowest.step_seconds, (slowest.tokens_per_second_per_device, slowest.mfu)
    if step is None or not totals:
        return replace(slowest, ranks=ranks)
    # Every part assumed that its missing ranks are as slow as its slowest.
    whole = pipeline_seconds(totals, len(ranks), slowest.bubble)
    passes = {name: max(part.pass_seconds[name] for part in parts) for name in slowest.pass_seconds}
    return Prediction(
        ranks,
        slowest.bubble,
        whole,
        *(speed and speed * step / whole for speed in speeds),
        pass_seconds=passes,
        unknown=tuple(dict.fromkeys(name for part in parts for name in part.unknown)),
    )


def from_json(values: Mapping[str, Any]) -> Prediction:
    """Inverse of `asdict`. Raises TypeError or KeyError if the values do not form a prediction."""
    ranks = []
    for rank in values["ranks"]:
        seconds = None if rank["seconds"] is None else RankTime(**rank["seconds"])
        ranks.append(RankPrediction(**{**rank, "seconds": seconds}))
    return Prediction(**{**values, "ranks": tuple(ranks), "unknown": tuple(values.get("unknown", ()))})


@dataclass(frozen=True)
class Beside:
    """Work beside some steps of a run. Its memory is traced, and it adds nothing to a step's costs."""

    category: str
    phase: str
    after: Sequence[Callable[[], object]]
    before: Sequence[Callable[[], object]] = ()  # actions before the traced step, after the first step


class Exchange:
    """Exchange between the worlds of a run. A run with one world has none; an extension's class overrides the rest."""

    title = ""  # words that precede the devices of a world in the title of a plan
    phase = ""  # name of the phase that follows a step; empty if it needs no memory. It is not linear in the layers.
    seconds_name = ""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @property
    def inputs(self) -> dict[str, Any]:
        """JSON values that affect a prediction, beside those of the core's groups."""
        return {}

    def most_numbers(self, state: float) -> float:
        """Upper bound of the elements per parameter, beside the optimizer's `state`."""
        return 0

    def saved_numbers(self, state: float) -> float:
        """Elements of a checkpoint per parameter, of which the optimizer keeps `state`."""
        return 1 + state

    def seconds(self, weights: float, device: Device, step: float) -> float:
        """Seconds of a step in which a rank waits for other worlds. Its fp32 weights have `weights` bytes, and its step
        takes `step` seconds without the exchange."""
        return 0.0

    def beside(self, state: "TrainState", parts: "Iterable[Part]") -> Sequence[Beside]:
        """Work in the phase, on a rank with parts that follow its update."""
        return ()

    def peak_on_cpu(self, peak: "Moment", persistent: Mapping[str, int], gradients: int) -> "Moment":
        """Peak of a rank on a CPU, which may lie in the exchange. `peak` is the step's; `persistent` are bytes by
        category before and after it, `gradients` bytes of reduced gradients."""
        return peak

    def lines(self, weights: Mapping[int, int]) -> Iterator[str]:
        """Lines about it in a plan; `weights` are bytes of parameters by predicted pipeline rank."""
        yield from ()

    def values(self, weights: Mapping[int, int]) -> dict[str, Any]:
        """Values about it in a plan's JSON; `weights` are as in `lines`."""
        return {}


def exchange_of(experiment: Experiment) -> Exchange:
    """Exchange of the extension that trains this run, else `Exchange`."""
    found = (exchange(experiment) for exchange in loaded("exchange", experiment))
    return next(filter(None, found), Exchange(experiment))


BACKENDS = ("inductor", "aot_eager", "eager")
HOPPER = (9, 0)  # first CUDA capability on which `auto` chooses cuDNN's attention
BLACKWELL = (10, 0)  # first CUDA capability with NVFP4 instructions
WHY_NOT = {
    "fa3": "we do not know how much workspace its package takes",
    "fa4": "we do not know how much workspace its package takes",
    "flex": "we trace runs on a CPU, where FlexAttention has no backward pass",
}


def check_supported(experiment: Experiment, device: Device | None = None) -> None:
    """Raise UserError if the planner does not support an option of a run, or a kernel on a known GPU."""
    if found := list(_violations(experiment, device)):
        raise UserError("We cannot plan this run.", found)


def _violations(experiment: Experiment, device: Device | None) -> Iterator[Violation]:
    compiled = experiment.compile
    if compiled.enabled and compiled.backend not in BACKENDS:
        remedy = f"use compile.backend={listed(BACKENDS)}, or compile=none"
        yield Violation("compile.backend", compiled.backend, "we do not know the memory of this backend", remedy)
    if device_type(experiment.cluster) != "cuda":
        return
    backend = attention_backend(experiment.model)
    if backend in WHY_NOT:
        yield Violation(ATTENTION_BACKEND, backend, WHY_NOT[backend], f"use {ATTENTION_BACKEND}=auto or math")
    if backend == "cudnn" and experiment.data.document_mask:
        reason = "data.document_mask is true, and we do not know cuDNN's workspace with a mask"
        yield Violation(ATTENTION_BACKEND, backend, reason, f"use {ATTENTION_BACKEND}=auto")
    if device is None:
        return
    if device.capability is None and attention_kernel(experiment) == "efficient":
        reason = f"fp32 and document masks need the efficient kernel, and we do not know the one of {device.name}"
        yield Violation(ATTENTION_BACKEND, backend, reason, f"use {ATTENTION_BACKEND}=math")
    quantization = experiment.quantization
    instructed = device.capability is not None and device.capability >= BLACKWELL and quantization.emulate is not True
    if quantization.recipe == "nvfp4" and instructed:
        reason = f"{device.name} runs it with Triton kernels, which we cannot trace without a GPU"
        remedy = "use quantization=mxfp8, or quantization.emulate=true, which computes other numbers, slowly"
        yield Violation("quantization.recipe", "nvfp4", reason, remedy)


def attention_kernel(experiment: Experiment) -> str:
    """Attention kernel of a plan for CUDA: `flash` (others save the same tensors), `efficient` or `math`."""
    backend = attention_backend(experiment.model)
    backend = _auto_backend(experiment) if backend == "auto" else backend
    return "flash" if backend in ("cudnn", "flex") else backend


def with_run_kernels(device: Device, experiment: Experiment) -> Device:
    """Device with the run's recipe, attention kernel and head size, which choose among its rates."""
    spec, kernel = model_spec(experiment.model), attention_backend(experiment.model)
    attention = None if spec is None else spec.attention
    if kernel == "auto":
        hopper, kernel = device.capability is not None and device.capability >= HOPPER, _auto_backend(experiment)
        kernel = "flash" if kernel == "cudnn" and not hopper else kernel
    head_dim = device.head_dim if attention is None else attention.qk_dim
    return replace(device, recipe=experiment.quantization.recipe, kernel=kernel, head_dim=head_dim)


def _auto_backend(experiment: Experiment) -> str:
    """Attention backend that `auto` chooses on CUDA; cuDNN on older GPUs, too."""
    spec, parallelism, training = model_spec(experiment.model), experiment.parallelism, experiment.training
    return auto_backend(
        [] if spec is None else [head_dim for _, head_dim in spec.head_dims],
        bf16=training.mixed_precision == "bf16",
        documents=experiment.data.document_mask,
        masked=spec is not None and (spec.has_sinks or spec.is_masked(training.seq_len)),
        parts=parallelism.cp > 1 and parallelism.cp_method != "ulysses",
        deterministic=training.deterministic,
    )


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
