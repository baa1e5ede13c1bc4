"""The verb `titan-exp cancel`: runs save and stop, and of a study nothing more is started."""

from titan_exp.config.command_line.flags import take_flags
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.state.run_lookup import find, find_study_folder, split_runs_folder
from titan_exp.launch.state.run_status import run_statuses
from titan_exp.launch.sweep.shipped_study import cancel

HELP = """\
titan-exp cancel: have runs save and stop, and take waiting ones out of the queue.

  titan-exp cancel NAME        every run of a study that waits or runs; of a local sweep nothing more is started
  titan-exp cancel RUN ...     runs, by path, by the beginning of their id, or by STUDY/LABEL

Nothing is deleted: the command that started them continues them.
"""


def cancel_command(words: list[str]) -> int:
    """Run the verb. Returns the exit code.

    Raises:
        UserError: a word names nothing, or there is none.
    """
    if {"--help", "-h"} & set(words):
        print(HELP, end="")
        return 0
    _, rest = take_flags(words, (), verb="cancel")
    runs, named = split_runs_folder(rest)
    if not named:
        raise UserError("Cancel what? titan-exp cancel NAME or RUN; titan-exp status shows what there is.")
    found = find(named, runs)
    stopped = 0
    for word in named:
        study = find_study_folder(word, runs)
        if study is not None and (holder := study.holder()) is not None:
            study.request_stop("titan-exp cancel")
            stopped += 1
            print(f"{study.path.name}: no further run is started ({holder})")
    now = run_statuses([one.folder for one in found])
    active = [one for one in found if now[one.folder.path].active]
    cancel([one.folder for one in active], {one.folder.path.name: one.label for one in active}, print)
    if not active and not stopped:
        states = [now[one.folder.path].state for one in found]
        said = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        print(f"Nothing waits or runs: {said}.")
    return 0
