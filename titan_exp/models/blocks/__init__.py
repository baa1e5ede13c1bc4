"""Building blocks of models: attention, feed-forward, norms, linear layers."""
