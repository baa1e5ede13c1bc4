"""Cross-entropy: plain, fused with the LM head, vocabulary-parallel."""
