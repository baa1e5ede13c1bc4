"""Git commit and diff of the repository that holds the package."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import titan_exp
from titan_exp.launch.provenance.secrets import MASK, mask
from titan_exp.tracking.run_folder.temporary_folder import temporary_folder

NEW_FILE_LIMIT, NEW_FILES_LIMIT = 1_000_000, 10_000_000
"""Maximum bytes of one untracked file, and of all untracked files, in the diff; larger ones are only listed."""
GIT_TIMEOUT = 60
"""Timeout in seconds: a repository on a slow network disk must not block a launch."""


@dataclass(frozen=True)
class CodeVersion:
    """Code version of a run. Without a repository only the package `version` is known."""

    version: str
    commit: str | None
    """Full hash of HEAD."""
    branch: str | None
    """Branch; None if HEAD is detached."""
    dirty: bool | None
    """True if the working tree differs from the commit, including untracked files."""
    left_out: tuple[str, ...]
    """Untracked files too large for the diff, and nested repositories."""
    masked: bool
    """True if credentials were masked in the diff, so that it does not apply."""


def read_code_version(package: Path | None = None) -> tuple[CodeVersion, str]:
    """Code version of the folder `package` (default: titan_exp), and its diff from HEAD as one patch.

    An untracked package inside a repository is treated as having no repository.
    """
    folder = package or Path(titan_exp.__file__).resolve().parent
    version = metadata.version("titan_exp")
    root = run_git(folder, "rev-parse", "--show-toplevel")
    if root is None or not run_git(folder, "ls-files", "--", "."):
        return CodeVersion(version, None, None, None, (), False), ""
    top = Path(root.strip())
    commit = run_git(top, "rev-parse", "--verify", "HEAD")
    # A repository without a commit is compared with the empty tree.
    base = commit.strip() if commit else (run_git(top, "hash-object", "-t", "tree", "/dev/null") or "").strip()
    patch, left_out = _diff(top, base)
    masked = mask(patch)
    branch = run_git(top, "symbolic-ref", "--quiet", "--short", "HEAD")
    return CodeVersion(
        version=version,
        commit=commit.strip() if commit else None,
        branch=branch.strip() if branch else None,
        dirty=bool(patch or left_out),
        left_out=tuple(left_out),
        masked=masked.count(MASK) > patch.count(MASK),
    ), masked


def _diff(top: Path, base: str) -> tuple[str, list[str]]:
    """Patch of changed and untracked files, and the omitted files. Works on a copy of the index."""
    taken, left_out = _new_files(top)
    with temporary_folder() as folder:
        index = {"GIT_INDEX_FILE": str(folder / "index")}
        original = top / (run_git(top, "rev-parse", "--git-path", "index") or "").strip()
        if original.is_file():
            # Keeps the mtime: git rereads only files that are as new as the index.
            shutil.copy2(original, index["GIT_INDEX_FILE"])
        names = "\0".join(taken)
        run_git(top, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul", stdin=names, **index)
        return run_git(top, "diff", "--no-color", "--no-ext-diff", "--binary", base, **index) or "", left_out


def _new_files(top: Path) -> tuple[list[str], list[str]]:
    """Untracked files within the size limits, and the others."""
    taken, left_out, room = [], [], NEW_FILES_LIMIT
    for name in filter(None, (run_git(top, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")):
        path = top / name
        # A name that ends in a slash is a nested repository.
        size = 0 if path.is_symlink() else path.stat().st_size if path.is_file() else room + 1
        if size > min(room, NEW_FILE_LIMIT):
            left_out.append(name)
        else:
            room -= size
            taken.append(name)
    return taken, left_out


def run_git(folder: Path, *arguments: str, stdin: str = "", **environment: str) -> str | None:
    """Output of git; None if it fails or times out. Non-UTF-8 bytes are kept (surrogateescape)."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.quotepath=off", *arguments],
            capture_output=True,
            input=stdin.encode(errors="surrogateescape"),
            timeout=GIT_TIMEOUT,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", **environment},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="surrogateescape") if answer.returncode == 0 else None
