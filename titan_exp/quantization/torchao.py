"""torchao's casts and matmuls, imported here only (NVFP4's Blackwell kernels are imported where used).

Importing it takes a second, so only recipes import this module.
"""

from titan_exp.config.machine.torchao_version import import_torchao

with import_torchao():
    from torchao.float8.float8_ops import addmm_float8_unwrapped
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

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
