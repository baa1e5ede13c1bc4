"""Tokenizers: bytes and Hugging Face."""
