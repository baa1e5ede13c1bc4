"""Versions of code: commit, diff and checksums, of a git repository or of files, with credentials masked or refused.

Detects known token formats, values after names such as `api_key`, and values of secret environment variables.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import titan_exp
from titan_exp.config import secrets
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.schema.foreign_code import import_paths_in
from titan_exp.config.schema.identity_keys import is_among
from titan_exp.tracking.run_folder.files import temporary_folder
from titan_exp.tracking.run_folder.run import CodeVersion, digest

MASK = "***"

_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# Any quoted value matches. A bare value needs a digit; otherwise code such as `token = tokenizer.next` would be masked.
_QUOTED = re.compile(
    rf"(?P<before>\b{secrets.CREDENTIAL_NAME}[\"']?\s*[:=]\s*(?P<quote>[\"']))(?P<secret>[^\"'\s]{{6,}})(?=(?P=quote))",
    re.I,
)
_BARE = re.compile(
    rf"(?P<before>\b{secrets.CREDENTIAL_NAME}\s*[:=]\s*(?:(?:bearer|basic)\s+)?)"
    r"(?P<secret>(?=[^\s\"',;&]*\d)[A-Za-z0-9_+/.~=-]{8,})",
    re.IGNORECASE,
)


def mask(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace every credential in a text by `***`."""
    return _masked(text, secrets.secret_values(environment.items()))


def _masked(text: str, values: Iterable[str]) -> str:
    for value in values:
        text = text.replace(value, MASK)
    text = secrets.SHAPES.sub(MASK, _PRIVATE_KEY.sub(rf"\1{MASK}\2", text))

    def hide(match: re.Match[str]) -> str:
        # `${oc.env:HF_TOKEN}` is not a credential, but the variable's value is.
        return f"{match['before']}{MASK}" if secrets.without_variables(match["secret"]).strip(":") else match[0]

    for pattern in (secrets.URL_USER, _QUOTED, _BARE):
        text = pattern.sub(hide, text)
    return text


def mask_override(override: str, environment: Mapping[str, str] = os.environ) -> str:
    """Mask credentials in a command-line override, or the whole value if its key names one, but no interpolation."""
    key, equals, value = override.partition("=")
    if equals and value not in ("", "null") and secrets.is_secret_key(key) and not value.strip("'\"").startswith("${"):
        return f"{key}={MASK}"
    return mask(override, environment)


def refuse_secrets(config: Mapping[str, object]) -> None:
    """Raise UserError about keys with credentials, since ranks read config.yaml and it cannot be masked, and about
    secret variables in keys that your code does not read."""
    values, found = secrets.secret_values(os.environ.items()), []
    groups = {name.partition(".")[0] for name in import_paths_in(config)} & {"model", "optimizer"}
    for key, value in _leaves(config):
        if not isinstance(value, str) or not value:
            continue
        literal = secrets.without_variables(value)
        if _masked(literal, values) != literal or (literal and secrets.is_secret_key(key)):
            reason = "this looks like a credential, and config.yaml would keep it"
            remedy = f"put it into an environment variable, and type the variable: {key}='${{oc.env:HF_TOKEN}}'"
            found.append(Violation(key, MASK, reason, remedy))
        elif secrets.variables_in(value) and not is_among(key.partition("[")[0], (*secrets.LABELS, *OPTIONS, *groups)):
            names = listed(dict.fromkeys(secrets.variables_in(value)), "and")
            remedy = "type the value itself, or use a variable with another name"
            remedy += f" (you may put secrets into {listed(OPTIONS)})"
            if key.startswith("cluster."):
                remedy = "leave it out, since jobs inherit your environment and their shell reads $NAME"
            found.append(Violation(key, value, f"{names}: {secrets.SECRET}", remedy))
    if found:
        raise UserError("The configuration holds credentials.", found)


