"""SLURM: batch scripts, submission, ranks and their rendezvous, epilogue."""
