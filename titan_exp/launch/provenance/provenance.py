"""Provenance of runs: code version, diff, environment. Read once per launch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from titan_exp.launch.provenance.code_snapshot import CodeSnapshot
from titan_exp.launch.provenance.environment import read_environment
from titan_exp.launch.provenance.git import CodeVersion, read_code_version


@dataclass(frozen=True)
class Provenance:
    """The same for all runs that are launched together."""

    code: CodeVersion
    """Version and commit."""
    diff: str
    """Patch from the commit."""
    environment: dict[str, Any]
    """Versions and hardware of the machine that launches."""
    frozen: CodeSnapshot | None = None
    """Code snapshot; None if ranks import the code in place."""

    def code_json(self, ids: dict[str, str]) -> str:
        """The content of code.json for the run of these names."""
        copy = {} if self.frozen is None else {"frozen": asdict(self.frozen)}
        return json.dumps({**ids, **asdict(self.code), **copy}, indent=2) + "\n"


def read_provenance(frozen: CodeSnapshot | None = None) -> Provenance:
    """The scene as it is now."""
    code, diff = read_code_version()
    return Provenance(code, diff, read_environment(), frozen)
