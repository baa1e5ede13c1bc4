"""Sub-verbs of `titan-exp plan`."""
