"""SLURM: batch scripts, submission, the place of a rank in a job, and how a job's attempt is closed."""
