"""Sharded checkpoints in the format of torch.distributed.checkpoint: write, read, verify, save asynchronously."""
