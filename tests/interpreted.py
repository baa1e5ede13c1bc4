"""Our Triton kernels where there is a GPU, and in Triton's interpreter where there is none.

The interpreter is chosen when Triton is imported, so kernels run in processes of their own.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
"""Where a kernel is tested: interpreted, and on a GPU."""


def run_kernels(world: int, device: str, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What `job(device, *args)` returns on each of `world` ranks; on `cpu` kernels are interpreted.

    Skips the test where there is no such device.
    """
    import torch

    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA GPU{'s' if world > 1 else ''}")
    return run_ranks(world, _run, device, (job.__module__, job.__name__), args)


def interpret() -> None:
    """From now on kernels of this process are interpreted, also where torch has imported Triton already."""
    os.environ["TRITON_INTERPRET"] = "1"
    # What is compiled of it cannot be imported twice, and need not be.
    for name in [
        module for module in sys.modules if module.split(".")[0] == "triton" and not module.startswith("triton._C")
    ]:
        del sys.modules[name]
    import triton
    import triton.language

    here = {"triton": triton, "tl": triton.language, "INTERPRETED": triton.language.constexpr(True)}
    renewed: dict[Any, Any] = {}
    for loaded in [vars(module) for name, module in sys.modules.items() if name.startswith("titan_exp.ops.")]:
        # Kernels that are loaded are made anew by the Triton that interprets.
        for name, value in loaded.items():
            if type(value).__name__ == "JITFunction":
                loaded[name] = renewed.setdefault(value.fn, triton.jit(value.fn))
        loaded.update({name: value for name, value in here.items() if name in loaded})


def _run(device: str, job: tuple[str, str], args: tuple[Any, ...]) -> Any:
    if device == "cpu":
        interpret()
    # By name: the job's module may import what imports Triton.
    return getattr(importlib.import_module(job[0]), job[1])(device, *args)
