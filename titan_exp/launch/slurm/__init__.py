"""SLURM: batch scripts, submission, rank and rendezvous, epilogue."""
