"""Executor over ssh: hosts without a scheduler."""
