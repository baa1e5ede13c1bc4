"""Rules of token stores and latent stores."""
