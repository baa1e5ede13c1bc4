"""Finished runs read back: curves, tables, reports."""
