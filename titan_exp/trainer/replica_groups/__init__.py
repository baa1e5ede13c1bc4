"""Replica groups: fault-tolerant data parallelism over groups of ranks, through torchft. Imported only where used."""
