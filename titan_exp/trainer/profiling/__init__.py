"""Profiling: traces, memory, stragglers, step times."""
