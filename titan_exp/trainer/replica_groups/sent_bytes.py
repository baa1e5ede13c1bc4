"""Bytes that replica groups send each other."""


def ring_bytes(size: float, groups: int) -> float:
    """Bytes that one member of a ring all-reduce, as Gloo's, sends for a tensor of `size` bytes."""
    return 2 * (groups - 1) / groups * size
