"""Remote checkpoints: upload, download, cache."""
