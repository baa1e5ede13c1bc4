"""Causal language models of transformers (`model=huggingface`), of any class that it has."""
