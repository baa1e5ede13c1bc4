"""What `titan-exp compare` is told: runs, and options as `--key value`, `--key=value` or `key=value`."""

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

  STUDY is a name under paths.runs, or a folder of runs; RUN is a run folder, a run id or its beginning, or a pattern of
  either ('runs/lr-*/*'). Unfinished and failed runs are shown as what they are. Prints a table and writes one
  self-contained page, compare.html, beside the runs.

What is compared
  --baseline ROW        the row that others are compared with: its label, `lr=0.003 tp=1`, or a run id
  --metrics A,B         metrics, the one that matters most first: {metrics}, or any key of metrics.jsonl
  --at TOKENS           where: least (the least advanced run), done (the least advanced finished one), end (each run's
                        own), or a number of tokens (30720, 1e9, 2.5B)
  --target LOSS         also compare the tokens that the smoothed training loss takes to come down to it

Where it goes
  --markdown --csv --latex --json    print this instead of the table; with =FILE, write it there as well
  --html FILE           where the page is written; none writes no page
  paths.runs=FOLDER     where studies and run ids are looked up

Weights & Biases
  --from-wandb ENTITY/PROJECT   read runs from there instead; the words are W&B run ids, none means all
  --group G             those of one group, which is a study
  --to-wandb ENTITY/PROJECT     write the table and a report there

Options may also be written as key=value.
"""

FORMATS = ("markdown", "csv", "latex", "json")
"""Texts to print or write instead of the table."""

PRINTED = "-"
"""Instead of a file name: to standard output."""


@dataclass(frozen=True)
class CompareOptions:
    """The words, read."""

    runs: tuple[str, ...]
    """Studies, folders, ids, patterns."""
    runs_folder: Path
    """`paths.runs`."""
    baseline: str | None
    """The row to compare with."""
    metrics: tuple[str, ...]
    """Names of metrics."""
    at: str
    """Position at which runs are compared."""
    target: float | None
    """A loss to come down to."""
    formats: dict[str, str]
    """Wanted texts, each with its file, or `-` to print it."""
    html: str | None
    """File of the page; None beside the runs; `none` for no page."""
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
    """The text of the verb's help."""
    from titan_exp.compare.compared_metrics import METRICS

    return USAGE.format(metrics=", ".join(metric.name for metric in METRICS))


def read_words(words: Sequence[str]) -> CompareOptions:
    """Read the words of the command.

    Raises:
        UserError: one is no option, lacks its value, or has one that cannot be read.
    """
    parser = _Parser()
    found = parser.parse_intermixed_args([parser.flagged(word) for word in words])
    if found.from_wandb is None and found.group is not None:
        raise UserError("--group says which W&B runs: it needs --from-wandb ENTITY/PROJECT.")
    for option in ("from_wandb", "to_wandb"):
        place = getattr(found, option)
        if place is not None and (place.count("/") != 1 or not all(place.split("/"))):
            raise UserError(f"--{option.replace('_', '-')} {place}: write ENTITY/PROJECT, as in W&B's addresses.")
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
    """argparse, with its errors in our words."""

    def __init__(self) -> None:
        super().__init__(prog="titan-exp compare", add_help=False, allow_abbrev=False)
        self.add_argument("runs", nargs="*")
        self.add_argument("--paths.runs", dest="runs_folder", default="runs")
        self.add_argument("--at", default="least")
        for name in ("baseline", "metrics", "target", "html", "from-wandb", "group", "to-wandb", *FORMATS):
            self.add_argument(f"--{name}")
        self.names = [option[2:] for option in self._option_string_actions]

    def flagged(self, word: str) -> str:
        """`key=value` as `--key=value`, where there is such an option, and a bare `--json` as one that is printed."""
        key, equals, _ = word.partition("=")
        if equals and key.replace("_", "-") in self.names:
            return f"--{key.replace('_', '-')}={word[len(key) + 1 :]}"
        return f"{word}={PRINTED}" if word.removeprefix("--") in FORMATS and word.startswith("--") else word

    def error(self, message: str) -> NoReturn:
        """Say which word is wrong, and what may have been meant."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        if unknown:
            offer = did_you_mean(unknown.lstrip("-").partition("=")[0], self.names)
            raise UserError(f"{unknown}: there is no such option. {offer or 'titan-exp compare --help lists them.'}")
        raise UserError(f"{message[0].upper()}{message[1:]}. titan-exp compare --help lists the options.")


def _number(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UserError(f"{option} {text}: a number is meant, as 3.2.") from None
