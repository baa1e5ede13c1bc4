"""Output of a comparison: terminal, CSV, Markdown, LaTeX, HTML page, W&B report."""
