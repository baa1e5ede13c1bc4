"""Runs of an executor of the example package, whose machines are all this one."""

from pathlib import Path

import psutil
import pytest

from tests.launch.launching import REPOSITORY, wait_until
from titan_exp.cli.main import main
from titan_exp.launch.run_status import run_status
from titan_exp.tracking.run_folder.run_folder import RunFolder

PACKAGE = REPOSITORY / "docs" / "examples" / "my_package"


class Fleet:
    """A folder with runs of an executor of the example package. `words` choose it."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self.home, self.set = home, monkeypatch.setenv
        self.words = ["train", "model=llama_debug", "cluster.device=cpu", "experiment.name=x", "plan.gate=off", *words]
        self.words += ["parallelism.dp_shard=2", f"hydra.searchpath=[file://{PACKAGE}/my_package/conf]"]
        monkeypatch.chdir(home)
        monkeypatch.syspath_prepend(str(PACKAGE))
        monkeypatch.syspath_prepend(str(REPOSITORY))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def train(self, *words: str, fake: str = "", code: int = 0) -> RunFolder:
        if fake:
            self.set("TITAN_EXP_RANK_MAIN", f"tests.launch.fake_ranks.{fake}")
        assert main([*self.words, *words]) == code
        return self.folder

    @property
    def folder(self) -> RunFolder:
        (path,) = (self.home / "runs" / "x").glob("[!.]*")
        return RunFolder(path)

    def wait(self, state: str, limit: float = 60.0) -> None:
        """Wait until the run has ended so, and no agent is left."""
        wait_until(lambda: not self.processes(), limit)
        status = run_status(self.folder)
        assert status.state == state, status

    def processes(self, word: str = "") -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline", "status"])
        ours = [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]
        lines = {process: " ".join(process.info["cmdline"] or []) for process in ours}
        return [process for process, line in lines.items() if f"{self.home}/runs" in line and word in line]
