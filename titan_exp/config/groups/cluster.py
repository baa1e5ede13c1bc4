"""Group `cluster`: machines and scheduler. It does not change what is computed."""

from dataclasses import dataclass, field
from typing import Literal

from titan_exp.config.groups.types import Count, PositiveFloat, PositiveInt

LOCAL = "local"
"""`cluster.kind` of the machine that launches."""
SLURM = "slurm"
COLLECTIVE_SECONDS = 1200
"""Seconds that a collective among the ranks of a run may take without the hang watchdog."""


@dataclass(frozen=True)
class ClusterConfig:
    """Machine of the processes, and the hang watchdog. The keys from `gpu_type` on are for SLURM."""

    kind: str
    """Executor: `local` starts every process on this machine and waits for them, `slurm` submits a job and returns, and
    an import path names a class of your own (`titan_exp.launch.executor.Executor`)."""
    device: Literal["auto", "cpu", "cuda"]
    """Device type; `auto` is CUDA if this machine has a GPU. SLURM's nodes need an explicit type."""
    nodes: PositiveInt | None
    """Machines that parallelism.dp_shard=-1 fills; 1 for `local`. SLURM: null asks for what the degrees need."""
    gpus_per_node: PositiveInt | None
    """GPUs offered by a node; null counts them. On a CPU machine one process is offered."""
    threads_per_process: PositiveInt | None
    """CPU threads of each process; null divides the cores evenly."""
    peak_tflops: PositiveFloat | None
    """Dense bf16 peak of one device in TFLOP/s, for MFU; null looks the device up and reports no MFU where unknown."""
    hang_warn_minutes: PositiveFloat | None = 5.0
    """Minutes without a finished step after which a rank warns, at least three times the median step; the start, the
    first step, evaluating and saving have three times that. null never warns."""
    hang_kill_minutes: PositiveFloat | None = 15.0
    """Minutes, counted likewise, after which every rank writes its stacks and ends with exit code 86; at least ten
    times the median step. null never ends the run."""
    expandable_segments: bool = True
    """Let CUDA's allocator grow its segments instead of reserving new ones, which wastes less memory. Not with
    `compile.cuda_graphs`, nor where PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set."""
    replica_groups: PositiveInt = 1
    """Groups of processes that each train in the layout of `parallelism` and divide every step among those alive; a
    group that fails costs no step, and comes back alone. Groups of GPUs, too, exchange tensors over host memory and the
    network by TCP: a death then closes connections, and no communicator of GPUs must be aborted. More than 1 needs
    `pip install titan_exp[replica-groups]`."""
    min_groups: PositiveInt = 1
    """Living replica groups below which training waits."""
    group_heartbeat_seconds: PositiveFloat = 5.0
    """Seconds without a heartbeat after which a replica group counts as dead."""
    group_timeout_seconds: PositiveFloat = 300.0
    """Timeout of a collective between replica groups; above the difference between their step times, below the 20
    minutes of a collective within a group."""
    group_history: str | None = None
    """Run folder whose history of replica groups is replayed: every step is divided as it was there, so that the same
    layout gives the same bits. Needs at least as many of `replica_groups` as were alive there."""
    processes_per_node: PositiveInt | None = None
    """Processes of a node without GPUs; null puts all on one. With GPUs every one has a process."""
    link_gbs: PositiveFloat | None = None
    """For predictions: GB/s in one direction between a device and its neighbours in a node; null takes the device's."""
    network_gbs: PositiveFloat | None = None
    """For predictions: GB/s in one direction from a device to other nodes, its share of the node's adapters; null takes
    one adapter for each device, as the maker's reference system has."""
    gpu_type: str | None = None
    """Kind of GPU to ask for, as the site calls it; null takes any."""
    partition: str | None = None
    """Partition; null leaves it to the site."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    reservation: str | None = None
    """Reservation to run in."""
    exclude: str | None = None
    """Nodes to leave out."""
    time_limit: str | None = None
    """Time limit as SLURM has it: minutes, H:M:S or D-H:M:S; null leaves it to the site."""
    memory_gb: Count | None = None
    """Memory of each node in GiB; 0 takes all of it, null leaves it to the site."""
    cpus_per_gpu: PositiveInt | None = None
    """Cores of each process; null leaves it to the site."""
    array_limit: PositiveInt | None = None
    """Runs of one sweep that may run at a time; null sets no limit."""
    container_image: str | None = None
    """Image that ranks run in; null runs them on the node itself."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime: pyxis by arguments of srun, or the command apptainer."""
    container_mounts: list[str] = field(default_factory=list)
    """Folders to show inside, as FROM:TO; that of the runs is always shown."""
    python: str | None = None
    """Python of the ranks; null is the one that submits or, in a container, `python3`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. They are saved in the run folder and must hold no credentials."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start."""
    comment: str | None = None
    """Comment of the job, for sites that require one; the submission's token is appended."""
    sbatch_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, one each; none that the launcher sets."""
    srun_args: list[str] = field(default_factory=list)
    """More arguments of srun, one each."""
    signal_lead: PositiveInt = 300
    """Seconds before the time limit at which the run gets its stop request."""
    stop_limit: PositiveInt = 240
    """Seconds that ranks have for saving; then they are killed, so that the run is still queued again in time."""
    requeue: Literal["auto", "requeue", "chain", "never"] = "auto"
    """Continuation of an interrupted job: `requeue` the same job, `chain` a new one to it, or whichever works."""
    max_requeues: Count = 20
    """Consecutive automatic requeues without progress, that is without a new checkpoint; then the run must be submitted
    again. Requeues with progress are not limited."""
    submit_from_job: bool = False
    """Allow submitting from inside a job, which is refused as an accident otherwise."""

    @property
    def is_remote(self) -> bool:
        """True if processes run on other machines than the one that launches them."""
        return self.kind != LOCAL
