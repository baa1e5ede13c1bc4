"""Parallel layout: degrees, micro-batches, pipeline stages and schedules."""
