"""Document sources: text files, Hugging Face datasets, the Python standard library."""
