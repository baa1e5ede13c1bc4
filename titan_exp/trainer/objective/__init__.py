"""Objectives: the loss of a batch and the metrics reported with it."""
