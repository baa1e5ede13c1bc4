"""SLURM time limits."""


def hours(text: str) -> float:
    """Parse a time limit (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to hours."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    in_hours = parts if dash or len(parts) == 3 else [0, *parts]
    return int(days or 0) * 24 + sum(part / 60**power for power, part in enumerate(in_hours))
