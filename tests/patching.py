"""Checked replacement of attributes, for mutations and instruments that tests apply in rank processes."""

import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
Mutation = tuple[str, Callable[[Any], Any], str]
"""Target of `patch`, its `make`, and the test that notices it."""
PROGRAM = """\
import importlib, sys, pytest
from tests.patching import patch
# Before tests import what it replaces.
patch(*importlib.import_module(sys.argv[1]).MUTATIONS[sys.argv[2]][:2])
# Modules that the mutation has imported already cannot have their asserts rewritten.
sys.exit(pytest.main(["-qx", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning", sys.argv[3]]))
"""


def patch(target: str, make: Callable[[Any], Any]) -> None:
    """Replace `package.module.attribute` or `package.module.Class.attribute` in this process, for good.

    `make` gets the original and returns the replacement. Modules of titan_exp that imported it from its own module
    get the replacement too.

    Raises:
        AttributeError: there is no such attribute, so that the replacement would have no effect.
    """
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    replacement = make(original)
    setattr(owner, name, replacement)
    if not isinstance(owner, ModuleType) or getattr(original, "__module__", None) != owner_name:
        return
    for module in [module for path, module in sys.modules.items() if path.startswith("titan_exp.")]:
        for own_name, value in list(vars(module).items()):
            if value is original:
                setattr(module, own_name, replacement)


def noticed(module: str, mutations: Mapping[str, Mutation]) -> Callable[[str], None]:
    """Test that each of the mutations, which are `MUTATIONS` of a module, is noticed by its test in a process of its
    own."""

    @pytest.mark.parametrize("name", mutations)
    def test(name: str) -> None:
        command = [sys.executable, "-c", PROGRAM, module, name, mutations[name][2]]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        found = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=300, check=False, text=True
        )
        said = found.stdout[-2000:] + found.stderr[-2000:]
        assert found.returncode == pytest.ExitCode.TESTS_FAILED, said
        assert "AssertionError" in found.stdout or "DID NOT RAISE" in found.stdout, said

    return test
