"""Options of built-in objectives."""
