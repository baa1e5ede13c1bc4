"""Model classes of transformers: how one is built, described, attended in, initialized and called."""
