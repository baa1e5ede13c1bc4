"""All plots of one run, drawn into its folder."""

from collections.abc import Iterator
from pathlib import Path

from titan_exp.compare.output.expert_load_plot import draw_expert_load
from titan_exp.compare.output.plot import draw


def draw_run(run_folder: Path) -> Iterator[str]:
    """Draw the loss curve and, of a model with experts, their load; yields a line for each.

    Raises UserError if no step is logged.
    """
    yield f"loss curve: {draw(run_folder)}"
    if (path := draw_expert_load(run_folder)) is not None:
        yield f"load of experts: {path}"
