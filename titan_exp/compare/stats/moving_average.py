"""Centred moving average of a noisy loss."""

import numpy as np


def moving_average(values: list[float]) -> list[float]:
    """Centred moving average over about 4 % of the values. The window shrinks symmetrically at both ends, to avoid lag.
    Non-finite values become NaN and do not count in their neighbours' averages."""
    loss = np.array(values)
    known = np.isfinite(loss)
    index = np.arange(len(loss))
    half = np.minimum(max(1, len(loss) // 50), np.minimum(index, index[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first, last = index - half, index + half + 1
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return np.where(known, mean, np.nan).tolist()
