import sysconfig
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.python_stdlib import PythonStdlibSource


def test_modules_are_sorted_without_tests_tables_or_installed_packages():
    source = PythonStdlibSource()
    keys = [source.key(index) for index in range(len(source))]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(keys)
    parts = {part for key in keys for part in key.split("/")[:-1]}
    assert parts.isdisjoint({"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"})
    assert not any("sysconfigdata" in key for key in keys)
    texts = [source[index] for index in range(len(source))]
    assert all(texts)
    assert sum(map(len, texts)) > 5_000_000
    assert not any("\ufffd" in text for text in texts)
    assert source.fingerprint == PythonStdlibSource().fingerprint


def test_a_python_without_its_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="data=text"):
        PythonStdlibSource()
