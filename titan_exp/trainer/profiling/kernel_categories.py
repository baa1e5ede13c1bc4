"""Kernel categories by name: the one table behind trace summaries."""

import re
from functools import cache
from typing import Literal

Kind = Literal["gemm", "attention", "communication", "optimizer", "other"]

KINDS: tuple[Kind, ...] = ("gemm", "attention", "communication", "optimizer", "other")
"""Categories in the order of the summary."""

TITLES: dict[Kind, str] = {
    "gemm": "GEMM",
    "attention": "attention",
    "communication": "communication",
    "optimizer": "optimizer and clipping",
    "other": "elementwise and other",
}
"""Category titles."""

# The first match decides, so that rarer categories come first ("flash_fwd ... gemm").
TABLE: tuple[tuple[Kind, str], ...] = (
    # NCCL's and gloo's own, c10d's operators, functional collectives, FSDP2's copies in and out of its buffers.
    ("communication", r"nccl|gloo:|c10d::|c10d_functional|record_param_comms|one_shot_all_reduce|two_shot_all_reduce"),
    (
        "communication",
        r"FSDP::|fsdp::(all_gather_copy_in|split_with_sizes_copy|chunk_cat)|AllGather|ReduceScatter|AllReduce",
    ),
    # torch.optim's annotations and kernels; the norm over all gradients and their scaling.
    ("optimizer", r"Optimizer\.(step|zero_grad)#|FusedAdam|fused_adam|multi_tensor_apply|_foreach_|adamw?_kernel"),
    ("optimizer", r"^clip_grad|clip_and_adamw|low_precision_adamw"),
    # SDPA's operators; flash, cuDNN, memory-efficient and FlexAttention kernels.
    (
        "attention",
        r"scaled_dot_product|FlashAttn|flash_attention|efficient_attention|cudnn_attention|flash_(fwd|bwd)|fmha",
    ),
    (
        "attention",
        r"cudnn.*sdpa|sdpa.*cudnn|flex_attention|FlexAttention|attention_(forward|backward)|varlen_attn|mha_",
    ),
    # Operators; cuBLAS, cuBLASLt (nvjet), CUTLASS, oneDNN, MKL; Triton's templates of matmuls.
    ("gemm", r"aten::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|dot|grouped_mm|scaled_mm)(_|\b)"),
    ("gemm", r"_scaled_grouped_mm|_int_mm|_addmm_activation|mkl_linear|mkldnn_linear|onednn|linear_pointwise"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|splitKreduce|triton_(tem|mm)_|_mm_|\bmm_|Cijk_|_scaled_mm"),
)
"""Categories with regular expressions, searched in the name."""


@cache
def kind_of(name: str) -> Kind:
    """Category of a kernel, operator or annotation by its name."""
    for kind, pattern in TABLE:
        if re.search(pattern, name):
            return kind
    return "other"
