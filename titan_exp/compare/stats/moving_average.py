"""The moving mean that shows where a noisy loss goes."""

import numpy as np


def moving_average(values: list[float]) -> list[float]:
    """Centred moving mean over up to a twenty-fifth of the values. Symmetric, towards the ends too, so that it neither
    lags behind a falling loss nor bends where it stops. NaN stays NaN, and does not count in the means around it."""
    loss = np.array(values)
    known = np.isfinite(loss)
    place = np.arange(len(loss))
    half = np.minimum(max(1, len(loss) // 50), np.minimum(place, place[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first, last = place - half, place + half + 1
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return np.where(known, mean, np.nan).tolist()
