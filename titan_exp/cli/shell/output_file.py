"""File that the user names for a page, a table or a trace."""

from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.files import write_atomically


class OutputFile:
    """File of an option, as `--html`; `name` is an example of a file name. Its folder is created first, since a
    prediction may take minutes. Raises UserError if the file cannot be written."""

    def __init__(self, option: str, path: str | Path, name: str) -> None:
        self.path, self._option = Path(path).expanduser(), option
        if self.path.is_dir():
            raise UserError(f"{option} {path} is a folder. Name a file, as in {option} {self.path / name}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, text: str) -> None:
        """Write the file, atomically. Raises UserError if it cannot be written."""
        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_text(text, encoding="utf-8")  # do not replace a device or pipe by a file
            else:
                write_atomically(self.path, text)
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        why = error.strerror or error
        return UserError(
            f"{self._option} {self.path}: cannot be written ({why}). Name another file, or free disk space."
        )
