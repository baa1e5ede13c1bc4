"""Data sources. A built-in `data.source` is a module of this package that defines `build(config) -> Source`, and
optionally `build_validation(config)` for a separate validation split; a token source defines `build_sampler` and
`validation_splits` instead."""
