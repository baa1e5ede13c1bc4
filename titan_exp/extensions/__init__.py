"""Extensions of this repository, one package each. `titan_exp.config.extension` finds them, and the core imports
none."""
