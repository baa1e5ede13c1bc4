"""The command line, `titan-exp VERB ...`. Imports nothing heavy: help, completion and `--cfg` answer at once."""

import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from titan_exp.config.errors import UserError
from titan_exp.config.suggest import listed, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 for what the user can put right, else the run's own.

    Args:
        argv: the words after `titan-exp`; the process's own by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        return _dispatch(words)
    except UserError as error:
        if traceback_wanted:
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def train(words: Sequence[str]) -> int:
    """Compose a run, check it, launch it; with -m, every combination of values."""

    def launch_run(cfg: Any, overrides: Sequence[str]) -> int:
        from titan_exp.compare.curve import draw
        from titan_exp.config.convert import to_experiment
        from titan_exp.launch.commit import plan
        from titan_exp.launch.run import run

        experiment = to_experiment(cfg)
        if experiment.data.preview is not None:
            from titan_exp.data.preview import preview

            plan(experiment, overrides)  # which refuses what could not be trained either
            for line in preview(experiment, experiment.data.preview):
                print(line)
            return 0
        outcome = run(plan(experiment, overrides))
        if outcome.exit_code == 0:
            print(f"loss curve: {draw(outcome.folder.path)}")
        return outcome.exit_code

    return _with_hydra(words, launch_run)


def generate(words: Sequence[str]) -> int:
    """Continue a text with a trained model."""
    from titan_exp.trainer.generate import generate_command

    return generate_command(list(words))


def tokenize(words: Sequence[str]) -> int:
    """Turn text into a token store, to train from at any scale."""
    from titan_exp.data.store.tokenize import check_store, make_store, options_among, tokenize_help

    if {"--help", "-h"} & set(words):
        print(tokenize_help(), end="")
        return 0
    options, others = options_among(words)
    if options.check:
        return check_store(options.check)

    def make(cfg: Any, overrides: Sequence[str]) -> int:
        from titan_exp.config.convert import to_experiment

        return make_store(options, to_experiment(cfg))

    return _with_hydra(others, make)


def evaluate(words: Sequence[str]) -> int:
    """Loss and perplexity of a checkpoint on any data."""
    from titan_exp.trainer.evaluate_command import evaluate_command

    return evaluate_command(list(words))


def convert(words: Sequence[str]) -> int:
    """Checkpoints to and from Hugging Face, Meta's Llama, torchtune and plain torch."""
    from titan_exp.checkpoint.convert import convert_command

    return convert_command(list(words))


def download(words: Sequence[str]) -> int:
    """Tokenizer, configuration and weights from the Hugging Face hub."""
    from titan_exp.data.download import download_command

    return download_command(list(words))


def doctor(words: Sequence[str]) -> int:
    """Which layers a numeric recipe harms: --numerics."""
    from titan_exp.trainer.doctor_command import doctor_command

    return doctor_command(list(words))


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "generate": generate,
    "evaluate": evaluate,
    "convert": convert,
    "download": download,
    "tokenize": tokenize,
    "doctor": doctor,
}
"""What the command line can do."""

USAGE = """\
titan-exp: pretraining experiments, from a composed configuration to a finished run.

  titan-exp VERB ...

Verbs
{verbs}

Start here
  titan-exp train +experiment=smoke      seconds, to see that everything is connected
  titan-exp train                        a small language model on this machine, in minutes
  titan-exp train --help                 the groups, their options, and how to set any key
"""


def _dispatch(words: Sequence[str]) -> int:
    if words and words[0] in ("--shell-completion", "-sc"):
        return _complete(words)
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        verbs = "\n".join(f"  {name:<10} {function.__doc__}" for name, function in VERBS.items())
        print(USAGE.format(verbs=verbs), end="")
        return 0
    if verb == "--version":
        print(f"titan-exp {importlib.metadata.version('titan_exp')}")
        return 0
    if verb in VERBS:
        return VERBS[verb](rest)
    if verb.startswith("-") or "=" in verb:
        raise UserError(
            f"A verb comes first: titan-exp train {' '.join(words)}\n  The verbs are {listed(VERBS, 'and')}."
        )
    offer = nearest(verb, VERBS, 1)
    suggestion = f"Did you mean titan-exp {' '.join([*offer, *rest])}? " if offer else ""
    raise UserError(f"{verb}: there is no such verb.\n  {suggestion}The verbs are {listed(VERBS, 'and')}.")


def _with_hydra(words: Sequence[str], task: Callable[[Any, Sequence[str]], int]) -> int:
    """Let Hydra read the words and call the task with each composed configuration; return the worst exit code."""
    from titan_exp.config.arguments import read_arguments

    arguments = read_arguments(words)
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from titan_exp.config.compose import CONF_DIR, CONFIG_NAME, HYDRA_VERSION, OWN_FILE, standing_overrides
    from titan_exp.config.dotted import search_current_directory
    from titan_exp.config.explain import MESSAGE, explain, is_about_words, misspelt
    from titan_exp.config.help import train_help
    from titan_exp.config.resolvers import register_resolvers

    own_file = arguments.has("--config-path", "-cp", "--config-name", "-cn")
    standing = OWN_FILE if own_file else standing_overrides()
    codes: list[int] = []
    failures: list[Exception] = []

    def job(cfg: Any) -> None:
        # Hydra prints words of its own over an exception of its task, so it is carried around Hydra.
        try:
            typed = [override for override in HydraConfig.get().overrides.task if override not in standing]
            codes.append(task(cfg, typed))
        except Exception as error:
            failures.append(error)

    added = arguments.value_of("--config-dir", "-cd")
    if added is not None and not os.path.isdir(added):
        raise UserError(f"--config-dir {added}: there is no such folder. It holds your groups, as {CONF_DIR} does.")
    search_current_directory()
    register_resolvers()
    before, sys.argv = sys.argv, [_command(), *arguments.flags, *standing, *arguments.overrides]
    try:
        if arguments.has("--help", "-h"):
            print(train_help(arguments), end="")
            return 0
        if arguments.has("--multirun", "-m") and (found := misspelt(arguments)):
            raise UserError(MESSAGE, found)  # said once, and not again for every point of the sweep
        with _hydra_raises(), warnings.catch_warnings():
            warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
            hydra.main(config_path=str(CONF_DIR), config_name=CONFIG_NAME, **HYDRA_VERSION)(job)()
    except Exception as error:
        if not is_about_words(error):
            raise
        raise explain(error, arguments) from error
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return max(codes, default=0)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let Hydra raise what it would print before it ends the process."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ.update({} if before is None else {"HYDRA_FULL_ERROR": before})


def _complete(words: Sequence[str]) -> int:
    """Answer a shell's question for completions; silence where the line makes no sense yet."""
    line = os.environ.get("COMP_LINE", "")
    typed = re.match(r"\s*(?P<command>(?:\S*python\S*\s+-m\s+)?\S+)\s+(?P<verb>\S*)(?P<space>\s*)(?P<rest>.*)", line)
    if typed is None or not typed["space"]:
        print(" ".join(f"{verb} " for verb in VERBS if verb.startswith(typed["verb"] if typed else "")))
        return 0
    if typed["verb"] != "train":
        return 0
    os.environ["COMP_LINE"] = f"{_command()} {typed['rest']}"
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
    try:
        with suppress(Exception, SystemExit):
            return train(words)
    finally:
        sys.stderr = stderr
    return 0


def _command() -> str:
    name = os.path.basename(sys.argv[0])
    return "titan-exp" if name.endswith(".py") else name
