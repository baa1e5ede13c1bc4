"""FlashAttention 3 and 4 from their own packages, replacing torch's flash kernel in the whole process."""

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.machine.attention_backends import ATTENTION_BACKEND, FLASH_PACKAGES


def runs_here(backend: str, device: torch.device) -> bool:
    """True if the package of a backend is installed and runs on this device; True for every other backend."""
    package = FLASH_PACKAGES.get(backend)
    if package is None:
        return True
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in package.majors
    return fits and package.is_installed()


def activate(backend: str, device: torch.device) -> None:
    """Make a package's kernel torch's flash kernel; restore torch's own if `backend` names no package.

    Raises:
        UserError: the package does not run on this device, or cannot be imported.
    """
    package = FLASH_PACKAGES.get(backend)
    if package is None:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return
    if device.type != "cuda":
        raise _refused(backend, f"{package.title} runs on GPUs, and this is a {device.type.upper()}")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in package.majors:
        name = torch.cuda.get_device_name(device)
        supported = " and ".join(f"{number}.0" for number in package.majors)
        raise _refused(backend, f"{package.title} runs on capability {supported}, and {name} has {major}.{minor}")
    try:
        activate_flash_attention_impl(package.implementation)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # The installed package may be built for another torch or CUDA.
        raise _refused(backend, f"{package.title} cannot be used here: {error}") from error


def _refused(backend: str, reason: str) -> UserError:
    remedy = f"{ATTENTION_BACKEND}=auto"
    return UserError("This run cannot be started.", [Violation(ATTENTION_BACKEND, backend, reason, remedy)])
