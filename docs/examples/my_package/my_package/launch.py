"""An executor over ssh, for hosts without a scheduler that share the folder of runs."""

import subprocess
from dataclasses import dataclass

from titan_exp.config.groups.types import PositiveInt
from titan_exp.launch.remote import HostsExecutor


class SshExecutor(HostsExecutor):
    """Starts the host agents by ssh; they start the ranks, and end them together."""

    @dataclass(frozen=True)
    class Options:
        """Keys of `cluster.options`."""

        hosts: tuple[str, ...]
        """Names as ssh takes them, without a password."""
        port: PositiveInt = 22

    def hosts(self, options: Options) -> tuple[str, ...]:
        """A run takes the first ones, as many as it has nodes."""
        return options.hosts

    def start(self, options: Options, host: str, command: str) -> None:
        """The command leaves its process in the background, so that ssh returns at once."""
        ssh = ["ssh", "-o", "BatchMode=yes", "-p", str(options.port), host, command]
        subprocess.run(ssh, check=True, capture_output=True, timeout=60)
