"""The command line as a user has it: another process, another folder."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TITAN_EXP = [str(Path(sys.executable).parent / "titan-exp")]


def run(
    words: list[str], folder: Path, *, limit: float = 120.0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, at most `limit` seconds; its two outputs come back as text."""
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def titan_exp(*words: str, folder: Path, limit: float = 120.0) -> subprocess.CompletedProcess[str]:
    """`titan-exp ...` in a folder."""
    return run([*TITAN_EXP, *words], folder, limit=limit)
