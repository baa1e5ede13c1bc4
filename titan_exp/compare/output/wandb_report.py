"""Comparison as a Weights & Biases Report: table, findings and panels over the runs."""

from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.output.formats import to_markdown
from titan_exp.compare.sources.wandb import explain_wandb_errors


def publish(comparison: Comparison, place: str) -> str:
    """Create a Report in the project `place` (`ENTITY/PROJECT`), with panels of the runs in the same group; returns its
    URL.

    Existing reports stay unchanged. Raises UserError if wandb or wandb_workspaces is not installed, or the server is
    unavailable.
    """
    with explain_wandb_errors(place):
        report = report_of(comparison, place)
        report.save()
        return report.url


def report_of(comparison: Comparison, place: str) -> Any:
    """Build the Report without saving it; imports `wandb_workspaces`."""
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
    # W&B has the keys of metrics.jsonl, but no derived metrics.
    downsampled_curves = [
        reports.LinePlot(title=title, x="tokens", y=[key], smoothing_type="none")
        for key, title in (("loss", "training loss"), ("validation_loss", "validation loss"))
    ]
    blocks = [
        reports.MarkdownBlock(to_markdown(comparison)),
        reports.PanelGrid(runsets=[runs], panels=[*downsampled_curves, reports.RunComparer(diff_only=True)]),
    ]
    question = comparison.study.question if comparison.study else ""
    return reports.Report(
        entity=entity, project=project, title=f"{comparison.name}, compared", description=question, blocks=blocks
    )
