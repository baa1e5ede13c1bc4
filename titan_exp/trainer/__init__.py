"""Trainer core: everything a rank process runs."""
