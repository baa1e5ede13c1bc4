"""Tokenizers: byte-level and Hugging Face."""
