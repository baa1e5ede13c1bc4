"""Schema of the configuration: typed conversion, diff, identity keys, import paths."""
