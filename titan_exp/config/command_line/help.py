"""Help text of `titan-exp train`: config groups with their options, flags, examples."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from titan_exp.config.command_line.hydra_args import Arguments
from titan_exp.config.hydra.config_groups import groups_for

TEXT = """\
titan-exp train: compose a run, check it, launch it.

  titan-exp train [group=option ...] [key=value ...] [flags]

Groups: one option of each, * marks the chosen ones
{chosen}

Overlays: presets of several groups, added with +
{overlays}

Examples
  titan-exp train model=llama_debug training.steps=100
  titan-exp train +experiment=smoke experiment.name=hello
  titan-exp train data=text data.paths='[notes,books/*.txt]' optimizer.lr=1e-3
  titan-exp train -m optimizer.lr=1e-3,3e-3 lr_schedule=wsd,cosine

Flags
  --cfg job --resolve    print the composed configuration with every key, and run nothing
  --info defaults        print which files it was composed from
  --dry-run              check the run, and print what would start, with its job script
  -m, --multirun         run every combination of comma-separated values
                         (--dry-run prints all points, --skip leaves out what cannot run, --jobs 2 runs two at a time)
  --config-dir FOLDER    find groups and options of your own in a folder
  --hydra-help           print Hydra's other flags

Groups of your own also come from packages: hydra.searchpath=[pkg://my_package.conf]
Tab completion in bash: eval "$(titan-exp train -sc install=bash)\"
"""


def train_help(arguments: Arguments) -> str:
    """Help text, with a star at the options chosen by these arguments."""
    overrides = [override for override in arguments.overrides if not override.startswith("hydra.searchpath=")]
    with groups_for(arguments) as groups:
        # Hydra lists choices in reverse order of composition.
        choices = dict(reversed(groups.compose(overrides).hydra.runtime.choices.items()))
        options = {name: groups.options(name) for name in groups.inside()}
    chosen = {
        name: [f"*{option}" if option == choice else option for option in options[name]]
        for name, choice in choices.items()
        if name in options
    }
    overlays = {name: found for name, found in options.items() if found and name not in chosen and name != "local"}
    return TEXT.format(chosen=_table(chosen), overlays=_table(overlays))


def _table(rows: Mapping[str, Sequence[str]]) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    margin = max(map(len, rows), default=0) + 4
    return "\n".join(
        textwrap.fill(
            "  ".join(options),
            width,
            initial_indent=f"  {name}".ljust(margin),
            subsequent_indent=" " * margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, options in rows.items()
    )
