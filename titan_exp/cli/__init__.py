"""Command line, with one file per verb."""
