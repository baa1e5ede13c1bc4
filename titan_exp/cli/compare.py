"""Compare runs: what differs and by how much, as a table, plots and a page."""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.cli.hydra_command import OutputFile
from titan_exp.config.command_line.options import HELP, options_help, take_options
from titan_exp.config.command_line.output import answer, json_text
from titan_exp.config.command_line.verb_options import CompareOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_lookup import named_runs, runs_folder

if TYPE_CHECKING:
    from titan_exp.compare.comparison import Comparison

USAGE = """\
titan-exp compare STUDY|RUN... [options]
titan-exp compare --discoveries [STUDY...] [--alpha 0.05] [--json] [--markdown]

  STUDY is a name under paths.runs, or a folder of runs. RUN is a run folder, an id prefix, STUDY/LABEL, a URL, or a
  pattern ('runs/lr-*/*'). The table includes unfinished and failed runs with their state. The verb prints a table, and
  writes a self-contained page, compare.html, beside the runs. --discoveries judges all registered questions together.

{metrics}"""

PAGE = "compare.html"  # file name of the HTML page beside the runs
SUFFIXES = {"--markdown": ".md", "--csv": ".csv", "--latex": ".tex", "--json": ".json"}
"""File suffixes of the text formats; their flags may also be given without a file."""


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
            raise UserError(f"{flag} {word}: name the file after an equals sign: {flag}={word}")
    options, rest = take_options(CompareOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if options.discoveries:
        return _discoveries(options, runs, named)
    if options.group and not options.from_wandb:
        raise UserError(f"group={options.group}: this selects W&B runs, so add --from-wandb ENTITY/PROJECT.")
    if options.alpha != CompareOptions.alpha:
        raise UserError(f"alpha={options.alpha}: this is the rate of false discoveries, so add --discoveries.")
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
    # Written before the table, so that a closed pipe (`| head`) does not lose the page.
    page = None if options.html == "none" else _write_page(comparison, options, selection.folder)
    _print_or_write(comparison, options)
    if page is not None:
        print(f"page: {page}", file=sys.stderr if True in options.formats.values() else sys.stdout)
    if options.to_wandb:
        from titan_exp.compare.output.formats import publish

        print(f"W&B report: {publish(comparison, options.to_wandb)}", file=sys.stderr)
    return 0


def _write_page(comparison: "Comparison", options: CompareOptions, folder: Path) -> str:
    from titan_exp.compare.output.pages import to_html

    try:
        file = OutputFile("--html", options.html or folder / PAGE, PAGE)
        file.write(to_html(comparison))
        return str(file.path)
    except UserError as error:
        if options.html:
            raise
        return f"not written. {error}"  # runs of another user, or on a read-only disk


def _discoveries(options: CompareOptions, runs: Path, studies: Sequence[str]) -> int:
    ours = ("runs", "discoveries", "alpha", "json", "markdown")
    for field in fields(options):
        if field.name not in ours and (value := getattr(options, field.name)) != field.default:
            takes = "--discoveries, which takes names of studies, alpha=, --json and --markdown"
            raise UserError(f"{field.name.replace('_', '-')}={value}: this is of no use with {takes}. Leave it out.")
    from titan_exp.compare.discoveries import commands, json_values, judge, section, to_markdown

    found = judge(runs, options.alpha, studies)
    _write_formats(found, options, {"markdown": to_markdown}, json_values)
    if True not in options.formats.values():
        from titan_exp.compare.output.pages import show_section
        from titan_exp.launch.sweep.sweep_table import plain_console

        console = plain_console()
        show_section(section(found), console)
        for line in commands(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _write_formats(
    found: Any,
    options: CompareOptions,
    texts: Mapping[str, Callable[[Any], str]],
    values: Callable[[Any], Any],
) -> None:
    """Print each text format that was asked for, or write it to its file; `values` are those of JSON."""
    for name, target in options.formats.items():
        if (name, target) == ("json", True):
            answer(values(found))
            continue
        text = f"{json_text(values(found))}\n" if name == "json" else texts[name](found)
        if target is True:
            print(text, end="")
        else:
            OutputFile(f"--{name}", str(target), f"compare{SUFFIXES[f'--{name}']}").write(text)


def _print_or_write(comparison: "Comparison", options: CompareOptions) -> None:
    from titan_exp.compare.output import formats

    texts = {"markdown": formats.to_markdown, "csv": formats.to_csv, "latex": formats.to_latex}
    _write_formats(comparison, options, texts, formats.json_values)
    if True not in options.formats.values():
        from titan_exp.compare.output.pages import show
        from titan_exp.launch.sweep.sweep_table import plain_console

        console = plain_console()
        show(comparison, console, every_key=not console.is_terminal)
