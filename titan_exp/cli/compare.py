"""Compare runs: what differs and by how much, as a table, plots and a page."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from titan_exp.cli.shell.hydra_command import OutputFile
from titan_exp.config.command_line.options import HELP, options_help, take_options
from titan_exp.config.command_line.verb_options import CompareOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.state.run_lookup import named_runs, runs_folder

if TYPE_CHECKING:
    from titan_exp.compare.comparison import Comparison

USAGE = """\
titan-exp compare STUDY|RUN... [options]

  STUDY is a name under paths.runs, or a folder of runs; RUN is a run folder, an id prefix, STUDY/LABEL, a URL, or
  a pattern ('runs/lr-*/*'). Unfinished and failed runs are included with their state. Prints a table and writes a
  self-contained page, compare.html, beside the runs.

{metrics}"""

PAGE = "compare.html"
SUFFIXES = {"--markdown": ".md", "--csv": ".csv", "--latex": ".tex", "--json": ".json"}
"""Suffixes of files of the text formats, whose flags may also be given alone."""
"""File name of the HTML page beside the runs."""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        from titan_exp.compare.compared_metrics import METRICS

        metrics = f"Metrics: {', '.join(metric.name for metric in METRICS)}."
        metrics = textwrap.fill(metrics, 118, initial_indent="  ", subsequent_indent="  ")
        print(options_help(USAGE.format(metrics=metrics), CompareOptions), end="")
        return 0
    for flag, word in pairwise(argv):
        if flag in SUFFIXES and word.endswith(SUFFIXES[flag]):
            raise UserError(f"{flag} {word}: a file is given after an equals sign: {flag}={word}")
    options, rest = take_options(CompareOptions, argv)
    if options.group and not options.from_wandb:
        raise UserError(f"group={options.group}: it selects W&B runs and needs --from-wandb ENTITY/PROJECT.")
    runs, named = runs_folder(options.runs), named_runs(rest)
    from titan_exp.compare.comparison import compare
    from titan_exp.compare.runs import select

    if options.from_wandb:
        from titan_exp.compare.from_wandb import select_from_wandb

        selection = select_from_wandb(options.from_wandb, options.group or None, named, runs)
    else:
        selection = select(named, runs)
    metrics = tuple(filter(None, options.metrics.split(",")))
    comparison = compare(
        selection,
        at=options.at,
        baseline=options.baseline or None,
        metrics=metrics,
        target=options.target,
        tuned=options.tune,
    )
    page = None
    if options.html != "none":
        from titan_exp.compare.output.comparison_page import to_html

        # Written before the table, so that a closed pipe (`| head`) does not lose the page.
        try:
            file = OutputFile("--html", options.html or selection.folder / PAGE, PAGE)
            file.write(to_html(comparison))
            page = str(file.path)
        except UserError as error:
            if options.html:
                raise
            page = f"not written. {error}"  # runs of another user, or on a read-only disk
    _print_or_write(comparison, options)
    if page is not None:
        print(f"page: {page}", file=sys.stderr if True in options.formats.values() else sys.stdout)
    if options.to_wandb:
        from titan_exp.compare.output.formats import publish

        print(f"W&B report: {publish(comparison, options.to_wandb)}", file=sys.stderr)
    return 0


def _print_or_write(comparison: "Comparison", options: CompareOptions) -> None:
    from titan_exp.compare.output import formats

    texts: dict[str, Callable[[Comparison], str]] = {
        "markdown": formats.to_markdown,
        "csv": formats.to_csv,
        "latex": formats.to_latex,
        "json": formats.to_json,
    }
    for name, target in options.formats.items():
        text = texts[name](comparison)
        if target is True:
            print(text, end="")
        else:
            OutputFile(f"--{name}", str(target), f"compare{SUFFIXES[f'--{name}']}").write(text)
    if True not in options.formats.values():
        from titan_exp.compare.output.terminal import show
        from titan_exp.launch.sweep.sweep_table import plain_console

        console = plain_console()
        show(comparison, console, every_key=not console.is_terminal)
