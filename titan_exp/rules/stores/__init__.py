"""Rules of token stores."""
