"""Memory of a token exchange through symmetric memory: rows in the worst case, bytes of buffers. Imports no torch."""

WEIGHT_BYTES = 4  # bytes of a row's weight, in fp32
BUFFERS = 4  # number of buffers for sent and for received rows: two sets in each direction, used in turn


def worst_case(tokens: int, choices: int, local_experts: int, ranks: int) -> int:
    """Rows that a rank receives if all tokens choose its experts, plus one free row for each expert without any."""
    return ranks * tokens * min(choices, local_experts) + local_experts


def symmetric_bytes(tokens: int, choices: int, local_experts: int, ranks: int, row_bytes: int) -> int:
    """Bytes of symmetric memory for rows and weights of a micro-batch; layers of equal shapes share them."""
    rows = tokens * choices + worst_case(tokens, choices, local_experts, ranks)
    return BUFFERS * rows * (row_bytes + WEIGHT_BYTES)
