"""Source `python_stdlib`: the source of the running Python's own library, about 10 MB of real text on every machine.

Left out are the test suites (two thirds of the bytes, full of generated tables and broken syntax, and absent from many
distributions), the codec tables, whose files are near copies of each other and would leak into the held-out split,
the documentation strings dumped as data, and what describes this machine's build.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from platform import python_version

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.sources.text_files import FileSource

_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
}


class PythonStdlibSource(FileSource):
    """One document for each module. Raises UserError where this Python comes without its source."""

    def __init__(self) -> None:
        super().__init__(f"python_stdlib {python_version()}", _modules(Path(sysconfig.get_path("stdlib"))))
        if len(self) == 0:
            remedy = "data=text data.paths='[your/files]', or a Python installed with its library's source"
            reason = "this Python comes without the source of its library"
            raise UserError("There is no text to read.", [Violation("data.source", "python_stdlib", reason, remedy)])


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path
