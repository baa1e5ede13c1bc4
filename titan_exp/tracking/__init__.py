"""The run folder and the sinks that metrics go to."""
