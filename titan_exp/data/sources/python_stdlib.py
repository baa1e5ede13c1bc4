"""Source `python_stdlib`: source code of the running Python's standard library, about 10 MB of text on any machine.

Excludes test suites (two thirds of the bytes, generated tables and broken syntax, missing in many distributions), codec
tables (near duplicates that would leak into the held-out split), `pydoc_data`, and the machine's build configuration.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from platform import python_version

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.data.sources.text import FileSource

DESCRIPTION = SourceDescription()

_EXCLUDED = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
}


class PythonStdlibSource(FileSource):
    """One document per module. Raises UserError if this Python has no library source."""

    def __init__(self, config: DataConfig | None = None) -> None:
        super().__init__(f"python_stdlib {python_version()}", _modules(Path(sysconfig.get_path("stdlib"))))
        if len(self) == 0:
            remedy = "use data=text data.paths='[your/files]', or a Python that has the source of its library"
            reason = "this Python comes without the source of its library"
            raise UserError("There is no text to read.", [Violation("data.source", "python_stdlib", reason, remedy)])


build = open_files = PythonStdlibSource


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path
