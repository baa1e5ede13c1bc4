"""Parts of `make gpu`: packages, tests, speed, memory and the dated report."""
