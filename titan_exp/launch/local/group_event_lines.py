"""Console lines of replica groups: deaths, starts, heals and groups that stay away, from groups.jsonl."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config.paths.foreign_file import parse_json
from titan_exp.launch.state.tail import FileTail
from titan_exp.tracking.run_folder.run_folder import RunFolder


class GroupEventLines:
    """New events of an attempt as lines; none without replica groups."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._tail, self._attempt = FileTail(folder.groups, from_now=True), attempt
        self._started: set[int] = set()
        self._living: set[int] | None = None

    def lines(self) -> Iterator[str]:
        """Lines of the events since the last call. A damaged event is skipped."""
        for text in self._tail.lines():
            try:
                event = parse_json(text)
                if event["attempt"] == self._attempt and (line := self._describe(event)) is not None:
                    yield line
            except (ValueError, LookupError, TypeError):
                continue

    def _describe(self, event: dict[str, Any]) -> str | None:
        kind, group = event["event"], f"replica group {event.get('group')}"
        if kind == "quorum":
            return self._describe_quorum(event)
        if kind == "started":
            again = event["group"] in self._started
            self._started.add(event["group"])
            return f"{group} is started again, log {event['start']}" if again else None
        if kind == "ended" and event["exit"] == 0:
            return None
        return {
            "lighthouse started": "the lighthouse of the replica groups died and is started again",
            "ended": f"{group} ended: {event.get('reason')}",
            "not started": f"{group} could not be started: {event.get('reason')}",
            "given up": f"{group} is given up and stays away; the others train on",
        }.get(kind)

    def _describe_quorum(self, event: dict[str, Any]) -> str | None:
        before, self._living = self._living, set(event["groups"])
        if before is None:
            return None
        what = [f"replica group {group} is gone" for group in sorted(before - self._living)]
        what += [f"replica group {group} has healed" for group in event["joined"]]
        living = f"{len(self._living)} of {len(self._started)} in step {event['step'] + 1}"
        return f"{', '.join(what) or 'new quorum'}: {living}"
