"""Expert parallelism: token dispatch to the ranks of the experts."""
