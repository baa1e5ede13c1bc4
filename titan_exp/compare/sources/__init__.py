"""Run sources other than run folders."""
