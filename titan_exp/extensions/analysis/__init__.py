"""What experts learned, loss by position, coordinate checks and rounding errors."""
