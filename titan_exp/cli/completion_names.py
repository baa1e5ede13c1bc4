"""What a shell offers after a verb: studies after `sweep`, those that have runs after `status` and its like."""

from contextlib import suppress
from pathlib import Path


def complete_names(verb: str, begun: str) -> list[str]:
    """Names that a word may become; empty where the verb takes none, or on any error, as a shell wants it."""
    with suppress(Exception):
        if verb == "sweep":
            from titan_exp.config.study.study_file import study_files

            return sorted(name for name in study_files() if name.startswith(begun))
        if verb in ("status", "logs", "cancel", "retry", "compare"):
            from titan_exp.launch.state.run_lookup import names

            return sorted(name for name in names(Path("runs")) if name.startswith(begun))
    return []
