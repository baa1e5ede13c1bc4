"""The command line, `titan-exp VERB ...`. Imports nothing heavy: help, completion and `--cfg` answer at once."""

import importlib.metadata
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

from titan_exp.config.errors.did_you_mean import listed, nearest
from titan_exp.config.errors.user_error import UserError


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
        from titan_exp.compare.output.plot import draw
        from titan_exp.config.schema.typed_config import to_experiment
        from titan_exp.launch.memory_gate import gate_run
        from titan_exp.launch.run_console import RunConsole
        from titan_exp.launch.run_plan import plan_run
        from titan_exp.launch.run_plans import run

        experiment = to_experiment(cfg)
        if experiment.data.preview is not None:
            from titan_exp.data.preview import preview

            plan_run(experiment, overrides)  # which refuses what could not be trained either
            seed = experiment.experiment.seed
            for line in preview(experiment.data, experiment.training, seed, experiment.data.preview):
                print(line)
            return 0
        console = RunConsole()
        if experiment.cluster.kind == "slurm":
            from titan_exp.launch.slurm.error_report import submit

            return submit([gate_run(plan_run(experiment, overrides), console.say)])
        outcome = run(gate_run(plan_run(experiment, overrides), console.say))
        # A done run that came back from checkpoint.remote has no rows here, nor has one of no steps.
        if outcome.exit_code == 0 and experiment.training.steps and outcome.folder.metrics.exists():
            print(f"loss curve: {draw(outcome.folder.path)}")
        return outcome.exit_code

    from titan_exp.cli.sweep import train_words

    return _sweeping(train_words(words), launch_run)


def sweep(words: Sequence[str]) -> int:
    """Run a study: every point of sweeps/NAME.yaml, or what is missing of it."""
    from titan_exp.cli.sweep import sweep_words

    found = sweep_words(words)
    return 0 if found is None else _sweeping(found, lambda *_: 0)


def plan(words: Sequence[str]) -> int:
    """Memory and speed of a run, predicted before anything is launched; or the best layouts for a cluster."""
    if words and words[0] == "search":
        from titan_exp.cli.plan_search import HELP as SEARCH_HELP
        from titan_exp.cli.plan_search import search_command, search_options

        sought, rest = search_options(words[1:])
        if sought.help:
            print(SEARCH_HELP)
            return 0
        return _with_hydra(rest, lambda cfg, typed: search_command(cfg, sought, typed))
    from titan_exp.cli.plan import HELP, options_among, plan_command, require_no_verb

    if words[:1] == ["calibrate"]:
        from titan_exp.cli.plan_calibrate import calibrate_command

        return calibrate_command(list(words[1:]))
    options, others = options_among(words)
    if options.help:
        print(HELP)
        return 0
    require_no_verb(others)
    return _with_hydra(others, lambda cfg, _: plan_command(cfg, options))


def status(words: Sequence[str]) -> int:
    """How runs and studies stand: state, step, loss, speed, time left."""
    from titan_exp.cli.status import status_command

    return status_command(list(words))


def logs(words: Sequence[str]) -> int:
    """What a run printed, or prints; of a study, how its failed runs ended."""
    from titan_exp.cli.logs import logs_command

    return logs_command(list(words))


def cancel(words: Sequence[str]) -> int:
    """Have runs save and stop, and start no more of a study."""
    from titan_exp.cli.cancel import cancel_command

    return cancel_command(list(words))


def retry(words: Sequence[str]) -> int:
    """Start runs again that failed or were lost, in their folders."""
    from titan_exp.cli.retry import retry_command

    return retry_command(list(words))


def generate(words: Sequence[str]) -> int:
    """Continue a text with a trained model."""
    from titan_exp.inference.generate import generate_command
    from titan_exp.launch.local.ephemeral_ranks import run_on_ranks

    return generate_command(list(words), run_on_ranks)


def tokenize(words: Sequence[str]) -> int:
    """Turn text into a token store, to train from at any scale."""
    from titan_exp.cli.tokenize import check_store, make_store, options_among, tokenize_help

    if {"--help", "-h"} & set(words):
        print(tokenize_help(), end="")
        return 0
    options, others = options_among(words)
    if options.check:
        return check_store(options.check)

    def make(cfg: Any, overrides: Sequence[str]) -> int:
        from titan_exp.config.schema.typed_config import to_experiment

        return make_store(options, to_experiment(cfg))

    return _with_hydra(others, make)


def evaluate(words: Sequence[str]) -> int:
    """Loss and perplexity of a checkpoint on any data."""
    from titan_exp.inference.evaluate import evaluate_command
    from titan_exp.launch.local.ephemeral_ranks import run_on_ranks

    return evaluate_command(list(words), run_on_ranks)


