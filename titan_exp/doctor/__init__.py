"""What a machine can do: rates measured in about a minute, and what its data sheet says."""
