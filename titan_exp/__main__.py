"""`python -m titan_exp` is the command line."""

import sys

from titan_exp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
