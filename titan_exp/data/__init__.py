"""Text to batches: sources of documents, tokenizers, a fixed order over virtual shards, packing, and two loaders."""
