"""A decay as a user would bring it."""


def power(progress: float, exponent: float) -> float:
    """(1 - progress) to a power."""
    return (1 - progress) ** exponent
