"""Table of parameter groups for the log: parameters of equal role, group and hyperparameters in one row."""

from collections import defaultdict
from collections.abc import Sequence

from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.optim.parameter_groups import NamedParameter, hyperparameters
from titan_exp.tracking.number_format import format_count


def has_groups(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> bool:
    """True if parameters differ in more than the weight decay of vectors."""
    given = config.groups or config.lr_scales or config.weight_decays
    return bool(given) or any(named.scale != parameters[0].scale for named in parameters)


def parameter_table(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> str:
    """Rows of the learning rate, weight decay and further values of all parameters of a model, frozen ones included."""
    rows: dict[tuple[str, ...], list[NamedParameter]] = defaultdict(list)
    for named in parameters:
        rows[_row(named, config)].append(named)
    table: list[tuple[str, ...]] = [("parameters", "role", "group", "lr", "weight decay", "also", "for example")]
    for row, found in rows.items():
        count = format_count(sum(named.parameter.numel() for named in found))
        table.append((count, *row, found[0].name))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _row(named: NamedParameter, config: OptimizerConfig) -> tuple[str, ...]:
    group = next((name for name, group in config.groups.items() if group.has(named.name, named.role)), "-")
    if not named.parameter.requires_grad:
        return named.role, group, "frozen", "-", ""
    options = hyperparameters(named, config)
    lr = config.lr * options.pop("lr_scale", 1.0)
    decay = options.pop("weight_decay")
    also = " ".join(f"{key}={_shown(value)}" for key, value in options.items())
    if named.scale.init != 1:
        also = f"{also} initial weights x{named.scale.init:.3g}".strip()
    return named.role, group, f"{lr:.3g}", f"{decay:.3g}", also


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
