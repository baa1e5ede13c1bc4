"""Sources of runs beside the run folder."""
