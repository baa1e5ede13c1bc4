"""`titan-exp doctor --coordinates`: the coordinate check of a parametrization (Yang et al. 2022, Tensor Programs V,
appendix D.1), as a table and a picture.

Models of several widths take a few optimizer steps. In the maximal update parametrization, activations and their change
by training have one size at every width; in the standard parametrization the change grows with the width.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.table import Table
from torch import Tensor, nn

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.axes import ONE_DEVICE
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.batch import Batch
from titan_exp.data.train_loader import TrainLoader
from titan_exp.extensions.analysis import COORDINATES, LARGEST_SLOPE, LLAMA_WIDTHS, SMALL_LLAMA, STEPS, WIDTH
from titan_exp.extensions.analysis.numerics import build_initial
from titan_exp.models.blocks.transformer import RMSNorm, iter_blocks
from titan_exp.models.parametrization.standard import scales_of
from titan_exp.models.spec.lookup import with_mtp_depth
from titan_exp.optim.lr_schedule import set_lr
from titan_exp.optim.optimizer import HasGradientPoint, build_optimizer
from titan_exp.rules import check
from titan_exp.trainer.objective import LanguageModeling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sizes = Mapping[str, float]  # mean |x| by kind of layer


@dataclass(frozen=True)
class Coordinates:
    """Activations of a model on one batch, after each step."""

    sizes: tuple[Sizes, ...]  # mean |x| with initial weights, then after every step
    changes: tuple[Sizes, ...]  # mean |x - x of initial weights| after every step


def measure_coordinates(experiment: Experiment, batches: Sequence[Batch], device: torch.device) -> Coordinates:
    """Train a model on these batches, one per step and without warm-up, and measure activations on the first."""
    model, optimizer = _build(experiment, device)
    loss_of, probe = LanguageModeling(), batches[0].to(device)
    sizes, changes = [], list[Sizes]()
    before = _activations(model, probe)
    sizes.append(_mean_sizes(before))
    for batch in batches:
        if isinstance(optimizer, HasGradientPoint):
            optimizer.to_gradient_point()
        loss = loss_of(model, batch.to(device))
        (loss.total / max(int((batch.labels >= 0).sum()), 1)).backward()
        set_lr(optimizer, experiment.optimizer.lr)
        optimizer.step()
        optimizer.zero_grad()
        after = _activations(model, probe)
        sizes.append(_mean_sizes(after))
        changes.append(_mean_sizes({name: after[name] - before[name] for name in after}))
    return Coordinates(tuple(sizes), tuple(changes))


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log2 values over log2 widths by least squares; infinite unless all are finite and positive."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.inf
    x, y = ([math.log2(number) for number in numbers] for numbers in (widths, values))
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    products = sum((one - x_mean) * (other - y_mean) for one, other in zip(x, y, strict=True))
    return products / sum((one - x_mean) ** 2 for one in x)


def _build(experiment: Experiment, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    config, training = with_mtp_depth(experiment.model, 0), experiment.training
    scales, seed = scales_of(experiment.parametrization, config), experiment.experiment.seed
    documents = experiment.data.document_mask
    model = build_initial(config, training.seq_len, seed, device, documents=documents, scales=scales)
    return model, build_optimizer([model], experiment.optimizer, scales)


@torch.no_grad()
def _activations(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Outputs by module: the embedding, every block and its parts, and the logits."""
    found = dict[str, Tensor]()
    with contextlib.ExitStack() as hooks:
        for name, module in _recorded(model).items():

            def record(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
                found[name] = output.detach().clone()

            hooks.callback(module.register_forward_hook(record).remove)
        found["logits"] = model(batch.tokens, batch.positions, batch.documents)
    return found


def _recorded(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose outputs are measured, by block number and kind: `3.attention`."""
    found: dict[str, nn.Module] = {}
    embedding = getattr(model, "embedding", None)
    if isinstance(embedding, nn.Module):
        found["embedding"] = embedding
    for number, block in enumerate(iter_blocks(model)):
        parts = {name: part for name, part in block.named_children() if not isinstance(part, RMSNorm)}
        found |= {f"{number}.{name}": part for name, part in parts.items()}
        found[f"{number}.residual stream"] = block
    return found


def _mean_sizes(activations: Mapping[str, Tensor]) -> Sizes:
    """Mean |x| by kind, over the blocks."""
    values = defaultdict[str, list[float]](list)
    for name, activation in activations.items():
        values[name.partition(".")[2] or name].append(float(activation.float().abs().mean()))
    return {kind: sum(found) / len(found) for kind, found in values.items()}


SEEDS = 2  # number of seeds whose sizes are averaged


def coordinates_command(arguments: Sequence[str]) -> int:
    """Run `titan-exp doctor --coordinates`; returns the exit code. Raises UserError about overrides."""
    words = [argument for argument in arguments if argument != "--coordinates"]
    output = Path("coordinates.png")
    if "--output" in words[:-1]:
        place = words.index("--output")
        output = Path(words[place + 1])
        del words[place : place + 2]
    if any("=" not in word or word.startswith("-") for word in words) or output.suffix != ".png":
        raise UserError(COORDINATES)
    points = [to_experiment(compose(point)) for point in _points(words)]
    experiments = [_on_one_device(point) for point in points]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths = [experiment.model.dim for experiment in experiments]
    found = [_mean_of_seeds(experiment, device) for experiment in experiments]
    last = [coordinates.changes[-1] for coordinates in found]
    slopes = {kind: slope(widths, [changes[kind] for changes in last]) for kind in last[0]}
    name = experiments[0].parametrization.name
    failed = [kind for kind, found in slopes.items() if abs(found) > LARGEST_SLOPE]
    verdict = f"failed: {', '.join(failed)}" if failed else "passed"
    title = f"{name}, {experiments[0].model.name}: coordinate check {verdict}"
    _print(title, widths, found, slopes)
    _draw(title, widths, found).savefig(output)
    print(f"{output}: mean |x| against the width, after each step")
    return 3 if failed else 0


def _points(words: Sequence[str]) -> list[list[str]]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise UserError(f"{error}\n{COORDINATES}") from error
    if not any(override.is_sweep_override() for override in parsed):
        words = [*SMALL_LLAMA, *LLAMA_WIDTHS, *words]
        parsed = OverridesParser.create().parse_overrides(list(words))
    swept = [override for override in parsed if override.is_sweep_override()]
    lists = {override.get_key_element(): list(override.sweep_string_iterator()) for override in swept}
    fixed = [word for word, override in zip(words, parsed, strict=True) if not override.is_sweep_override()]
    if WIDTH not in lists or len(lists[WIDTH]) < 2 or len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in lists.items())
        raise UserError(
            f"The coordinate check needs a list of at least two widths, {WIDTH}=A,B, and every other list of the same "
            f"length (yours: {lengths}). For example: {' '.join(LLAMA_WIDTHS[:2])}"
        )
    places = range(len(lists[WIDTH]))
    return [[*fixed, *(f"{key}={values[place]}" for key, values in lists.items())] for place in places]


def _on_one_device(experiment: Experiment) -> Experiment:
    rows = experiment.training.global_batch_size
    own = {"mixed_precision": "fp32", "micro_batch_size": rows, "batch_ramp": ()}
    training = replace(experiment.training, **own)
    parallelism = replace(experiment.parallelism, **ONE_DEVICE)
    return check(resolve_layout(replace(experiment, parallelism=parallelism, training=training), 1))


def _mean_of_seeds(experiment: Experiment, device: torch.device) -> Coordinates:
    found = []
    for seed in range(experiment.experiment.seed, experiment.experiment.seed + SEEDS):
        run = replace(experiment, experiment=replace(experiment.experiment, seed=seed))
        found.append(measure_coordinates(run, _batches(run), device))
    return Coordinates(_mean([one.sizes for one in found]), _mean([one.changes for one in found]))


def _mean(runs: Sequence[Sequence[Sizes]]) -> tuple[Sizes, ...]:
    return tuple({kind: fmean(one[kind] for one in step) for kind in step[0]} for step in zip(*runs, strict=True))


def _batches(experiment: Experiment) -> list[Batch]:
    training = experiment.training
    rows, seed = training.micro_batch_size or training.global_batch_size, experiment.experiment.seed
    layout = {"dp_rank": 0, "dp_degree": 1, "micro_batch_size": rows, "pin_memory": False}
    with contextlib.closing(TrainLoader(experiment.data, training, seed, **layout)) as loader:
        return [next(loader) for _ in range(STEPS)]


def _print(title: str, widths: Sequence[int], found: Sequence[Coordinates], slopes: dict[str, float]) -> None:
    table = Table("mean |x|", "after step", *map(str, widths), "slope", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in found[0].sizes[0]:
        for step in (0, STEPS):
            values = [coordinates.sizes[step][kind] for coordinates in found]
            table.add_row(kind, str(step), *(f"{value:.4f}" for value in values), f"{slope(widths, values):+.2f}")
        values = [coordinates.changes[-1][kind] for coordinates in found]
        verdict = f"{slopes[kind]:+.2f} {'fails' if abs(slopes[kind]) > LARGEST_SLOPE else 'passes'}"
        table.add_row("", "change", *(f"{value:.4f}" for value in values), verdict, end_section=True)
    console = Terminal()
    console.print(table)
    console.print(f"A slope is that of log2 size against log2 width. A change passes if it is within ±{LARGEST_SLOPE}.")


def _draw(title: str, widths: Sequence[int], found: Sequence[Coordinates]) -> "Figure":
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(found[0].sizes[0])
    figure = Figure(figsize=(2.6 * len(kinds), 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, len(kinds)), kinds, strict=True):
        for step in range(STEPS + 1):
            color = colormaps["viridis"](step / (STEPS + 1))
            values = [coordinates.sizes[step][kind] for coordinates in found]
            axes.plot(widths, values, color=color, marker="o", markersize=3, linewidth=1.2, label=f"step {step}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(widths, list(map(str, widths)))
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel(WIDTH, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#000000", alpha=0.08)
    figure.axes[0].set_ylabel("mean |x|", fontsize=8)
    figure.axes[-1].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=10)
    return figure
