"""Local executor: ranks as child processes of this machine."""
