"""Module metrics, one per file, which `tracking.metrics` switches on by file name."""
