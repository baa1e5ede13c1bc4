"""The Hydra sweeper of titan_exp."""
