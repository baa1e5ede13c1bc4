"""Help of verbs, completion in the shell, and remarks on a composed run."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from titan_exp.config.command_line import verb_options as options_of
from titan_exp.config.command_line.options import Arguments, option_name
from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import shown
from titan_exp.config.extension import load, provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.config_groups import groups_for
from titan_exp.config.schema.foreign_code import BYTES_VOCABULARY
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE, flatten, idle_keys, is_among
from titan_exp.config.schema.schema import choices_of, hints
from titan_exp.config.schema.typed_config import to_dict

TEXT = """\
titan-exp train: compose a run, check it, launch it.

  titan-exp train [group=option ...] [key=value ...] [flags]

Groups: a run takes one option of each, and * marks the ones chosen now
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
  --info defaults        print the files that it comes from
  --dry-run              check the run, and print what would start, with its job script
  --json                 print one JSON document, and all text for people on standard error
  -m, --multirun         run every combination of comma-separated values
                         (--dry-run prints all points, --skip leaves out what cannot run, --jobs 2 runs two at a time)
  --config-dir FOLDER    find groups and options of your own in a folder
  --hydra-help           print Hydra's other flags

You can also keep groups of your own in a package: hydra.searchpath=[pkg://my_package.conf]
Tab completion in bash: eval "$(titan-exp train -sc install=bash)\"
"""


def train_help(arguments: Arguments) -> str:
    """Help text, with a star at the options chosen by these arguments."""
    overrides = [override for override in arguments.overrides if not override.startswith("hydra.searchpath=")]
    with groups_for(arguments) as groups:
        # Hydra lists choices in reverse order of composition.
        choices = dict(reversed(groups.compose(overrides).hydra.runtime.choices.items()))
        options = {name: groups.options(name) for name in groups.inside()}
    known = [(name, choice) for name, choice in choices.items() if name in options]
    chosen = {name: [f"*{one}" if one == choice else one for one in options[name]] for name, choice in known}
    overlays = {name: found for name, found in options.items() if found and name not in chosen and name != "local"}
    return TEXT.format(chosen=_table(chosen), overlays=_table(overlays))


def _table(rows: Mapping[str, Sequence[str]]) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    margin = max(map(len, rows), default=0) + 4
    wrapper, lines = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False), []
    wrapper.subsequent_indent = " " * margin
    for name, options in rows.items():
        wrapper.initial_indent = f"  {name}".ljust(margin)
        lines.append(wrapper.fill("  ".join(options)))
    return "\n".join(lines)


OPTIONS: dict[str, type] = {
    "compare": options_of.CompareOptions,
    "generate": options_of.GenerateOptions,
    "convert": options_of.ConvertOptions,
    "download": options_of.DownloadOptions,
    "tokenize": options_of.TokenizeOptions,
    "evaluate": options_of.EvaluateOptions,
    "diff": options_of.DiffOptions,
    "show": options_of.ShowOptions,
    "logs": options_of.LogsOptions,
    "plan": options_of.PlanOptions,
    "status": options_of.StatusOptions,
    "cancel": options_of.CancelOptions,
    "retry": options_of.RetryOptions,
}
"""Option dataclasses of verbs that take only some config groups or none."""


def verb_options(verb: str) -> Any:
    """Option dataclass of a verb, of the core or of an extension; None without one."""
    added = provided("options")
    return OPTIONS.get(verb) or (load(added[verb]) if verb in added else None)


GROUPS = {
    "train": ("",),
    "plan": ("",),
    "tokenize": ("data=", "data.", "experiment.seed"),
    "evaluate": ("data=", "data.", "training.", "parallelism.", "model.attention_backend"),
}
"""Accepted override prefixes by verb."""


def complete_option(verb: str, word: str) -> list[str]:
    """Completions of a word: a verb's options, or the values of the option in the word."""
    kind = verb_options(verb)
    if kind is None or not word:
        return []
    name, equals, _ = word.partition("=")
    if not equals:
        names = [option_name(kind, field) for field in fields(kind)]
        names += [f"--{name}" for name in provided("observations")] if verb == "evaluate" else []
        return [name for name in names if name.startswith(word)]
    annotation = hints(kind).get(name)
    values = ["true", "false"] if annotation is bool else choices_of(annotation)
    return [offer for value in values if (offer := f"{name}={value}").startswith(word)]


def is_override(verb: str, word: str) -> bool:
    """True if a typed word is an override for Hydra."""
    name, equals, _ = word.partition("=")
    kind = verb_options(verb)
    return kind is None or (bool(equals) and name not in hints(kind))


def takes_override(verb: str, offer: str) -> bool:
    """True if the verb accepts an override offered by Hydra."""
    return offer.startswith(GROUPS[verb]) or any(prefix.startswith(offer) for prefix in GROUPS[verb])


FEW_ROWS = 10
"""Rows of the embedding for each token of the tokenizer `bytes` above which a model is not a toy."""


def remarks(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """Sentences about a composed run, printed before it is planned or launched."""
    values = flatten(to_dict(experiment))
    idle = idle_keys(values)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        switch = next((COUNTS_BESIDE[group][0] for group in idle if is_among(key, [group])), key)
        if switch != key and "." in key:  # a group's option sets the switch
            yield f"{override} has no effect with {switch}={shown(values[switch])}"
    yield from forgotten_tokenizer(overrides, experiment)
    yield from forgotten_precision(overrides, experiment)


def forgotten_precision(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """A sentence if a run on GPUs computes in fp32 by default."""
    key, value = "training.mixed_precision", experiment.training.mixed_precision
    typed = any(override.lstrip("+").startswith(f"{key}=") for override in overrides)
    if value == "fp32" and not typed and device_type(experiment.cluster) == "cuda":
        yield f"{key}=fp32 is the default, and slow on GPUs. Use {key}=bf16, or type {key}=fp32 if you mean it"


def forgotten_tokenizer(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """A sentence if a model with a large vocabulary gets bytes by default."""
    rows, key = experiment.model.vocab_size, "data.tokenizer"
    typed = any(override.lstrip("+").startswith(f"{key}=") for override in overrides)
    if experiment.data.tokenizer == "bytes" and not typed and rows > FEW_ROWS * BYTES_VOCABULARY:
        yield (
            f"{key}=bytes, the default, uses only {BYTES_VOCABULARY} of the model's {rows:,} tokens. Name the model's "
            f"own tokenizer with {key}=FOLDER, or type {key}=bytes if you mean bytes"
        )
