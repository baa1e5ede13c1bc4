import subprocess
import sys

import pytest

HEAVY = ("torch", "wandb", "tensorboard", "matplotlib.pyplot")


@pytest.mark.parametrize(
    "module",
    [
        "tracking.sinks",
        "tracking.console",
        "tracking.throughput",
        "tracking.run_folder.run_folder",
        "compare.output.plots",
    ],
)
def test_launching_imports_no_heavy_package(module: str) -> None:
    program = f"import sys, titan_exp.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
