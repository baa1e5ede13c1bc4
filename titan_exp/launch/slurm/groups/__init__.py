"""Replica groups as jobs of SLURM: start, agent, lighthouse, epilogue."""
