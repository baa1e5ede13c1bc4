"""Centred moving average of a noisy loss; `page/curves.js` has the same for pages."""

import numpy as np


def moving_average(values: list[float]) -> list[float]:
    """Centred moving average over about 4 % of the values.

    At the end the window is cut off, so that the last value is the mean of the last 2 %. At the beginning, where a loss
    falls fast, a line is fitted to the cut-off window. Non-finite values become NaN and do not count in their
    neighbours' averages.
    """
    loss = np.array(values)
    known = np.isfinite(loss)
    index, half = np.arange(len(loss)), max(1, len(loss) // 50)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    last = np.minimum(index + half + 1, len(loss))
    first = np.maximum(index - half + (index + half >= len(loss)), 0)
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    for place in range(min(half, len(loss) - half)):
        window = index[: place + half + 1][known[: place + half + 1]]
        if len(window) > 1:
            mean[place] = np.polyfit(window - place, loss[window], 1)[1]
    return np.where(known, mean, np.nan).tolist()
