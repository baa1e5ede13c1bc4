"""Configuration groups: `hydra.searchpath=[pkg://my_package.conf]`."""
