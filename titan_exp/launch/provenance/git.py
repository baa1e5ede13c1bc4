"""Versions of code: commit, diff and checksums of a git repository, or checksums of files without one."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import titan_exp
from titan_exp.launch.provenance.secrets import MASK, mask
from titan_exp.tracking.run_folder.files import temporary_folder
from titan_exp.tracking.run_folder.run import CodeVersion, digest

NEW_FILE_LIMIT, NEW_FILES_LIMIT = 1_000_000, 10_000_000
"""Maximum bytes in the diff of one untracked file, and of all untracked files; larger ones are only listed."""
FILES_LIMIT = 2000
"""Maximum number of files with checksums."""
DIFF_OPTIONS = (
    *("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
"""Options of git diff that override settings of the user with which the patch would not apply."""
RUN_NOTHING = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
"""Options of git that switch off a repository's hooks and watchers. Its filters, such as LFS's, stay, since they shape
the diff."""
SOURCES = {".py", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h"}
"""Suffixes of files that a run can import or compile."""
KNOWN, NEW = ("--cached", "--others", "--exclude-standard"), ("--others", "--exclude-standard")
"""Options of git ls-files: for tracked and untracked files, and for untracked files only."""
GIT_TIMEOUT = 60
"""Timeout in seconds, because a repository on a slow network disk must not block a launch."""


def read_code_version(package: Path | None = None) -> tuple[CodeVersion, str]:
    """Code version of the folder `package` (default: titan_exp), and its diff from HEAD as one patch.

    An untracked package inside a repository is treated as having no repository.
    """
    folder = package or Path(titan_exp.__file__).resolve().parent
    version = titan_exp.__version__
    root = run_git(folder, "rev-parse", "--show-toplevel")
    if root is None or not list_files(folder, ["."], "--cached"):
        return read_files("titan_exp", folder.parent, [folder], version=version)[0], ""
    code, patch = read_repository("titan_exp", Path(root.strip()), [folder], untracked=["."])
    return replace(code, version=version), patch


def repository_of(path: Path) -> Path | None:
    """Top folder of the repository of a file or folder. None if there is none, or the path is ignored in it."""
    folder = path if path.is_dir() else path.parent
    root = run_git(folder, "rev-parse", "--show-toplevel")
    return Path(root.strip()) if root is not None and list_files(folder, [str(path)], *KNOWN) else None


def read_repository(
    name: str, top: Path, scopes: Sequence[Path], *, untracked: Sequence[str] | None = None
) -> tuple[CodeVersion, str]:
    """Version of a repository, and its diff from HEAD. The code is in the folders or files `scopes`. Their untracked
    files are in the diff, unless `untracked` names other places."""
    commit = run_git(top, "rev-parse", "--verify", "HEAD")
    # A repository without a commit is compared with the empty tree.
    base = commit.strip() if commit else (run_git(top, "hash-object", "-t", "tree", "/dev/null") or "").strip()
    inside = [os.path.relpath(scope.resolve(), top.resolve()) for scope in scopes]
    patch, left_out, differs = _diff(top, base, untracked or inside, inside)
    masked = mask(patch)
    branch = run_git(top, "symbolic-ref", "--quiet", "--short", "HEAD")
    return CodeVersion(
        name=name,
        path=str(top),
        commit=commit.strip() if commit else None,
        branch=branch.strip() if branch else None,
        remote=_remote(top),
        dirty=differs,
        left_out=tuple(left_out),
        masked=masked.count(MASK) > patch.count(MASK),
        diff=digest(patch.encode(errors="surrogateescape")) if patch else None,
        files=checksums(top, list_files(top, inside, *KNOWN) or ()),
    ), masked


def read_files(
    name: str, folder: Path, scopes: Sequence[Path], *, version: str | None = None, save: bool = False
) -> tuple[CodeVersion, str]:
    """Version of code without a repository: checksums of its Python files. With `save`, their text forms a patch that
    creates them in an empty folder."""
    found = {file for path in scopes for file in (path.rglob("*.py") if path.is_dir() else [path])}
    names = sorted(file.relative_to(folder).as_posix() for file in found if file.is_file())
    names = [file for file in names if "__pycache__" not in file]
    sizes = {file: (folder / file).stat().st_size for file in names if save and file.endswith(".py")}
    texts = {file: (folder / file).read_bytes().decode(errors="surrogateescape") for file in _within_limits(sizes)}
    patch = "".join(_new_file_patch(file, text) for file, text in texts.items())
    masked = mask(patch)
    return CodeVersion(
        name=name,
        path=str(folder),
        version=version,
        left_out=tuple(file for file in names if save and file not in texts),
        masked=masked.count(MASK) > patch.count(MASK),
        files=checksums(folder, names),
    ), masked


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of existing files by name; files too large for the diff have their size instead."""
    found = sorted(name for name in names if "__pycache__" not in name and (folder / name).is_file())
    if len(found) > FILES_LIMIT:
        return {}
    sizes = {name: (folder / name).stat().st_size for name in found}
    return {
        name: digest((folder / name).read_bytes()) if size <= NEW_FILE_LIMIT else f"{size} bytes"
        for name, size in sizes.items()
    }