def convert(words: Sequence[str]) -> int:
    """Checkpoints to and from Hugging Face, Meta's Llama, torchtune and plain torch."""
    from titan_exp.cli.convert import convert_command

    return convert_command(list(words))


def download(words: Sequence[str]) -> int:
    """Tokenizer, configuration and weights from the Hugging Face hub."""
    from titan_exp.cli.download import download_command

    return download_command(list(words))


def compare(words: Sequence[str]) -> int:
    """What differs between runs, and by how much: a table, plots, a page."""
    from titan_exp.cli.compare import compare_command

    return compare_command(list(words))


def doctor(words: Sequence[str]) -> int:
    """What this machine can do, measured; with --numerics, which layers a numeric recipe harms."""
    if "--numerics" in words:
        from titan_exp.doctor.numerics_command import doctor_command

        return doctor_command(list(words))
    # As the launcher has it for ranks; torch reads it when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from titan_exp.doctor.machine import machine_command
    from titan_exp.launch.local.ephemeral_ranks import run_on_ranks

    return machine_command(list(words), run_on_ranks)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "sweep": sweep,
    "plan": plan,
    "status": status,
    "logs": logs,
    "cancel": cancel,
    "retry": retry,
    "generate": generate,
    "evaluate": evaluate,
    "convert": convert,
    "download": download,
    "tokenize": tokenize,
    "compare": compare,
    "doctor": doctor,
}
"""What the command line can do."""
NAMING = ("sweep", "status", "logs", "cancel", "retry", "compare")
"""Verbs after which a study or a run is named."""

USAGE = """\
titan-exp: pretraining experiments, from a composed configuration to a finished run.

  titan-exp VERB ...

Verbs
{verbs}

Start here
  titan-exp train +experiment=smoke      seconds, to see that everything is connected
  titan-exp train                        a small language model on this machine, in minutes
  titan-exp train --help                 the groups, their options, and how to set any key
  titan-exp sweep                        the studies there are, and what each asks
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


def _sweeping(found: Any, task: Callable[[Any, Sequence[str]], int]) -> int:
    """Let Hydra read sorted words; what is for its sweeper goes around it."""
    from titan_exp.launch.sweep.options import use_sweep_options

    with use_sweep_options(found.asked):
        return _with_hydra(found.words, task, inside=found.inside, where=found.where)


def _with_hydra(
    words: Sequence[str], task: Callable[[Any, Sequence[str]], int], *, inside: Sequence[str] = (), where: str = ""
) -> int:
    """Let Hydra read the words and call the task with each composed configuration; return the worst exit code.

    Args:
        words: as typed after the verb.
        task: takes a configuration and the overrides that were typed.
        inside: of a study: overrides that it holds, and those typed after its name.
        where: of a study: its file.
    """
    from titan_exp.config.command_line.hydra_args import read_arguments

    arguments = read_arguments(words)
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from titan_exp.config.command_line.help import train_help
    from titan_exp.config.errors.explain_hydra import MESSAGE, explain, is_about_words, misspelt
    from titan_exp.config.hydra.compose import CONF_DIR, CONFIG_NAME, HYDRA_VERSION, OWN_FILE, standing_overrides
    from titan_exp.config.hydra.resolvers import register_resolvers
    from titan_exp.config.schema.import_path import search_current_directory

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
        everything = replace(arguments, overrides=(*inside, *arguments.overrides))
        if arguments.has("--multirun", "-m") and (found := misspelt(everything)):
            # Said once, and not again for every point of the sweep.
            raise UserError(f"{MESSAGE} They were typed, or are in {where}." if where else MESSAGE, found)
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
    verb, rest = typed["verb"], typed["rest"]
    if verb in NAMING:
        from titan_exp.cli.completion_names import complete_names

        name, space, rest = rest.partition(" ")
        if verb != "sweep" or not space:
            print(" ".join(f"{word} " for word in complete_names(verb, name)))
        else:
            print("\n".join(_composed(rest, words)))
        return 0
    from titan_exp.config.command_line.completion import GROUPS, composes, fits, own_words

    *before, word = rest.split(" ")
    found = own_words(verb, word)
    if verb in GROUPS:
        line = " ".join([*(each for each in before if composes(verb, each)), word])
        found += [offer for offer in _composed(line, words) if fits(verb, offer)]
    print("\n".join(found))
    return 0


def _composed(rest: str, words: Sequence[str]) -> list[str]:
    """What Hydra would complete after `titan-exp train`."""
    os.environ["COMP_LINE"] = f"{_command()} {rest}"
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
    said = io.StringIO()
    try:
        with redirect_stdout(said), suppress(Exception, SystemExit):
            train(words)
    finally:
        sys.stderr = stderr
    return said.getvalue().split()


def _command() -> str:
    name = os.path.basename(sys.argv[0])
    return "titan-exp" if name.endswith(".py") else name
