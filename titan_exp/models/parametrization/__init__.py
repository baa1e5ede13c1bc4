"""Parametrizations: scale initial weights, learning rate, weight decay and epsilon by a model's shape."""
