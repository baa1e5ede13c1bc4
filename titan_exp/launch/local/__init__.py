"""Local executor: ranks as child processes on this machine."""
