"""Operating system errors of a user's paths and disks, as one line with a remedy."""

import errno

REMEDIES = {
    errno.ENAMETOOLONG: "Use a shorter name",
    errno.EACCES: "ls -ld shows who may use it; set paths.runs or the path to a folder of your own",
    errno.EPERM: "ls -ld shows who may use it; set paths.runs or the path to a folder of your own",
    errno.EROFS: "Set paths.runs, or the path, to a folder that you can write to",
    errno.ENOSPC: "Free some space, or set paths.runs to a folder on another disk",
    errno.EDQUOT: "Free some space, or set paths.runs to a folder on another disk",
    errno.ELOOP: "Its symbolic links lead in a circle",
    errno.EMFILE: "ulimit -n shows the limit of open files, ulimit -n 4096 raises it",
    errno.EIO: "Its disk fails or does not answer",
    errno.ESTALE: "Its disk fails or does not answer",
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
