"""Continue a text with a trained model."""

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from titan_exp.inference.generate import generate_command
    from titan_exp.launch.local.ephemeral_ranks import run_on_ranks
    from titan_exp.launch.state.run_lookup import run_path

    return generate_command(argv, run_on_ranks, run_path)
