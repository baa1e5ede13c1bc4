"""Checkpoint formats of other tools: Hugging Face, Meta, torchtune, plain torch."""
