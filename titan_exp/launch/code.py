"""Which code runs: the commit of the repository that holds the package, and everything that differs from it."""

import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import titan_exp
from titan_exp.launch.credentials import MASK, mask

UNTRACKED_LIMIT = 1_000_000
"""Bytes of new files that go into the diff; larger ones are data rather than code and are only named."""
GIT_TIMEOUT = 60
"""Seconds; a repository on a slow network disk must not hold up a launch for ever."""


@dataclass(frozen=True)
class Code:
    """The code of a run. Without a repository only the version of the installed package is known."""

    version: str
    """Version of the installed package."""
    commit: str | None
    """Full hash of HEAD."""
    branch: str | None
    """Branch, None where HEAD is detached."""
    dirty: bool | None
    """Whether anything differs from the commit, new files included."""
    left_out: tuple[str, ...]
    """New files too large for the diff."""
    masked: bool
    """Whether credentials were masked in the diff, which then does not apply as it is."""


def read_code(package: Path | None = None) -> tuple[Code, str]:
    """The code that holds `package` (a folder; our own by default), and the diff from its commit as one patch.

    A package that is installed somewhere inside a repository without being part of it counts as without one.
    """
    folder = package or Path(titan_exp.__file__).resolve().parent
    version = metadata.version("titan_exp")
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or not _git(folder, "ls-files", "--", "."):
        return Code(version, None, None, None, (), False), ""
    top = Path(root.strip())
    commit = _git(top, "rev-parse", "--verify", "HEAD")
    # A repository without a commit is compared with nothing.
    base = commit.strip() if commit else (_git(top, "hash-object", "-t", "tree", "/dev/null") or "").strip()
    patch, left_out = _diff(top, base)
    masked = mask(patch)
    branch = _git(top, "symbolic-ref", "--quiet", "--short", "HEAD")
    return Code(
        version=version,
        commit=commit.strip() if commit else None,
        branch=branch.strip() if branch else None,
        dirty=bool(patch or left_out),
        left_out=tuple(left_out),
        masked=masked.count(MASK) > patch.count(MASK),
    ), masked


def _diff(top: Path, base: str) -> tuple[str, list[str]]:
    """The patch of changed and new files; and the new files left out of it."""
    parts = [_git(top, "diff", "--no-color", "--no-ext-diff", "--binary", base) or ""]
    left_out = []
    new = _git(top, "ls-files", "--others", "--exclude-standard", "-z") or ""
    for name in filter(None, new.split("\0")):
        path = top / name
        if path.is_symlink() or (path.is_file() and path.stat().st_size <= UNTRACKED_LIMIT):
            text = _git(top, "diff", "--no-color", "--no-ext-diff", "--binary", "--no-index", "--", "/dev/null", name)
            parts.append(text or "")
        else:
            left_out.append(name)
    return "".join(parts), left_out


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no repository, or no answer in time."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.quotepath=off", *arguments],
            capture_output=True,
            timeout=GIT_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # `diff --no-index` exits 1 where the files differ, which is its answer and no error.
    accepted = (0, 1) if "--no-index" in arguments else (0,)
    return answer.stdout.decode(errors="replace") if answer.returncode in accepted else None
