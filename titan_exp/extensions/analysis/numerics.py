"""`titan-exp doctor --numerics`: quantization error of a recipe per linear layer.

One batch runs in fp32 and with the recipe, from the same weights. Rounding is emulated on every device, and everything
else is in fp32, which isolates the recipe's error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.command_line.options import take_runs
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment, ModelConfig
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.axes import ONE_DEVICE
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import load_group, to_experiment
from titan_exp.data.batch import Batch
from titan_exp.data.train_loader import TrainLoader
from titan_exp.extensions.analysis import NUMERICS
from titan_exp.models.blocks.linear import GroupedLinear, GroupedLinearImpl, Linear
from titan_exp.models.build import build_model, choose_attention_backend, init_specs
from titan_exp.models.parametrization.standard import ParameterScale
from titan_exp.models.spec.lookup import with_mtp_depth
from titan_exp.parallel import meta_init
from titan_exp.quantization.quantize import quantize
from titan_exp.rules import check
from titan_exp.trainer.objective import LanguageModeling
from titan_exp.trainer.restore import describe, load_source, training_length


@dataclass(frozen=True)
class ProjectionError:
    """Signal-to-noise ratios of a linear layer in dB: 20 · log10(|x| / |x - y|); 20 dB is an error of 10 %."""

    name: str
    quantized: bool  # True if the recipe's filter includes the layer
    own: float  # output SNR on the fp32 input: the layer's own rounding
    output: float | None  # the same in the model, after all earlier rounding; None if that changed the routing
    weight_gradient: float  # weight gradient SNR in the model


@dataclass(frozen=True)
class NumericsReport:
    """Comparison of a recipe with fp32 on one batch."""

    loss: float  # mean cross-entropy in fp32
    recipe_loss: float  # mean cross-entropy with the recipe
    projections: list[ProjectionError]  # all linear layers, worst weight gradient first


class HighPrecision(GroupedLinearImpl):
    """Grouped matmul left as it is, for experts whose outputs rather than inputs are weighted."""


@dataclass
class _Pass:
    inputs: dict[str, tuple[Tensor, ...]]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float = math.nan


def report_numerics(model: nn.Module, recipe: QuantizationConfig, layers: int, batch: Batch) -> NumericsReport:
    """Compare a recipe with fp32 on one batch, on the model's device; quantizes the `model` of `layers` blocks."""
    config = replace(recipe, emulate=True, precomputed_scales=False, float8_all_gather=False)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}
    for linear in linears.values():
        if isinstance(linear, GroupedLinear):
            linear.linear_impl = HighPrecision()
    plain = {name: linear.linear_impl for name, linear in linears.items()}
    exact = _run(model, linears, batch)
    quantize(model, config, layers=layers, device=batch.tokens.device)
    rounded = _run(model, linears, batch)
    found = []
    for name, linear in linears.items():
        with torch.no_grad():
            own = linear(*exact.inputs[name])
        # Grouped linears have a second input, the row offsets of their experts.
        same_rows = all(map(torch.equal, exact.inputs[name][1:], rounded.inputs[name][1:]))
        found.append(
            ProjectionError(
                name,
                linear.linear_impl is not plain[name],
                own=decibels(exact.outputs[name], own),
                output=decibels(exact.outputs[name], rounded.outputs[name]) if same_rows else None,
                weight_gradient=decibels(exact.gradients[name], rounded.gradients[name]),
            )
        )
    return NumericsReport(exact.loss, rounded.loss, sorted(found, key=lambda error: error.weight_gradient))


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal-to-noise ratio in dB; infinite for equal tensors."""
    noise = float((exact.double() - found.double()).norm())
    signal = float(exact.double().norm())
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def _run(model: nn.Module, linears: Mapping[str, Linear | GroupedLinear], batch: Batch) -> _Pass:
    found, names = _Pass({}, {}, {}), dict[nn.Module, str](zip(linears.values(), linears, strict=True))

    def record(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.inputs[names[linear]] = tuple(tensor.detach() for tensor in inputs)
        found.outputs[names[linear]] = output.detach()

    with ExitStack() as hooks:
        for linear in linears.values():
            hooks.callback(linear.register_forward_hook(record).remove)
        loss = LanguageModeling()(model, batch)
        tokens = max(int((batch.labels >= 0).sum()), 1)
        (loss.total / tokens).backward()
    found.loss = float(loss.metrics["loss"]) / tokens
    for name, linear in linears.items():
        gradient = linear.weight.grad
        assert gradient is not None, "every linear is part of the graph"
        found.gradients[name] = gradient
    model.zero_grad(set_to_none=True)
    return found


DEFAULT_SEQUENCES = 4  # sequences per batch if `training.micro_batch_size` is not given


def numerics_command(arguments: Sequence[str], run_path: Callable[[str, str], str] = lambda name, _: name) -> int:
    """Run `titan-exp doctor --numerics`; returns the exit code. `run_path` maps the name of a run, in a folder of runs,
    to its folder. Raises UserError about an invalid override or unreadable weights."""
    runs, arguments = take_runs(arguments)
    paths = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    flags = [argument for argument in arguments if argument.startswith("-")]
    trust = "--trust" in flags
    if {*flags} - {"--trust"} != {"--numerics"} or len(paths) > 1:
        raise UserError(NUMERICS)
    path = Path(run_path(paths[0], runs)).expanduser() if paths else None
    source = None if path is None else open_checkpoint(path, trust=trust)
    experiment = _compose_single_device(path, source, [argument for argument in arguments if "=" in argument], trust)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed, rows = experiment.experiment.seed, experiment.training.micro_batch_size or DEFAULT_SEQUENCES
    layout = {"dp_rank": 0, "dp_degree": 1, "micro_batch_size": rows, "pin_memory": False}
    with closing(TrainLoader(experiment.data, experiment.training, seed, **layout)) as loader:
        batch = next(loader).to(device)
    seq_len, documents = experiment.training.seq_len, experiment.data.document_mask
    config = with_mtp_depth(experiment.model, 0)
    if source is not None:
        model = load_source(source, device, seq_len=seq_len, documents=documents)
    else:
        model = build_initial(config, seq_len, seed, device, documents=documents)
    report = report_numerics(model.train(), experiment.quantization, config.layers, batch)
    weights = "initial weights" if path is None or source is None else describe(path, source)
    _print_report(report, f"{experiment.quantization.recipe} against fp32, {experiment.model.name}, {weights}")
    return 0


def build_initial(
    config: ModelConfig,
    seq_len: int,
    seed: int,
    device: torch.device,
    *,
    documents: bool = False,
    scales: Mapping[str, ParameterScale] = {},
) -> nn.Module:
    """Build a model with initial weights in fp32."""
    # Few GPU attention kernels support fp32.
    needs = {"bf16": False, "seq_len": seq_len, "documents": documents}
    backend = choose_attention_backend(config, device, **needs, auto=device.type == "cuda")

    def build() -> nn.Module:
        return build_model(config, seq_len=seq_len, attention_backend=backend)

    with torch.device("meta"):
        model = build()
    table = init_specs(model, scales)
    meta_init.init_buffers(meta_init.buffer_places(model), meta_init.materialize_parameters(model, device), build, seed)
    if table is None:
        meta_init.copy_initial_weights(model, build, seed)
    else:
        meta_init.init_weights(model, table, seed)
    return model


def _compose_single_device(
    path: Path | None, source: OpenCheckpoint | None, overrides: Sequence[str], trust: bool = False
) -> Experiment:
    """Compose a single-device experiment; data, tokenizer and sequence length default to the checkpoint's."""
    experiment = to_experiment(compose([*overrides, "training.mixed_precision=fp32"]))
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    if path is not None and source is not None:
        data, training = experiment.data, experiment.training
        saved = next((run for run in (path, path.parent.parent) if (run / "config.yaml").is_file()), None)
        if saved is not None and not any(key.partition(".")[0] == "data" for key in keys):
            data = load_group(saved / "config.yaml", "data", trust=trust)
        if "data.tokenizer" not in keys and source.tokenizer is not None:
            data = replace(data, tokenizer=source.tokenizer)
        if "training.seq_len" not in keys:
            training = replace(training, seq_len=training_length(path, source))
        experiment = replace(experiment, model=source.model, data=data, training=training)
    if experiment.quantization.recipe == "none":
        raise UserError(f"Name a recipe, for example quantization=float8_rowwise.\n{NUMERICS}")
    rows = experiment.training.micro_batch_size or DEFAULT_SEQUENCES
    experiment = replace(
        experiment,
        parallelism=replace(experiment.parallelism, **ONE_DEVICE),
        training=replace(experiment.training, micro_batch_size=rows, global_batch_size=rows, batch_ramp=()),
        quantization=replace(experiment.quantization, emulate=True),
    )
    return check(resolve_layout(experiment, 1))


def _print_report(report: NumericsReport, title: str) -> None:
    table = Table("linear", "recipe", "own output", "output", "weight gradient", title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for error in report.projections:
        values = (error.own, error.output, error.weight_gradient)
        numbers = ["routed" if x is None else "exact" if x == math.inf else f"{x:.1f}" for x in values]
        table.add_row(error.name, "yes" if error.quantized else "high", *numbers)
    console = Terminal()
    console.print(table)
    console.print(
        "Signal-to-noise ratio in dB, worst gradient first. 20 dB is an error of 10 %, and 40 dB of 1 %. "
        "'own output' counts the layer's own rounding, and 'output' also that of all earlier layers."
    )
    if any(error.output is None for error in report.projections):
        console.print("'routed': rounding before this layer made a router send tokens to other experts.")
    console.print(f"loss {report.loss:.5f}, with the recipe {report.recipe_loss:.5f}")
