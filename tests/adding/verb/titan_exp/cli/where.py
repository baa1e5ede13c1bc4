"""Print the folder that holds every run."""

from collections.abc import Sequence

from titan_exp.config.hydra.compose import compose

HELP_TEXT = """\
titan-exp where: the folder that holds every run; titan-exp where paths.runs=/scratch tells it with overrides.
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    print(compose(argv).paths.runs)
    return 0
