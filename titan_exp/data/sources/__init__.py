"""Data sources. A built-in `data.source` is a module of this package with a `DESCRIPTION` and `build`, a class or a
function that returns a source with the interface of `base.py`. The class or the module may also define `Options`;
`open_files`; `local_entries(config)`, the files on this machine; `violations(config)`, refusals before the launch;
`build_validation(config)`, a separate validation split. A token source has `build_sampler` and `validation_splits`
instead of `build`."""
