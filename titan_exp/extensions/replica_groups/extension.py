"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.replica_groups"

EXTENSION = Extension(
    name="replica_groups",
    summary="Replica groups: fault-tolerant data parallelism through torchft, and semi-synchronous training.",
    commits={"replica_groups": f"{HERE}.commits:commit_of"},
    updates={"outer_optimizer": f"{HERE}.outer_optimizer:outer_steps"},
    exchanges={"replica_groups": f"{HERE}.planner:GroupExchange"},
    kept_state={"kept_weights": True, "outer_momentum": False},
)
