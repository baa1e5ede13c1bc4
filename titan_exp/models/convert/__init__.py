"""State-dict maps and config files between our models and other tools."""
