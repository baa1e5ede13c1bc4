"""URLs of remote folders, and the run that another one continues."""

import importlib.util
import os
import re
from pathlib import Path

from titan_exp.config.paths.checkpoint_files import METADATA_FILE, saved_state, step_name, step_of

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_IN_PROCESS = ("memory",)
"""Protocols whose data does not outlive the process."""
_PIP = {"huggingface_hub": "huggingface_hub", "google": "gcsfs", "libarchive": "libarchive-c"}
"""PyPI names of packages whose module name differs."""


def is_url(path: str) -> bool:
    """True for a URL (`s3://bucket/prefix`, `file:///mnt/share`), False for a path."""
    return _URL.match(path) is not None


def joined(url: str, *names: str) -> str:
    """Append names to the path of a URL."""
    return "/".join((url.rstrip("/"), *names))


def problem_of_url(url: str) -> tuple[str, str] | None:
    """Reason why a URL cannot be used, and a remedy; None if it can. Uses no network and imports no package.

    The texts do not repeat the URL, which may contain a credential.
    """
    if "::" in url:
        return "titan_exp does not support chains of protocols (a::b)", "use the URL of the store itself"
    match = _URL.match(url)
    if match is None:
        return "this is not a URL", "write it as in s3://bucket/prefix, gs://bucket/prefix or file:///mnt/share/prefix"
    user, at, _ = match["rest"].partition("/")[0].rpartition("@")
    if (at and ":" in user) or "?" in url or "#" in url:
        return (
            "titan_exp writes the URL into the run folder, and user:password@ or ?key=… in it may be a credential",
            "leave that part out, and give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, "
            "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, …)",
        )
    return _problem_of_protocol(match["protocol"])


def _problem_of_protocol(protocol: str) -> tuple[str, str] | None:
    from fsspec.registry import known_implementations, registry

    if protocol in _IN_PROCESS:
        return "what this protocol stores ends with the process", "use s3://…, gs://… or file:///…"
    if protocol in registry:
        return None
    known = known_implementations.get(protocol)
    if known is None:
        return (
            f"fsspec knows no protocol {protocol}://",
            f"use one of {', '.join(sorted(_usual(known_implementations)))}",
        )
    module = str(known["class"]).partition(".")[0]
    if importlib.util.find_spec(module) is None:
        return f"this protocol needs the package {module}", f"type pip install {_PIP.get(module, module)}"
    return None


def _usual(known: dict[str, dict[str, str]]) -> list[str]:
    return [name for name in ("abfs", "file", "gs", "hf", "s3", "sftp", "smb") if name in known]


def normalize_parent(typed: str, runs: Path) -> tuple[str, int | None]:
    """Parent run, and the step if one of its checkpoints is named.

    The run is NAME/ID if it is in the folder of runs, else its absolute path or its URL. A path that does not exist
    stays as it is.
    """
    if is_url(typed) or not Path(typed).expanduser().exists():
        return typed, None
    path, step = Path(os.path.abspath(Path(typed).expanduser())), None
    if step_of(path) is not None and path.parent.name == "checkpoints":
        path, step = path.parent.parent, step_of(path)
    elif path.name == "checkpoints":
        path = path.parent
    within = os.path.relpath(path, os.path.abspath(runs))
    return (within if within.count("/") == 1 and not within.startswith("..") else str(path)), step


def parent_location(parent: str, runs: Path) -> str:
    """Path or URL of a normalized parent."""
    return parent if is_url(parent) or os.path.isabs(parent) else str(runs / parent)


def parent_checkpoint(location: str, step: int | None) -> Path | None:
    """Complete checkpoint at a path: of a run's step, or its newest, or the checkpoint itself."""
    if step is None:
        return saved_state(location)
    path = Path(location) / "checkpoints" / step_name(step)
    return path if (path / METADATA_FILE).is_file() else None
