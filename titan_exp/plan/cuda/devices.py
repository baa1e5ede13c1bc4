"""What accelerators can do, from their makers' public tables, and what of it training code usually reaches.

Rates are dense (no sparsity) with fp32 accumulation; links are in one direction, of one device.
"""

from dataclasses import dataclass

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError

MATMUL_SHARE = 0.75
"""Of the peak rate, what large matmuls reach. A round number, not fitted to this trainer."""
BANDWIDTH_SHARE = 0.8
"""Of memory bandwidth, what elementwise operators reach. A round number, likewise."""
LINK_SHARE = 0.75
"""Of a link's rate, what large messages reach. A round number, likewise."""


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    """As people call it."""
    memory_gb: float
    """Memory in GB (10^9 bytes)."""
    bf16_tflops: float
    """Dense bf16 matmuls, TFLOP/s."""
    fp8_tflops: float | None
    """Dense fp8 matmuls, TFLOP/s; None where it has none."""
    bandwidth_tbs: float
    """Memory bandwidth, TB/s."""
    link_gbs: float
    """To its neighbours in a node, GB/s."""
    network_gbs: float = 50.0
    """To other nodes, GB/s: one 400 Gbit/s adapter for each device, as in the makers' reference systems."""
    host_gbs: float = 64.0
    """To and from the host's memory, GB/s: PCIe 5.0 x16, which the makers give as 128 GB/s both ways."""
    capability: tuple[int, int] | None = (9, 0)
    """CUDA's compute capability; None where it is no CUDA."""
    matmul_workspace: int = 32 * 2**20
    """Bytes that torch hands cuBLAS for each thread; 0 where nobody here knows."""
    matmul_share: float = MATMUL_SHARE
    """Of the peak rate, what matmuls and attention reach. `titan-exp plan calibrate` fits this and what follows but
    `fp8_reach`."""
    bandwidth_share: float = BANDWIDTH_SHARE
    """Of memory bandwidth, what elementwise operators reach."""
    link_share: float = LINK_SHARE
    """Of a link's rate, what messages reach."""
    fp8_reach: float = 1.0
    """What fp8 matmuls reach of their peak, over what bf16's reach of theirs."""
    operator_us: float = 0.0
    """What every operator takes besides, in microseconds: its launch, and on a CPU Python and torch's dispatch."""
    overhead_gb: float = 0.0
    """Memory of a process beside what is predicted of it, in GB (10^9 bytes)."""

    @property
    def matmul_rate(self) -> float:
        """Operations a second that bf16 matmuls and attention reach."""
        return self.bf16_tflops * 1e12 * self.matmul_share

    @property
    def fp8_rate(self) -> float:
        """Operations a second that fp8 matmuls reach; where there are no instructions for them, as bf16's."""
        if self.fp8_tflops is None:
            return self.matmul_rate
        return self.fp8_tflops * 1e12 * self.matmul_share * self.fp8_reach


DEVICES = {
    # NVIDIA A100 80GB SXM data sheet: 312 bf16, 2,039 GB/s, NVLink 600 GB/s and PCIe 4.0 64 GB/s, both ways. DGX A100
    # has 200 Gbit/s each.
    "a100": Device("A100 80GB SXM", 80, 312.0, None, 2.039, 300, 25, 32, (8, 0), 8320 * 2**10),
    # NVIDIA H100 data sheet (SXM) and Hopper white paper: 989.4 bf16, 1,978.9 fp8, 3.35 TB/s, NVLink 900 both ways.
    "h100": Device("H100 80GB SXM", 80, 989.4, 1978.9, 3.35, 450),
    # NVIDIA H200 data sheet (SXM): the H100's rates, 141 GB at 4.8 TB/s.
    "h200": Device("H200 141GB SXM", 141, 989.4, 1978.9, 4.8, 450),
    # NVIDIA HGX B200 data sheet, an eighth of it: 36 / 2 PFLOP/s bf16, 72 / 2 fp8, 1,440 GB, 62 TB/s, NVLink 1.8 TB/s.
    "b200": Device("B200 180GB SXM", 180, 2250.0, 4500.0, 7.7, 900, capability=(10, 0)),
    # AMD Instinct MI300X data sheet: 1,307.4 bf16, 2,614.9 fp8, 192 GB, 5.3 TB/s, seven links of 128 GB/s both ways.
    "mi300x": Device("MI300X 192GB", 192, 1307.4, 2614.9, 5.3, 448, capability=None, matmul_workspace=0),
}
"""By the word that a command line names them with."""


def device_named(name: str) -> Device:
    """A device of the table.

    Raises:
        UserError: it is not there.
    """
    if name.lower() not in DEVICES:
        offer = did_you_mean(name, DEVICES)
        raise UserError(f"--device {name}: there is no such device here. {offer or f'Known are {listed(DEVICES)}.'}")
    return DEVICES[name.lower()]
