"""Prediction as plain values, passed between processes, cached and read back; and options that the planner supports."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import pipeline_seconds
from titan_exp.config.torch_features import ATTENTION_BACKEND, auto_backend
from titan_exp.models.spec.lookup import attention_backend, model_spec
from titan_exp.plan.devices import Device

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
