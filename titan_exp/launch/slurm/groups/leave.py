"""Decision of a replica group that SLURM is about to end: `python -m titan_exp.launch.slurm.groups.leave RUN_FOLDER`.

It leaves alone if other groups train on, which need nothing of it saved. The last one asks the run to save and stop.
"""

import sys
from collections.abc import Sequence

from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.slurm.groups.life import attempt_events, group_of_job, groups_lock, living_groups
from titan_exp.tracking.run_folder.group_events import record_event
from titan_exp.tracking.run_folder.run_folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    """Return 0 if this job's group leaves alone, 1 if the run is to stop. The argument is the run folder."""
    folder, number = RunFolder(arguments[0]), group_of_job()
    with groups_lock(folder):
        attempt = folder.read_attempts()[-1].attempt
        events = attempt_events(folder, attempt)
        newest = {event["group"]: event["event"] for event in events if event["event"] in ("started", "leaves")}
        staying = {group for group in living_groups(events, besides=number) if newest[group] == "started"}
        if folder.stop_requested() or len(staying) < load_experiment(folder.config, trust=True).cluster.min_groups:
            return 1
        # Recorded under the lock: of all groups at their time limit, one is the last.
        record_event(folder, attempt, event="leaves", group=number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
