"""State of runs and studies, read from their folders."""
