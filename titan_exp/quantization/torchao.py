"""Torchao's casts and matmuls, the engine of every recipe, imported in this file only. (NVFP4's kernels,
which only Blackwell has the instructions of, are imported where they are used.)

Importing it takes a second, so only who has a recipe imports this.
"""

from titan_exp.ops.import_torchao import import_torchao

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
