"""Causal language models of transformers (`model=huggingface`), of any of its classes."""
