"""Tasks: multiple choice, continuations and documents, scored by log-likelihood while training."""
