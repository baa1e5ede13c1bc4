"""Sampling of images from a diffusion model."""
