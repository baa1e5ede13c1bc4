"""Explained exceptions: errors of the system in a sentence, and tracebacks of user code without our frames."""

import errno
import linecache
import os
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import titan_exp
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.secrets import concealed

MAX_FRAMES = 6
"""Frames printed of one traceback, the innermost ones."""


class UserCodeError(UserError):
    """User code that fails, or does not fit the run."""


def user_traceback(error: BaseException, packages: Collection[str] = ()) -> str:
    """The user's frames of a traceback and the error, as Python prints them; empty if no frame is the user's. Frames
    outside of titan_exp, the standard library and installed packages are the user's, and those of `packages` (prefixes
    of module names), wherever these are installed."""
    frames = [text for module, file, line, text in _frames(error) if _is_user_frame(module, file, packages)]
    if isinstance(error, SyntaxError) and error.filename and _is_user_frame("", error.filename, packages):
        # The file at fault has no frame, since it was not executed.
        frames.append(_frame_text(error.filename, error.lineno or 0, "<module>"))
    if not frames:
        return ""
    cut = [f"  ... {len(frames) - MAX_FRAMES} more frames of yours"] if len(frames) > MAX_FRAMES else []
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lines = [*cut, *frames[-MAX_FRAMES:], *(f"  {line}" for line in message.splitlines()[:MAX_FRAMES])]
    return concealed("\n".join(lines))  # here, as another process may print it


@contextmanager
def calling_user_code(what: str, packages: Collection[str] = ()) -> Iterator[None]:
    """Convert an exception with a user's frame into a UserError that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = user_traceback(error, packages)
        if not found:
            raise
        raise UserCodeError(f"{what}\n{found}") from error


def innermost_module(error: BaseException) -> str:
    """Name of the module whose code raised an exception."""
    modules = [module for module, _, _, _ in _frames(error)]
    return modules[-1] if modules else ""


def package_prefix(name: str) -> str:
    """Prefix of the modules that an import path chooses: its package, but of torch and titan_exp only its module."""
    package = name.partition(".")[0]
    return name.rpartition(".")[0] if package in ("torch", "titan_exp") else package


def _frames(error: BaseException) -> Iterator[tuple[str, str, int, str]]:
    """Module, file, line and text of every frame, outermost first; those of the causes of an error come first."""
    chain: list[TracebackType | None] = []
    seen: BaseException | None = error
    while seen is not None:
        chain.insert(0, seen.__traceback__)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    for trace in chain:
        for frame, line in traceback.walk_tb(trace):
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            yield str(frame.f_globals.get("__name__", "")), file, line, _frame_text(file, line, function)


def _frame_text(file: str, line: int, function: str) -> str:
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"  {shown}:{line}, in {function}\n    {linecache.getline(file, line).strip()}"


def _is_user_frame(module: str, file: str, packages: Collection[str]) -> bool:
    if any(module == package or module.startswith(f"{package}.") for package in packages):
        return True
    if not os.path.isabs(file):  # <frozen importlib>, generated code
        return False
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


_NOT_THE_USERS = (
    Path(titan_exp.__file__).parent,
    Path(titan_exp.__file__).parents[1] / "hydra_plugins",
    Path(sysconfig.get_path("stdlib")),
)
"""Folders of titan_exp and of the standard library."""


_NOT_YOURS = "See with ls -ld who may use it, or set paths.runs, or the path, to a folder of your own"
REMEDIES = {
    errno.ENAMETOOLONG: "Use a shorter name",
    **dict.fromkeys((errno.EACCES, errno.EPERM), _NOT_YOURS),
    errno.EROFS: "Set paths.runs, or the path, to a folder that you can write to",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space, or set paths.runs to a folder on another disk"),
    errno.ELOOP: "Its symbolic links lead in a circle, so remove one of them",
    errno.EMFILE: "Raise the limit of open files with ulimit -n 4096",
    **dict.fromkeys((errno.EIO, errno.ESTALE), "Its disk has failed or does not answer, so try again or use another"),
}
"""Remedies by errno, for errors that no line of code can cause on its own."""
SHOWN = 80
"""Characters of a path in a message."""


def explain_os_error(error: OSError | RuntimeError) -> str | None:
    """Message for an error of the machine; None if the error may be a bug."""
    if isinstance(error, RuntimeError):
        # pathlib's only RuntimeError besides a loop of links; `~name` of an unknown user, or no HOME.
        if "home directory" not in str(error):
            return None
        return "A path begins with ~, and that home folder is unknown. Write the path in full."
    if error.errno not in REMEDIES:
        return None
    path = str(error.filename or "")
    path = path if len(path) <= SHOWN else f"{path[:SHOWN]}…"
    reason = (error.strerror or str(error)).lower()
    return f"{path}: {reason}. {REMEDIES[error.errno]}." if path else f"{reason.capitalize()}. {REMEDIES[error.errno]}."
