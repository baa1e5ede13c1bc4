"""Launch of replica groups, as the core's launcher, `status` and `compare` call it."""

from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.extensions.replica_groups.events import GroupSummary, summarize_groups
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.worlds import Processes, Worlds
from titan_exp.tracking.run_folder.run_folder import RunFolder

SLURM = "titan_exp.extensions.replica_groups.launch_slurm"


class GroupLaunch(Worlds):
    """Replica groups, each a world. What starts them is imported where it is needed."""

    noun = "replica group"
    leave, epilogue = f"{SLURM} leave", f"{SLURM} epilogue"
    status_help = (
        'Of replica groups, "groups" are those alive of all,\n'
        '"heals" counts states taken over from another, and "time lost" is waiting for others, computing again\n'
        "and restarts."
    )

    def supervise(self, layout: ResolvedLayout, folder: RunFolder, attempt: int) -> Processes:
        """All groups, and one lighthouse."""
        from titan_exp.extensions.replica_groups.launch_local import LocalReplicaGroups

        return LocalReplicaGroups(layout, folder, attempt)

    def join(self, folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
        """Join a group, or open the attempt if no group lives."""
        from titan_exp.extensions.replica_groups.launch_slurm import join_group

        return join_group(folder, rank, number)

    def summarize(self, folder: RunFolder) -> GroupSummary | None:
        """Summary of the events in groups.jsonl."""
        return summarize_groups(folder)
