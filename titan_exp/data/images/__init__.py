"""Captioned images: rendered ones, folders, Hugging Face data sets and WebDataset shards."""
