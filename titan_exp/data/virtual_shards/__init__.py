"""Text tokenized while training: a fixed number of virtual shards, each an endless packed stream of documents."""
