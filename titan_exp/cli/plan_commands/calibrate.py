"""`titan-exp plan calibrate`: fit device constants to finished runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from titan_exp.config.command_line.options import take_flags, take_runs
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type, node_size
from titan_exp.config.schema.foreign_code import Untrusted
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.run_console import summarize
from titan_exp.launch.state.run_lookup import RunEntry, find_runs, named_runs, runs_folder
from titan_exp.launch.sweep.sweep_table import plain_table
from titan_exp.plan.cuda.devices import DEVICES, Device, device_reported_as
from titan_exp.plan.device_memory import cpu_device, refine_gpu, write_constants
from titan_exp.plan.gate.batch_predict import PredictionRequest, predict_many
from titan_exp.plan.gate.gate import staged
from titan_exp.plan.gate.prediction_cache import prediction_inputs
from titan_exp.plan.plan_json import NotPredicted, Prediction
from titan_exp.plan.time.fit import MIN_RUNS, Fit, Observation, fit
from titan_exp.tracking.number_format import GIB
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.provenance_records import read_environment_record
from titan_exp.tracking.run_folder.run_folder import RunFolder

HELP = """\
titan-exp plan calibrate: fit a device's constants to finished runs; later plans use them.

  titan-exp plan calibrate                 from all finished runs under runs/
  titan-exp plan calibrate NAME RUN ...    from the runs of a study, or from some
  titan-exp plan calibrate ... --dry-run   print the fit and write nothing
  titan-exp plan calibrate ... --trust     also from runs that other users launched, if their configurations name code

Four constants of time (factors of the rates of matmuls, elementwise operators and collectives, and the host's time per
operator) and one of memory (the overhead of a process). Needs at least 4 runs with different predictions, all on
one kind of device. A CPU must have been measured by titan-exp doctor.
"""

_FOREIGN = "launched by another user, and the configuration names code (--trust uses such runs)"


@dataclass(frozen=True)
class _Measured:
    """Finished run that the fit uses."""

    label: str
    experiment: Experiment
    device: Device
    speed: float
    memory: float | None


def calibrate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code. Raises UserError if a name matches no run, or the runs are too few or on
    several kinds of device."""
    if {"--help", "-h"} & set(argv):
        print(HELP, end="")
        return 0
    flags, rest = take_flags(argv, ("--dry-run", "--trust"), verb="plan calibrate")
    typed, named = take_runs(rest)
    runs = runs_folder(typed)
    left_out: dict[str, int] = {}
    measured = _measured(find_runs(named_runs(named), runs), runs / ".cache", left_out, trust="--trust" in flags)
    _require_one_device(measured)
    requests = [PredictionRequest(run.experiment, run.device) for run in measured]
    predictions = predict_many(requests, runs / ".cache", print)
    observations = _observations(measured, predictions, left_out)
    different = {prediction_inputs(run.experiment, run.device) for run in measured}
    if len(observations) < MIN_RUNS or len(different) < MIN_RUNS:
        why = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items())
        raise UserError(
            f"plan calibrate: found {len(observations)} finished runs with {len(different)} different predictions; a "
            f"fit needs {MIN_RUNS} that differ in model, sequence length or layout."
            + (f"\n  {why}" if why else "")
            + "\n  Short runs are enough: titan-exp train training.steps=30 tracking.log_every=5 ..."
        )
    for reason, count in left_out.items():
        print(f"{count} run(s) left out: {reason}")
    found = fit(observations)
    _show(observations, found)
    if "--dry-run" in flags:
        return 0
    about = {"runs": len(observations), "when": datetime.now(UTC).isoformat(timespec="seconds")}
    written = write_constants(runs / ".cache", observations[0].device.name, found.constants | about)
    print(f"wrote {written}; later plans use them")
    return 0


def _measured(found: Sequence[RunEntry], cache: Path, left_out: dict[str, int], *, trust: bool) -> list[_Measured]:
    """Runs that the fit can use; counts the others by reason in `left_out`."""
    taken = list[_Measured]()
    for run in found:
        try:
            taken.append(_read(run, cache, trust=trust))
        except Untrusted:
            left_out[_FOREIGN] = left_out.get(_FOREIGN, 0) + 1
        except UserError as error:
            left_out[str(error)] = left_out.get(str(error), 0) + 1
    return taken


def _read(run: RunEntry, cache: Path, *, trust: bool) -> _Measured:
    folder = run.folder
    state = folder.read_state()
    if state is None or state.state != "done":
        raise UserError("not finished")
    speed = summarize(folder).tokens_per_second
    if not speed:
        raise UserError("no speed was logged (the first steps are left out; tracking.log_every=5 logs more often)")
    env = read_environment_record(folder.env) or {}
    experiment = load_experiment(folder.config, trust)
    if experiment.training.batch_ramp:
        raise UserError("its steps differ in length (training.batch_ramp)")
    experiment = _resolve_device(experiment, bool(env.get("gpus")), len(env.get("gpus") or []))
    on_gpu = device_type(experiment.cluster) == "cuda"
    device = _gpu(env, experiment, cache) if on_gpu else _cpu(env, experiment, cache)
    return _Measured(run.label, experiment, device, speed, _memory(folder, on_gpu=on_gpu))


