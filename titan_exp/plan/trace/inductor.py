"""Compiled code without a compiler: inductor plans its kernels and buffers as ever, and no kernel is made or run.

What inductor writes for the host, where buffers are taken, reused and let go of, is run on tensors without data; its
kernels are calls that do nothing. So what is kept for the backward pass, and what is held within a block, is inductor's
own decision. It is the one for a CPU: on CUDA other operators may be fused, though what is kept is decided before.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment


def uses_inductor(experiment: Experiment) -> bool:
    """Whether inductor compiles parts of a run."""
    return experiment.compile.enabled and experiment.compile.backend == "inductor"


@contextmanager
def reset_dynamo() -> Iterator[None]:
    """For the time of the block, let nothing that was compiled before it be used, nor afterwards what was in it.

    A device that has another name fails torch's checks of what was compiled for it.
    """
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextmanager
def skip_inductor_kernels(called: Callable[[tuple[Any, ...]], None], device: torch.device) -> Iterator[None]:
    """For the time of the block, let inductor's code work on tensors without data.

    Nothing of it is kept, in memory or on disk.

    Args:
        called: told the arguments of each kernel that would run.
        device: where its buffers are.

    Raises:
        UserError: inductor cannot make code of it for a CPU.
    """
    import torch._inductor.config as inductor
    from torch._C._dynamo import guards
    from torch._inductor import cpp_builder, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.exc import InductorError
    from torch._inductor.utils import fresh_cache

    def kernel(*args: Any) -> None:
        called(args)

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    settings: dict[str, Any] = {"compile_threads": 1, "fx_graph_cache": False}
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(inductor.patch(settings))
        stack.enter_context(fresh_cache())
        # Else a compiler would be asked what it is, and tried to see what the processor can do.
        stack.enter_context(patch.object(cpu_vec_isa, "valid_vec_isa_list", list))
        stack.enter_context(patch.object(cpp_builder, "is_gcc", lambda: True))
        stack.enter_context(patch.object(cpp_builder, "is_msvc_cl", lambda: False))
        stack.enter_context(patch.object(guards, "_empty_strided_cpu", empty))
        stack.enter_context(patch.object(guards, "_reinterpret_tensor", _reinterpreted))
        stack.enter_context(patch.object(AsyncCompile, "cpp_pybinding", lambda *_: kernel))
        try:
            yield
        except InductorError as error:
            raise UserError(
                f"plan: inductor, asked for a CPU's code of a compiled part, fails ({error}). compile=none plans the "
                "same run without."
            ) from error
        finally:
            torch._dynamo.reset()


def _reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
