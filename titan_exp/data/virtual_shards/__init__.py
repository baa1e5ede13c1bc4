"""Row order of text tokenized while training: virtual shards, each an endless packed stream of documents."""
