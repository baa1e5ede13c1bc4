"""Memory gate: check a run before it is launched."""
