"""Continue a text with a trained model."""

from collections.abc import Sequence

from titan_exp.config.command_line.options import options_help
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.config.extension import added_usage

USAGE = """\
titan-exp generate [RUN|FOLDER] [prompt=...]
  for example: titan-exp generate runs/first/6c43198cf79b prompt="def " prompt="import " temperature=0"""
HELP_TEXT = options_help(f"{USAGE}{added_usage('generate')}", GenerateOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from titan_exp.inference.generate import generate_command
    from titan_exp.launch.local.ranks import run_on_ranks
    from titan_exp.launch.run_lookup import run_path

    return generate_command(argv, run_on_ranks, run_path)
