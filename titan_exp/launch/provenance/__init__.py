"""Provenance of a run: git commit and diff, environment, code snapshot."""
