"""Health of running ranks: watchdog, stack dumps, hang report."""