def _resolve_device(experiment: Experiment, on_gpu: bool, gpus: int) -> Experiment:
    """Resolve `auto` and null for the run's machine, which may differ from this one."""
    cluster = experiment.cluster
    if cluster.device == "auto":
        cluster = replace(cluster, device="cuda" if on_gpu else "cpu")
    if cluster.gpus_per_node is None and cluster.device == "cuda":
        cluster = replace(cluster, gpus_per_node=max(1, gpus))
    return replace(experiment, cluster=cluster)


def _gpu(env: dict, experiment: Experiment, cache: Path) -> Device:
    names = {str(gpu.get("name")) for gpu in env.get("gpus") or []}
    kind = device_reported_as(next(iter(names))) if len(names) == 1 else None
    kind = kind or (experiment.cluster.gpu_type or "").lower()
    if kind not in DEVICES:
        raise UserError(
            f"its GPU is not in the planner's device table ({listed(sorted(names)) or 'cluster.gpu_type=null'})"
        )
    return refine_gpu(DEVICES[kind], experiment.cluster, cache)


def _cpu(env: dict, experiment: Experiment, cache: Path) -> Device:
    name, world = f"{env.get('cpu')}, {env.get('cores')} cores", ResolvedLayout.of(experiment).world_size
    worlds = 1 if experiment.cluster.is_remote else experiment.cluster.worlds
    threads = experiment.cluster.threads_per_process or max(1, int(env.get("cores_usable") or 1) // (world * worlds))
    processes = worlds * min(world, node_size(experiment.cluster, world))
    dtype = experiment.training.mixed_precision
    device = cpu_device(name, cache, dtype=dtype, threads=threads, processes=processes)
    if device is None:
        raise UserError(f"{name} has not been measured; run titan-exp doctor paths.runs={cache.parent}")
    return device


def _memory(folder: RunFolder, *, on_gpu: bool) -> float | None:
    key = "memory_reserved" if on_gpu else "memory"
    found = [value for value in read_metrics(folder.metrics).column(key) if value is not None]
    return max(found) * GIB if found else None


def _require_one_device(measured: Sequence[_Measured]) -> None:
    names = sorted({run.device.name for run in measured})
    if len(names) > 1:
        raise UserError(f"plan calibrate: these runs were on {listed(names, 'and')}. Name runs on one kind of device.")


def _observations(
    measured: Sequence[_Measured], predictions: Sequence[Prediction | NotPredicted], left_out: dict[str, int]
) -> list[Observation]:
    found = []
    for run, answer in zip(measured, predictions, strict=True):
        if isinstance(answer, NotPredicted):
            left_out[answer.reason] = left_out.get(answer.reason, 0) + 1
            continue
        tokens = run.experiment.training.global_batch_size * run.experiment.training.seq_len
        memory = run.memory and run.memory - staged(run.experiment, answer.ranks[0])
        found.append(Observation(run.label, answer, run.device, tokens / run.speed, memory))
    return found


def _show(observations: Sequence[Observation], found: Fit) -> None:
    rows = []
    for place, run in enumerate(observations):
        row = [run.label, f"{run.step_seconds:.4g}"]
        for seconds in (found.before[place], found.after[place]):
            row += [f"{seconds:.4g}", _signed(seconds / run.step_seconds - 1)]
        if run.memory is None:
            row += ["-"] * 3
        else:
            guesses = found.memory_before[place], found.memory_after[place]
            row += [f"{run.memory / GIB:.2f}", *(_signed(guess / run.memory - 1) for guess in guesses)]
        rows.append(row)
    heads = ["run", "s/step", "before", "", "after", "", "GiB", "before", "after"]
    plain_table(heads, rows)
    seconds = [run.step_seconds for run in observations]
    for label, predicted in (
        ("time before", found.before),
        ("time after", found.after),
        ("time of a run left out of the fit", found.unseen),
    ):
        print(f"{label}: {_errors(predicted, seconds)}")
    both = [(run.memory, place) for place, run in enumerate(observations) if run.memory is not None]
    for label, values in (("memory before", found.memory_before), ("memory after", found.memory_after)):
        if both:
            print(f"{label}: {_errors([values[place] for _, place in both], [memory for memory, _ in both])}")
    device = observations[0].device
    for name, after in found.constants.items():
        before = getattr(device, name)
        print(f"{name}: {device.overhead() / 1e9 if before is None else before:.3g} -> {after:.3g}")


def _errors(predicted: Sequence[float], measured: Sequence[float]) -> str:
    errors = [abs(guess / value - 1) for guess, value in zip(predicted, measured, strict=True)]
    return f"median error {median(errors):.1%}, worst {max(errors):.1%}"


def _signed(error: float) -> str:
    return f"{error:+.1%}"
