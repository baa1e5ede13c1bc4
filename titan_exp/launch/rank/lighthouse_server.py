"""torchft's lighthouse server, which knows the living replica groups."""

from typing import Any

from titan_exp.config.machine.torchft import torchft_extension

JOIN_SECONDS = 1200.0
"""Seconds that a quorum waits for a group with a heartbeat, which may be saving a checkpoint."""
TICK_SECONDS = 0.05


def lighthouse_server(bind: str, *, min_groups: int, heartbeat: float) -> Any:
    """Start a server at an address; `heartbeat` is the silence in seconds after which a group counts as dead. Raises
    RuntimeError if the address cannot be bound."""
    return torchft_extension().LighthouseServer(
        bind=bind,
        min_replicas=min_groups,
        join_timeout_ms=int(JOIN_SECONDS * 1000),
        quorum_tick_ms=int(TICK_SECONDS * 1000),
        heartbeat_timeout_ms=int(heartbeat * 1000),
    )
