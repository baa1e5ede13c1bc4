"""Data sources. A built-in `data.source` is a module here that defines `build(config) -> Source`, and optionally
`build_validation(config)` for a validation split of its own; a source of tokens defines `build_sampler` and
`validation_splits` instead."""
