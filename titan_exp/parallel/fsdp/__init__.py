"""Fully sharded data parallelism (FSDP2) and its gradient synchronization."""
