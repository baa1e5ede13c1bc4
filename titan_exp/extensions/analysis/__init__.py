"""Analysis: specialization of experts, loss by position, coordinate checks and rounding errors."""
