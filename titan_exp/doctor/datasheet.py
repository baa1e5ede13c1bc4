"""Data sheet rates: memory bandwidth, and peaks of other dtypes relative to bf16."""

import re

# Memory bandwidth in GB/s (10⁹ bytes) by torch device name, from the data sheets listed in
# `tracking.device_rates.PEAK_TFLOPS`. The whole name must match.
BANDWIDTHS: tuple[tuple[str, float], ...] = (
    (r"(NVIDIA )?A100-SXM4-40GB", 1555.0),
    (r"(NVIDIA )?A100-SXM4-80GB", 2039.0),
    (r"(NVIDIA )?A100(-PCIE-40GB| 40GB PCIe)", 1555.0),
    (r"(NVIDIA )?A100 80GB PCIe", 1935.0),
    (r"NVIDIA H100 80GB HBM3", 3350.0),
    (r"NVIDIA H100 PCIe", 2000.0),
    (r"NVIDIA H100 NVL", 3900.0),
    (r"NVIDIA H800", 3350.0),
    (r"NVIDIA H200( NVL)?", 4800.0),
    (r"NVIDIA H20", 4000.0),
    (r"NVIDIA (B200|GB200)", 8000.0),
    (r"NVIDIA L40S?", 864.0),
    (r"NVIDIA L4", 300.0),
    (r"NVIDIA A10", 600.0),
    (r"NVIDIA A40", 696.0),
    (r"NVIDIA RTX A6000", 768.0),
    (r"NVIDIA RTX 6000 Ada Generation", 960.0),
    (r"NVIDIA GeForce RTX 3090", 936.0),
    (r"NVIDIA GeForce RTX 4090", 1008.0),
    (r"NVIDIA GeForce RTX 5090", 1792.0),
    (r"AMD Instinct MI300[AX]", 5300.0),
    (r"AMD Instinct MI325X", 6000.0),
)


def bandwidth(name: str) -> float | None:
    """Memory bandwidth in GB/s by torch device name; None if unknown."""
    return next((rate for pattern, rate in BANDWIDTHS if re.fullmatch(pattern, name)), None)


def peak_of_type(bf16: float | None, dtype: str, capability: tuple[int, int]) -> float | None:
    """Dense matmul peak in TFLOP/s of `bf16` or a float8 recipe from the bf16 peak; None for fp32.

    Tensor cores with fp8 (compute capability 8.9 and later) run it at twice their bf16 rate.
    """
    if bf16 is None or dtype == "fp32":
        return None
    if "8" in dtype:
        return 2 * bf16 if capability >= (8, 9) else None
    return bf16
