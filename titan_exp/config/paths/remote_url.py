"""Places behind a URL, as far as the text of it tells: which protocol, and which package speaks it."""

import importlib.util
import re

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_OWN_MEMORY = ("memory",)
"""Protocols of places that die with the process."""
_PIP = {"huggingface_hub": "huggingface_hub", "google": "gcsfs", "libarchive": "libarchive-c"}
"""What installs a module that is named otherwise."""


def is_url(place: str) -> bool:
    """Whether a place is named by a URL (`s3://bucket/prefix`, `file:///mnt/share`) and not by a path."""
    return _URL.match(place) is not None


def joined(url: str, *names: str) -> str:
    """A URL with names added to its path."""
    return "/".join((url.rstrip("/"), *names))


def problem_of_url(url: str) -> tuple[str, str] | None:
    """Why nothing can be kept behind a URL, and what would work; None where its text and this machine allow it.

    Neither the network is asked nor a package imported. The texts do not repeat the URL: it may hold a credential.
    """
    if "::" in url:
        return "chains of protocols (a::b) are not followed", "name the place itself"
    match = _URL.match(url)
    if match is None:
        return "it is no URL", "s3://bucket/prefix, gs://bucket/prefix, file:///mnt/share/prefix"
    user, at, _ = match["rest"].partition("/")[0].rpartition("@")
    if (at and ":" in user) or "?" in url or "#" in url:
        return (
            "a URL is written into the run folder, and user:password@ or ?key=… in it may be a credential",
            "leave that out: credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, "
            "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, …)",
        )
    return _problem_of_protocol(match["protocol"])


def _problem_of_protocol(protocol: str) -> tuple[str, str] | None:
    from fsspec.registry import known_implementations, registry

    if protocol in _OWN_MEMORY:
        return "what is kept there ends with the process", "s3://…, gs://…, file:///…"
    if protocol in registry:
        return None
    known = known_implementations.get(protocol)
    if known is None:
        return f"fsspec knows no protocol {protocol}://", f"one of {', '.join(sorted(_usual(known_implementations)))}"
    module = str(known["class"]).partition(".")[0]
    if importlib.util.find_spec(module) is None:
        return f"it needs the package {module}", f"pip install {_PIP.get(module, module)}"
    return None


def _usual(known: dict[str, dict[str, str]]) -> list[str]:
    return [name for name in ("abfs", "file", "gs", "hf", "s3", "sftp", "smb") if name in known]
