"""Set-up of the whole test run."""

import os

# One thread per process, before torch is imported anywhere: ranks share two cores, and are forked.
os.environ["OMP_NUM_THREADS"] = "1"
