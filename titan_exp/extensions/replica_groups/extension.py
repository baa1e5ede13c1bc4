"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.replica_groups"

EXTENSION = Extension(
    name="replica_groups",
    summary="Replica groups: fault-tolerant data parallelism through torchft, and semi-synchronous training.",
    groups={"cluster": f"{HERE}.config:ReplicaGroupsConfig", "semi_sync": f"{HERE}.config:SemiSyncConfig"},
    idle={
        "semi_sync.groups": ("semi_sync.mode", ("none",)),
        "semi_sync.interval": ("semi_sync.mode", ("none",)),
        "semi_sync.outer_lr": ("semi_sync.mode", ("none", "local_sgd")),
        "semi_sync.outer_momentum": ("semi_sync.mode", ("none", "local_sgd")),
        "semi_sync.outer_nesterov": ("semi_sync.mode", ("none", "local_sgd")),
        "semi_sync.fragments": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
        "semi_sync.fragment_pattern": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
        "semi_sync.delay": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
        "semi_sync.mixing": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
    },
    rules=f"{HERE}.rules",
    asked=f"{HERE}.config:asked",
    commit=f"{HERE}.commits:commit_of",
    updates=f"{HERE}.outer_optimizer:outer_steps",
    exchange=f"{HERE}.planner:GroupExchange",
    kept_state={"kept_weights": True, "outer_momentum": False},
    worlds=f"{HERE}.launch:GroupLaunch",
)
