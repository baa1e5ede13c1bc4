"""Rungs of successive halving in a study record: how far each has come."""

from collections.abc import Iterator

from titan_exp.launch.state.run_status import count_states, run_statuses
from titan_exp.launch.state.study_folder import StudyFolder, StudyRecord


def rung_lines(record: StudyRecord, study: StudyFolder) -> Iterator[str]:
    """One line per rung: its steps, the states of its runs, and their parents' number; none without halving."""
    rungs = record.rounds.get("rungs", ())
    statuses = run_statuses([study.run(point) for point in record.points]) if rungs else {}
    for number in range(1, len(rungs) + 1):
        points = [point for point in record.points if point.round == number]
        name = f"rung {number} of {len(rungs)}"
        if not points:
            yield f"{name}: begins when the rung before is done, with the best {record.rounds.get('keep')} of it"
            continue
        states = count_states([statuses[study.run(point).path].state for point in points])
        chosen = f", the best by {record.rounds.get('metric')}" if number > 1 else ""
        yield f"{name}: to step {points[0].steps}, {len(points)} run(s){chosen}: {states}"
