"""Tokenize text into a token store, for training at any scale.

The `data` group selects the text, as in `titan-exp train`; `out`, `workers`, ... are plain options.
"""

from collections.abc import Sequence
from typing import Any

from titan_exp.cli.hydra_command import run_with_hydra
from titan_exp.config.command_line.options import HELP, SWITCHES, VALUED, options_help, require_alone, take_options
from titan_exp.config.command_line.verb_options import TokenizeOptions
from titan_exp.config.data_files import Manifest, read_manifest
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed, nearest
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.foreign_code import described
from titan_exp.config.schema.schema import hints
from titan_exp.data.build_store import build_store
from titan_exp.data.sample_store import require_intact
from titan_exp.rules.data import unreadable_source

_OPTIONS = options_help("", TokenizeOptions).strip("\n")
HELP_TEXT = f"""\
titan-exp tokenize: tokenize text into a token store, for training at any scale.

  titan-exp tokenize [data=option] [data.key=value ...] out=STORE [options]

{_OPTIONS}

Examples
  titan-exp tokenize out=stores/stdlib
  titan-exp tokenize data=text data.paths='[notes,books/*.txt]' data.tokenizer=llama3/tokenizer.json out=stores/mine
  titan-exp tokenize data=fineweb_edu data.tokenizer=llama3 out=stores/edu workers=32
  titan-exp tokenize check=stores/mine
  titan-exp train data=tokens data.paths='[stores/mine]'

After an interruption, type the same command again. To see every key of data, type
titan-exp train --cfg job --package data
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(HELP_TEXT, end="")
        return 0
    options, overrides = options_among(argv)
    if options.check:
        return check_store(options.check)

    def make(cfg: Any, _: Sequence[str]) -> int:
        from titan_exp.config.schema.typed_config import to_experiment

        return make_store(options, to_experiment(cfg))

    return run_with_hydra(overrides, make)


def options_among(argv: Sequence[str]) -> tuple[TokenizeOptions, list[str]]:
    """Split the arguments into `tokenize` options and overrides of the `data` group."""
    options, overrides = take_options(TokenizeOptions, argv, others=(*SWITCHES, *VALUED))
    names, groups = list(hints(TokenizeOptions)), list(hints(Experiment))
    wrong = []
    for key, equals, value in (word.partition("=") for word in overrides):
        group = key.lstrip("+~").split(".")[0].split("@")[0]
        if equals and group in groups and group != "data" and not key.startswith("+experiment"):
            remedy = "leave it out (text and tokenizer are keys of data)"
            wrong.append(Violation(key, value, "tokenize does not read this key", remedy))
        elif equals and "." not in key and group not in groups and nearest(key, names, 1):
            wrong.append(Violation(key, value, "unknown option", did_you_mean(key, names)))
    if wrong:
        raise UserError("Cannot read these options.", wrong)
    if options.check:
        require_alone("check", options.check, argv)
    return options, overrides


def check_store(folder: str) -> int:
    """Verify a store's checksums and print the result; returns the exit code."""
    manifest = read_manifest(folder)
    require_intact(manifest, folder)
    print(f"{folder}: all checksums match. {_summary(manifest)}")
    return 0


def make_store(options: TokenizeOptions, experiment: Experiment) -> int:
    """Make or resume the token store of the options and the `data` group; returns the exit code."""
    violations, source = unreadable_source(experiment), experiment.data.source
    if (holds := described(source).holds) != "text":
        reason = "this source is already tokenized" if holds == "tokens" else f"this source holds {holds}"
        violations = [Violation("data.source", source, reason, "give a text source, such as data=text")]
    if not options.out:
        violations.append(Violation("out", "", "you named no folder for the store", "name one, as in out=stores/mine"))
    if violations:
        raise UserError("Cannot tokenize this.", violations)
    manifest, made = build_store(
        options.out,
        experiment.data,
        parts=options.parts,
        shard_tokens=options.shard_tokens,
        shuffle=options.shuffle,
        workers=options.workers,
    )
    if not made:
        print(f"{options.out} is already complete. {_summary(manifest)}")
        return 0
    print(f"{options.out}: {_summary(manifest)}")
    if not manifest.documents["validation"]:
        print("This store holds no documents out, so train with evaluation.every=0, or build it again with some.")
    print(f"To train from it, type titan-exp train data=tokens data.paths='[{options.out}]'")
    return 0


def _summary(manifest: Manifest) -> str:
    size = sum(field.size or 0 for _, field in manifest.arrays())
    parts = [
        f"{manifest.tokens[split]:,} tokens of {manifest.documents[split]:,} documents {use}"
        for split, use in (("train", "to train on"), ("validation", "held out"))
    ]
    return f"{listed(parts, 'and')}, {size / 1e6:,.1f} MB"
