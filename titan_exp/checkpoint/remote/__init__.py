"""Remote checkpoints: upload, download and cache."""
