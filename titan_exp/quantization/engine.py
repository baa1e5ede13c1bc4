"""What is used of torchao, imported here alone: its casts and matmuls are the engine of every recipe.

Importing it takes a second, so only who has a recipe imports this. Of the kernels that it brings, those for other
hardware cannot be loaded, of which it would warn every rank of every run.
"""

import logging

_TALKATIVE = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_LEVELS = [logger.level for logger in _TALKATIVE]
for _logger in _TALKATIVE:
    _logger.setLevel(logging.ERROR)
try:
    from torchao.float8.float8_ops import addmm_float8_unwrapped
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
finally:
    for _logger, _level in zip(_TALKATIVE, _LEVELS, strict=True):
        _logger.setLevel(_level)

__all__ = [
    "Float8TrainingTensor",
    "GemmInputRole",
    "KernelPreference",
    "MXFP8Dim0CastKernelChoice",
    "MXTensor",
    "ScaleCalculationMode",
    "addmm_float8_unwrapped",
    "amax_to_scale",
    "to_fp8_saturated",
]
