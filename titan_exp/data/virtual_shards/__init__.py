"""Virtual shards: endless packed streams of documents that define the row order of text tokenized during training."""
