"""Head of a run's log: its configuration as different from the defaults, and its lineage."""

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.lineage import ancestors
from titan_exp.tracking.run_folder.overrides import for_shell, read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder


def log_head(folder: RunFolder) -> None:
    """Log the overrides recorded at the launch, and the lineage of a run that began earlier; called by rank 0."""
    overrides = read_overrides(folder.nondefault)
    if overrides is not None:
        get_logger().info("differs from the defaults: %s", " ".join(map(for_shell, overrides)) or "nothing")
    log_lineage(folder)


def log_lineage(folder: RunFolder) -> None:
    """Log the parent of a continued run, and the parent's parents."""
    for ancestor in ancestors(folder.path):
        get_logger().info("continued from %s", ancestor.lineage)
