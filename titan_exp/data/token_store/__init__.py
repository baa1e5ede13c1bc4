"""Token stores: documents tokenized once, and read at any place, by any number of ranks, without a scan."""
