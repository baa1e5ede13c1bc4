"""Token stores: documents are tokenized once into memory-mapped shards, with O(1) random access for any number of
ranks."""
