"""Diffusion models (FLUX.1), and the verb that encodes images to train them."""
