"""Comparison of runs: metrics, statistics, tables, plots, reports."""
