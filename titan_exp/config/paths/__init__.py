"""Paths and URLs that a configuration names: checkpoints, token stores."""
