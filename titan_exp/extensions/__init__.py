"""Extensions of this repository, a package each; `titan_exp.config.extension` finds them, and the core imports none."""
