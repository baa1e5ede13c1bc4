"""From a checked experiment to processes: identity, run folder, executors, state."""
