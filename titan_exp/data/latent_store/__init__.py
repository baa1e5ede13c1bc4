"""Latent store: latents of images and states of their texts, by sample."""
