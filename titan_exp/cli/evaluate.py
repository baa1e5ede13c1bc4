"""Measure loss and perplexity of a checkpoint on any data."""

from collections.abc import Sequence

from titan_exp.inference import USAGE

HELP_TEXT = f"{USAGE}\n"


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from titan_exp.inference.evaluate import evaluate_command
    from titan_exp.launch.local.ranks import run_on_ranks
    from titan_exp.launch.run_lookup import run_path

    return evaluate_command(argv, run_on_ranks, run_path)