OPTIONS = ("model.options", "optimizer.options", "lr_schedule.options", "data.options", "training.objective_options")
"""Arguments of your code; it gets the values of secret variables in them."""


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    parts: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        parts = ((f"{key}.{name}" if key else str(name), item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{key}[{index}]", item) for index, item in enumerate(value))
    else:
        yield key, value
        return
    for name, item in parts:
        yield from _leaves(item, name)


NEW_FILE_LIMIT, NEW_FILES_LIMIT = 1_000_000, 10_000_000
"""Maximum bytes in the diff of one untracked file, and of all untracked files; larger ones are only listed."""
FILES_LIMIT = 2000
DIFF_OPTIONS = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative")
DIFF_OPTIONS += ("--src-prefix=a/", "--dst-prefix=b/")
"""Options of git diff that override settings of the user with which the patch would not apply."""
RUN_NOTHING = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
"""Options of git that switch off a repository's hooks and watchers, but not filters, since they shape the diff."""
SOURCES = {".py", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h"}
"""Suffixes of files that a run can import or compile."""
KNOWN, NEW = ("--cached", "--others", "--exclude-standard"), ("--others", "--exclude-standard")
"""Options of git ls-files: for tracked and untracked files, and for untracked files only."""
GIT_TIMEOUT = 60  # seconds, because a repository on a slow network disk must not block a launch


def read_code_version(package: Path | None = None) -> tuple[CodeVersion, str]:
    """Code version of the folder `package` (default: titan_exp), and its diff from HEAD as one patch, which is empty
    if git does not track the folder."""
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
    # The URL of `origin`, or of the only remote, without user, password and query.
    remotes = (run_git(top, "remote") or "").split()
    name_of = "origin" if "origin" in remotes else remotes[0] if len(remotes) == 1 else None
    url = None if name_of is None else run_git(top, "remote", "get-url", name_of)
    return CodeVersion(
        name=name,
        path=str(top),
        commit=commit.strip() if commit else None,
        branch=branch.strip() if branch else None,
        remote=None if url is None else mask(re.sub(r"(?<=://)[^/@]*@|[?#].*$", "", url.strip())),
        dirty=differs,
        left_out=tuple(left_out),
        masked=masked.count(MASK) > patch.count(MASK),
        diff=digest(patch.encode(errors="surrogateescape")) if patch else None,
        files=checksums(top, list_files(top, inside, *KNOWN) or ()),
    ), masked


def read_files(
    name: str, folder: Path, scopes: Sequence[Path], *, version: str | None = None, save: bool = False
) -> tuple[CodeVersion, str]:
    """Version of code without a repository: checksums of its Python files. With `save`, their text is a patch."""
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


def _new_file_patch(name: str, text: str) -> str:
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

    def is_data_link(path: Path) -> bool:  # to a folder without code, such as a virtual environment or a disk for runs
        return path.is_symlink() and path.is_dir() and next(path.glob("*.py"), None) is None

    new = {name: top / name for name in list_files(top, untracked, *NEW) or () if not is_data_link(top / name)}
    inside = [name for name in new for place in code if place == "." or f"{name}/".startswith(f"{place}/")]
    # A nested repository or a link to a folder may hold code, too.
    differs = bool(inside) or any(path.is_dir() or path.suffix in SOURCES for path in new.values())
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


def _within_limits(sizes: Mapping[str, int | None]) -> list[str]:
    taken, room = [], NEW_FILES_LIMIT
    for name, size in sizes.items():
        if size is not None and size <= min(room, NEW_FILE_LIMIT):
            room -= size
            taken.append(name)
    return taken


def list_files(folder: Path, patterns: Sequence[str], *kinds: str) -> list[str] | None:
    """Names of matching files in a folder, also of files deleted from the index; None outside a repository."""
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
    """Options that let git read another user's checkout, which it refuses because its settings may run programs. They
    are as trusted as the owner's code, which is imported from `folder` anyway."""
    folder = folder.resolve()
    top = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    owners = set() if top is None else {path.stat().st_uid for path in (folder, top, top / ".git")}
    return ["-c", f"safe.directory={top}"] if len(owners) == 1 else []
