"""Provenance of runs: code version, diff, environment. Read once per launch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from titan_exp.launch.provenance.code_snapshot import CodeSnapshot
from titan_exp.launch.provenance.environment import read_environment
from titan_exp.launch.provenance.git import CodeVersion, read_code_version


@dataclass(frozen=True)
class Provenance:
    """Provenance shared by all runs of one launch."""

    code: CodeVersion
    diff: str
    environment: dict[str, Any]
    frozen: CodeSnapshot | None = None
    """Code snapshot; None if ranks import the code in place."""

    def code_json(self, ids: dict[str, str]) -> str:
        """Content of code.json for the run with these ids."""
        frozen = {} if self.frozen is None else {"frozen": asdict(self.frozen)}
        return json.dumps({**ids, **asdict(self.code), **frozen}, indent=2) + "\n"


def read_provenance(frozen: CodeSnapshot | None = None) -> Provenance:
    """Read the current code version, diff and environment."""
    code, diff = read_code_version()
    return Provenance(code, diff, read_environment(), frozen)
