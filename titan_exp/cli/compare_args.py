"""Command line of `titan-exp compare`: runs, and options as `--key value`, `--key=value` or `key=value`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titan_exp.config.command_line.parse_options import HELP
from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError

USAGE = """\
titan-exp compare STUDY|RUN... [options]

  STUDY is a name under paths.runs, or a folder of runs; RUN is a run folder, a run id or its prefix, or a pattern of
  either ('runs/lr-*/*'). Unfinished and failed runs are included with their state. Prints a table and writes a
  self-contained page, compare.html, beside the runs.

Comparison
  --baseline ROW        baseline row: its label, `lr=0.003 tp=1`, or a run id
  --metrics A,B         metrics, the main one first: {metrics}, or any key of metrics.jsonl
  --at TOKENS           token budget: least (the least advanced run), done (the least advanced finished run), end (each
                        run's own end), or a number of tokens (30720, 1e9, 2.5B)
  --target LOSS         also compare the tokens until the smoothed training loss reaches LOSS

Output
  --markdown --csv --latex --json    print this format instead of the table; =FILE writes it as well
  --html FILE           file of the page; none writes no page
  paths.runs=FOLDER     folder of studies and run ids

Weights & Biases
  --from-wandb ENTITY/PROJECT   read runs from W&B; the words are W&B run ids, none selects all
  --group G             runs of one group, which is a study
  --to-wandb ENTITY/PROJECT     write the table and a report to W&B

Options may also be written as key=value.
"""

FORMATS = ("markdown", "csv", "latex", "json")
"""Formats to print or write instead of the table."""

PRINTED = "-"
"""File name of standard output."""


@dataclass(frozen=True)
class CompareOptions:
    """Parsed command line."""

    runs: tuple[str, ...]
    """Studies, folders, ids, patterns."""
    runs_folder: Path
    """`paths.runs`."""
    baseline: str | None
    """Baseline row."""
    metrics: tuple[str, ...]
    """Names of metrics."""
    at: str
    """Token budget."""
    target: float | None
    """Loss of `tokens_to_target`."""
    formats: dict[str, str]
    """Requested formats with their file; `-` prints."""
    html: str | None
    """File of the page; None writes it beside the runs, `none` nowhere."""
    from_wandb: str | None
    """`ENTITY/PROJECT` to read from."""
    group: str | None
    """W&B group."""
    to_wandb: str | None
    """`ENTITY/PROJECT` to write to."""


def wants_help(words: Sequence[str]) -> bool:
    """True if the words ask for help."""
    return bool(set(words) & set(HELP))


def usage() -> str:
    """Help of the verb."""
    from titan_exp.compare.compared_metrics import METRICS

    return USAGE.format(metrics=", ".join(metric.name for metric in METRICS))


def parse_words(words: Sequence[str]) -> CompareOptions:
    """Parse the command line.

    Raises:
        UserError: an option is unknown, lacks its value or has a wrong one.
    """
    parser = _Parser()
    found = parser.parse_intermixed_args([parser.flagged(word) for word in words])
    if found.from_wandb is None and found.group is not None:
        raise UserError("--group selects W&B runs and needs --from-wandb ENTITY/PROJECT.")
    for option in ("from_wandb", "to_wandb"):
        place = getattr(found, option)
        if place is not None and (place.count("/") != 1 or not all(place.split("/"))):
            raise UserError(f"--{option.replace('_', '-')} {place}: must be ENTITY/PROJECT, as in W&B's URLs.")
    return CompareOptions(
        runs=tuple(found.runs),
        runs_folder=Path(found.runs_folder).expanduser(),
        baseline=found.baseline,
        metrics=tuple(name for name in (found.metrics or "").split(",") if name),
        at=found.at,
        target=_number("--target", found.target),
        formats={name: getattr(found, name) for name in FORMATS if getattr(found, name) is not None},
        html=found.html,
        from_wandb=found.from_wandb,
        group=found.group,
        to_wandb=found.to_wandb,
    )


class _Parser(argparse.ArgumentParser):
    """argparse with errors as user errors."""

    def __init__(self) -> None:
        super().__init__(prog="titan-exp compare", add_help=False, allow_abbrev=False)
        self.add_argument("runs", nargs="*")
        self.add_argument("--paths.runs", dest="runs_folder", default="runs")
        self.add_argument("--at", default="least")
        for name in ("baseline", "metrics", "target", "html", "from-wandb", "group", "to-wandb", *FORMATS):
            self.add_argument(f"--{name}")
        self.names = [option[2:] for option in self._option_string_actions]

    def flagged(self, word: str) -> str:
        """Turn `key=value` of an option into `--key=value`, and a bare format into one that is printed."""
        key, equals, _ = word.partition("=")
        if equals and key.replace("_", "-") in self.names:
            return f"--{key.replace('_', '-')}={word[len(key) + 1 :]}"
        return f"{word}={PRINTED}" if word.removeprefix("--") in FORMATS and word.startswith("--") else word

    def error(self, message: str) -> NoReturn:
        """Name the wrong word and the nearest option."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        if unknown:
            offer = did_you_mean(unknown.lstrip("-").partition("=")[0], self.names)
            raise UserError(f"{unknown} is not an option. {offer or 'titan-exp compare --help lists them.'}")
        raise UserError(f"{message[0].upper()}{message[1:]}. titan-exp compare --help lists the options.")


def _number(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UserError(f"{option} {text}: must be a number, as in {option} 3.2.") from None
