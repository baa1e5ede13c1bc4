"""A comparison written back to Weights & Biases, as a Report: the table, the findings, and panels over the runs."""

from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.output.formats import to_markdown
from titan_exp.compare.sources.wandb import explain_wandb_errors


def publish(comparison: Comparison, place: str) -> str:
    """Make a new Report in a project and return its address. Nothing that is there is changed.

    Args:
        comparison: what to write.
        place: `ENTITY/PROJECT`; its runs of the same group are what the panels show.

    Raises:
        UserError: wandb or its report package is not installed, or the server cannot be used.
    """
    with explain_wandb_errors(place):
        report = report_of(comparison, place)
        report.save()
        return report.url


def report_of(comparison: Comparison, place: str) -> Any:
    """The Report, not yet saved. Imports `wandb_workspaces`."""
    import wandb_workspaces.reports.v2 as reports
    from wandb_workspaces import expr

    entity, _, project = place.partition("/")
    study = comparison.runs[0].study
    runs = reports.Runset(
        entity=entity,
        project=project,
        name=study,
        filters=[expr.Metric("group") == study],
        groupby=[f"config.{key}" for key in comparison.differing_keys.all_keys],
    )
    # The keys of metrics.jsonl are those in W&B; what was computed from them only exists here.
    downsampled_curves = [
        reports.LinePlot(title=words, x="tokens", y=[key], smoothing_type="none")
        for key, words in (("loss", "training loss"), ("validation_loss", "validation loss"))
    ]
    blocks = [
        reports.MarkdownBlock(to_markdown(comparison)),
        reports.PanelGrid(runsets=[runs], panels=[*downsampled_curves, reports.RunComparer(diff_only=True)]),
    ]
    question = comparison.study.question if comparison.study else ""
    return reports.Report(
        entity=entity, project=project, title=f"{comparison.name}, compared", description=question, blocks=blocks
    )
