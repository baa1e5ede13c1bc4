"""Accelerator specifications from public data sheets, and the achieved share of peak rates.

Rates are dense (no sparsity) with fp32 accumulation; link rates are per device and direction.
"""

from dataclasses import dataclass

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError

MATMUL_SHARE = 0.75
"""Share of the peak rate in large matmuls. A round number, not fitted to this trainer."""
BANDWIDTH_SHARE = 0.8
"""Share of memory bandwidth in elementwise operators; a round number too."""
LINK_SHARE = 0.75
"""Share of a link's rate in large messages; a round number too."""

HOPPER_ATTENTION = 561 / 680, 491 / 680
"""Rates of cuDNN's attention relative to bf16 matmuls: TFLOP/s on one H200 (causal, 8,192 tokens, heads of 128)."""


@dataclass(frozen=True)
class Device:
    """Specification of an accelerator."""

    name: str
    """Product name."""
    memory_gb: float
    """Memory in GB (10^9 bytes)."""
    bf16_tflops: float
    """Dense bf16 matmuls, TFLOP/s."""
    fp8_tflops: float | None
    """Dense fp8 matmuls, TFLOP/s; None without fp8 support."""
    bandwidth_tbs: float
    """Memory bandwidth, TB/s."""
    link_gbs: float
    """Link to other devices of a node, GB/s."""
    network_gbs: float = 50.0
    """Network, GB/s: one 400 Gbit/s adapter per device, as in reference systems."""
    host_gbs: float = 64.0
    """Link to host memory, GB/s: PCIe 5.0 x16, specified as 128 GB/s in both directions."""
    capability: tuple[int, int] | None = (9, 0)
    """CUDA compute capability; None without CUDA."""
    matmul_workspace: int = 32 * 2**20
    """Bytes of torch's cuBLAS workspace per thread; 0 if unknown."""
    matmul_share: float = MATMUL_SHARE
    """Share of the peak rate in matmuls and attention. `titan-exp plan calibrate` fits this and the following, except
    those called reach."""
    bandwidth_share: float = BANDWIDTH_SHARE
    """Share of memory bandwidth in elementwise operators."""
    link_share: float = LINK_SHARE
    """Share of a link's rate in messages."""
    fp8_reach: float = 1.0
    """Share of the peak rate in fp8 matmuls, relative to that in bf16."""
    attention_reach: tuple[float, float] = (1.0, 1.0)
    """Rates of attention, forward and backward, relative to those of bf16 matmuls."""
    stream_reach: float = 1.0
    """Bandwidth of passes over all weights (casts, norm, optimizer), relative to that of elementwise operators."""
    operator_us: float = 0.0
    """Overhead per operator in microseconds: kernel launch, and on a CPU Python and torch's dispatcher."""
    overhead_gb: float = 0.0
    """Memory of a process beyond its tensors, in GB (10^9 bytes)."""
    multiprocessors: int = 132
    """Streaming multiprocessors."""

    @property
    def matmul_rate(self) -> float:
        """Achieved FLOP/s of bf16 matmuls."""
        return self.bf16_tflops * 1e12 * self.matmul_share

    @property
    def bandwidth(self) -> float:
        """Achieved bytes per second of elementwise operators."""
        return self.bandwidth_tbs * 1e12 * self.bandwidth_share

    @property
    def fp8_rate(self) -> float:
        """Achieved FLOP/s of fp8 matmuls; bf16's without fp8 support."""
        if self.fp8_tflops is None:
            return self.matmul_rate
        return self.fp8_tflops * 1e12 * self.matmul_share * self.fp8_reach


DEVICES = {
    # NVIDIA A100 80GB SXM data sheet: 312 bf16, 2,039 GB/s, NVLink 600 GB/s and PCIe 4.0 64 GB/s, both ways. DGX A100
    # has 200 Gbit/s each.
    "a100": Device("A100 80GB SXM", 80, 312.0, None, 2.039, 300, 25, 32, (8, 0), 8320 * 2**10, multiprocessors=108),
    # NVIDIA H100 data sheet (SXM) and Hopper white paper: 989.4 bf16, 1,978.9 fp8, 3.35 TB/s, NVLink 900 both ways.
    "h100": Device("H100 80GB SXM", 80, 989.4, 1978.9, 3.35, 450, attention_reach=HOPPER_ATTENTION),
    # NVIDIA H200 data sheet (SXM): the H100's rates, 141 GB at 4.8 TB/s.
    "h200": Device("H200 141GB SXM", 141, 989.4, 1978.9, 4.8, 450, attention_reach=HOPPER_ATTENTION),
    # NVIDIA HGX B200 data sheet, divided by eight: 36 / 2 PFLOP/s bf16, 72 / 2 fp8, 1,440 GB, 62 TB/s, NVLink 1.8 TB/s.
    "b200": Device("B200 180GB SXM", 180, 2250.0, 4500.0, 7.7, 900, capability=(10, 0), multiprocessors=148),
    # AMD Instinct MI300X data sheet: 1,307.4 bf16, 2,614.9 fp8, 192 GB, 5.3 TB/s, seven links of 128 GB/s both ways.
    "mi300x": Device(
        "MI300X 192GB", 192, 1307.4, 2614.9, 5.3, 448, capability=None, matmul_workspace=0, multiprocessors=304
    ),
}
"""Devices by command-line name."""


def device_named(name: str) -> Device:
    """Look up a device of the table.

    Raises:
        UserError: the name is unknown.
    """
    if name.lower() not in DEVICES:
        offer = did_you_mean(name, DEVICES)
        raise UserError(
            f"--device {name}: unknown device; {offer or f'known are {listed(DEVICES)}'}.".replace("?.", "?")
        )
    return DEVICES[name.lower()]
