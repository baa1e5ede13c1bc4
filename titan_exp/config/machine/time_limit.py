"""Time limits as SLURM writes them."""


def hours(text: str) -> float:
    """Hours of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    in_hours = parts if dash or len(parts) == 3 else [0, *parts]
    return int(days or 0) * 24 + sum(part / 60**power for power, part in enumerate(in_hours))
