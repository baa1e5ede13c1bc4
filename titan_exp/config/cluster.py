"""Group `cluster`: the machine that runs it. It does not change what is computed."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.bounds import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ClusterConfig:
    """Where processes start and what each of them gets."""

    kind: Literal["local"]
    """`local` starts every process on this machine and waits for them."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto` is CUDA where this machine has a GPU."""
    nodes: PositiveInt
    """Machines offered; 1 for `local`."""
    gpus_per_node: PositiveInt | None
    """GPUs offered by a node; null counts them. On a CPU machine one process is offered."""
    threads_per_process: PositiveInt | None
    """CPU threads of each process; null divides the cores evenly."""
    peak_tflops: PositiveFloat | None
    """Dense bf16 peak of one device in TFLOP/s, for MFU; null looks the device up and reports no MFU where unknown."""
    hang_warn_minutes: PositiveFloat | None = 5.0
    """Minutes without a finished step after which a rank warns; the start, the first step, evaluating and saving have
    three times that. null never warns."""
    hang_kill_minutes: PositiveFloat | None = 15.0
    """Minutes, counted likewise, after which every rank writes its stacks and ends with exit code 86; at least ten
    times the median step. null waits for ever."""
