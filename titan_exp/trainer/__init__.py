"""The trainer core, and what a rank process runs."""
