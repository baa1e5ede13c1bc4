"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.replica_groups"

EXTENSION = Extension(
    name="replica_groups",
    summary="Groups of processes that fail and return alone, and semi-synchronous training (DiLoCo).",
    worlds=f"{HERE}.launch:GroupLaunch",
)
