"""MariaDB and slurmdbd for a test's SLURM, in its folder and on their own ports."""

import getpass
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacct", "sacctmgr")

CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=accounts
"""
SETUP = """\
CREATE DATABASE accounts;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON accounts.* TO slurm@'127.0.0.1';
"""


class Accounting:
    """The two daemons.

    Args:
        folder: of the SLURM.
        environment: of its processes.
        ports: two free ones.
    """

    def __init__(self, folder: Path, environment: dict[str, str], ports: Sequence[int]) -> None:
        self.folder, self.environment = folder, environment
        self.port, self.database_port = ports
        self.lines = (
            "AccountingStorageType=accounting_storage/slurmdbd\nJobAcctGatherType=jobacct_gather/linux\n"
            f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={self.port}\n"
            f"AccountingStoragePass={folder}/munge.socket"
        )
        """For slurm.conf."""

    def start(self, daemon: Callable[..., subprocess.Popen[bytes]], wait_for_file: Callable[[str], Any]) -> None:
        """Start both, and return when the database answers."""
        data, user = self.folder / "database", getpass.getuser()
        setup = self.folder / "database.sql"
        setup.write_text(SETUP)
        common = ["--no-defaults", f"--datadir={data}", f"--user={user}"]
        install = ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"]
        subprocess.run(install, env=self.environment, check=True, capture_output=True, timeout=120)
        daemon(
            "mariadbd", *common, "--bind-address=127.0.0.1", f"--port={self.database_port}",
            f"--socket={self.folder}/database.socket", f"--pid-file={self.folder}/database.pid",
            f"--init-file={setup}", "--innodb-buffer-pool-size=64M", "--skip-name-resolve",
        )  # fmt: skip
        wait_for_file("database.socket")
        config = self.folder / "slurmdbd.conf"
        config.touch(mode=0o600)
        config.write_text(
            CONFIG.format(folder=self.folder, port=self.port, database_port=self.database_port, user=user)
        )
        daemon("slurmdbd", "-D")
        wait_for_file("slurmdbd.pid")

    def knows_the_cluster(self) -> bool:
        """Tell slurmdbd of the cluster; returns whether it answered."""
        for words in (["add", "cluster", "test"], ["--noheader", "list", "cluster"]):
            command = ["sacctmgr", "--immediate", *words]
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
            )
        return "test" in done.stdout
