"""Paths and URLs in a configuration: checkpoints, data files, token stores."""