def _remote(top: Path) -> str | None:
    """URL of `origin`, or of the only remote, without user, password and query."""
    names = (run_git(top, "remote") or "").split()
    name = "origin" if "origin" in names else names[0] if len(names) == 1 else None
    url = None if name is None else run_git(top, "remote", "get-url", name)
    return None if url is None else mask(re.sub(r"(?<=://)[^/@]*@|[?#].*$", "", url.strip()))


def _new_file_patch(name: str, text: str) -> str:
    """Patch that creates a text file."""
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return head
    lines = text.removesuffix("\n").split("\n")
    body = "".join(f"+{line}\n" for line in lines)
    end = "" if text.endswith("\n") else "\\ No newline at end of file\n"
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{end}"


def _diff(top: Path, base: str, untracked: Sequence[str], code: Sequence[str]) -> tuple[str, list[str], bool]:
    """Patch of changed and untracked files; the omitted files; and True if a tracked file differs, or an untracked one
    may be code, which all below `code` may be. It uses a copy of the index."""
    new = {name: top / name for name in list_files(top, untracked, *NEW) or () if not _is_data_link(top / name)}
    differs = any(_may_be_code(name, new[name], code) for name in new)
    differs = differs or bool(run_git(top, "diff", "--name-only", base))
    # A nested repository is listed as a folder.
    sizes = {name: path.lstat().st_size if path.is_symlink() or path.is_file() else None for name, path in new.items()}
    taken = _within_limits(sizes)
    with temporary_folder() as folder:
        index = {"GIT_INDEX_FILE": str(folder / "index")}
        original = top / (run_git(top, "rev-parse", "--git-path", "index") or "").strip()
        if original.is_file():
            # The copy keeps the mtime, since git rereads only files that are as new as the index.
            shutil.copy2(original, index["GIT_INDEX_FILE"])
        names = "\0".join(taken)
        run_git(top, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul", stdin=names, **index)
        return run_git(top, "diff", *DIFF_OPTIONS, base, **index) or "", sorted({*new} - {*taken}), differs


def _is_data_link(path: Path) -> bool:
    """True for a link to a folder from which nothing is imported, such as a virtual environment or a disk for runs."""
    return path.is_symlink() and path.is_dir() and next(path.glob("*.py"), None) is None


def _may_be_code(name: str, path: Path, code: Sequence[str]) -> bool:
    """True for an untracked file that a run could import or compile, or that lies in a folder of its code; also for a
    nested repository and a link to a folder, which may hold such files."""
    inside = any(place == "." or f"{name}/".startswith(f"{place}/") for place in code)
    return inside or path.is_dir() or path.suffix in SOURCES


def _within_limits(sizes: Mapping[str, int | None]) -> list[str]:
    """Names of the files that a diff has room for, given their sizes in bytes."""
    taken, room = [], NEW_FILES_LIMIT
    for name, size in sizes.items():
        if size is not None and size <= min(room, NEW_FILE_LIMIT):
            room -= size
            taken.append(name)
    return taken


def list_files(folder: Path, patterns: Sequence[str], *kinds: str) -> list[str] | None:
    """Names of files that match, relative to a folder, including files deleted from the index; None outside a
    repository."""
    listed = run_git(folder, "ls-files", "-z", *kinds, "--", *patterns)
    return None if listed is None else sorted({*filter(None, listed.split("\0"))})


def run_git(folder: Path, *arguments: str, stdin: str = "", **environment: str) -> str | None:
    """Output of git; None if it fails or times out. Non-UTF-8 bytes are kept (surrogateescape)."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.quotepath=off", *RUN_NOTHING, *_trusted(folder), *arguments],
            capture_output=True,
            input=stdin.encode(errors="surrogateescape"),
            timeout=GIT_TIMEOUT,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", **environment},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="surrogateescape") if answer.returncode == 0 else None


def _trusted(folder: Path) -> list[str]:
    """Options that let git read another user's checkout, which it refuses by default because its settings may run
    programs. They are as trusted as the owner's code, which is imported from `folder` anyway."""
    folder = folder.resolve()
    top = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    owners = set() if top is None else {path.stat().st_uid for path in (folder, top, top / ".git")}
    return ["-c", f"safe.directory={top}"] if len(owners) == 1 else []
