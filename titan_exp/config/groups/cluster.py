"""Group `cluster`: machines and scheduler. It does not change what is computed."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import Count, PositiveFloat, PositiveInt

LOCAL = "local"
"""`cluster.kind` of the machine that launches."""
SLURM = "slurm"
COLLECTIVE_SECONDS = 1200
"""Seconds that a collective among the ranks of a run may take without the hang watchdog."""


@extended("cluster")
@dataclass(frozen=True)
class ClusterConfig:
    """Machine of the processes, and the hang watchdog. The keys from `gpu_type` on are for SLURM."""

    kind: str
    """Executor: `local` starts every process on this machine and waits for them, `slurm` submits a job and returns, and
    an import path names a class of your own (`titan_exp.launch.executor.Executor`). E.g. `cluster.kind=local`."""
    device: Literal["auto", "cpu", "cuda"]
    """Device type; `auto` is CUDA if this machine has a GPU. SLURM's nodes need an explicit type.
    E.g. `cluster.device=cpu`."""
    nodes: PositiveInt | None
    """Machines that parallelism.dp_shard=-1 fills; 1 for `local`. SLURM: null asks for what the degrees need.
    E.g. `cluster.nodes=1`."""
    gpus_per_node: PositiveInt | None
    """GPUs offered by a node; null counts them. On a CPU machine one process is offered.
    E.g. `cluster.gpus_per_node=4`."""
    threads_per_process: PositiveInt | None
    """CPU threads of each process; null divides the cores evenly. E.g. `cluster.threads_per_process=1`."""
    peak_tflops: PositiveFloat | None
    """Dense bf16 peak of one device in TFLOP/s, for MFU; null looks the device up and reports no MFU where unknown.
    E.g. `cluster.peak_tflops=989`."""
    hang_warn_minutes: PositiveFloat | None = 5.0
    """Minutes without a finished step after which a rank warns, at least three times the median step; the start, the
    first step, evaluating and saving have three times that. null never warns. E.g. `cluster.hang_warn_minutes=2`."""
    hang_kill_minutes: PositiveFloat | None = 15.0
    """Minutes, counted likewise, after which every rank writes its stacks and ends with exit code 86; at least ten
    times the median step. null never ends the run. E.g. `cluster.hang_kill_minutes=null`."""
    expandable_segments: bool = True
    """Let CUDA's allocator grow its segments instead of reserving new ones, which wastes less memory. Not with
    `compile.cuda_graphs`, nor where PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set.
    E.g. `cluster.expandable_segments=false`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of an executor that has some, the fields of its `Options`; `local` and `slurm` have none.
    E.g. `+cluster.options.hosts='[node1,node2]'`."""
    processes_per_node: PositiveInt | None = None
    """Processes of a node without GPUs; null puts all on one. With GPUs every one has a process.
    E.g. `cluster=slurm cluster.processes_per_node=8`."""
    link_gbs: PositiveFloat | None = None
    """For predictions: GB/s in one direction between a device and its neighbours in a node; null takes the device's.
    E.g. `cluster.link_gbs=450`."""
    network_gbs: PositiveFloat | None = None
    """For predictions: GB/s in one direction from a device to other nodes, its share of the node's adapters; null takes
    one adapter for each device, as the maker's reference system has. E.g. `cluster.network_gbs=25`."""
    gpu_type: str | None = None
    """Kind of GPU to ask for, as the site calls it; null takes any. E.g. `cluster=slurm cluster.gpu_type=h100`."""
    partition: str | None = None
    """Partition; null leaves it to the site. E.g. `cluster=slurm cluster.partition=gpu`."""
    account: str | None = None
    """Account to charge. E.g. `cluster=slurm cluster.account=my_group`."""
    qos: str | None = None
    """Quality of service. E.g. `cluster=slurm cluster.qos=normal`."""
    constraint: str | None = None
    """Features that nodes must have. E.g. `cluster=slurm cluster.constraint=ib`."""
    reservation: str | None = None
    """Reservation to run in. E.g. `cluster=slurm cluster.reservation=friday`."""
    exclude: str | None = None
    """Nodes to leave out. E.g. `cluster=slurm cluster.exclude=node7`."""
    time_limit: str | None = None
    """Time limit as SLURM has it: minutes, H:M:S or D-H:M:S; null leaves it to the site. A run that needs longer saves,
    stops and is requeued. E.g. `cluster=slurm cluster.time_limit=24:00:00`."""
    memory_gb: Count | None = None
    """Memory of each node in GiB; 0 takes all of it, null leaves it to the site.
    E.g. `cluster=slurm cluster.memory_gb=0`."""
    cpus_per_gpu: PositiveInt | None = None
    """Cores of each process; null leaves it to the site. E.g. `cluster=slurm cluster.cpus_per_gpu=12`."""
    array_limit: PositiveInt | None = None
    """Runs of one sweep that may run at a time; null sets no limit. E.g. `cluster=slurm cluster.array_limit=8`."""
    container_image: str | None = None
    """Image that ranks run in; null runs them on the node itself.
    E.g. `cluster=slurm cluster.container_image=/images/torch.sqsh`."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime: pyxis by arguments of srun, or the command apptainer.
    E.g. `cluster=slurm cluster.container_runtime=apptainer`."""
    container_mounts: list[str] = field(default_factory=list)
    """Folders to show inside, as FROM:TO; that of the runs is always shown.
    E.g. `cluster=slurm cluster.container_mounts='[/data:/data]'`."""
    python: str | None = None
    """Python of the ranks; null is the one that submits or, in a container, `python3`.
    E.g. `cluster=slurm cluster.python=/opt/bin/python`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. They are saved in the run folder and must hold no credentials.
    E.g. `cluster=slurm +cluster.environment='{NCCL_DEBUG:WARN}'`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start. E.g. `cluster=slurm cluster.setup='[module load cuda]'`."""
    comment: str | None = None
    """Comment of the job, for sites that require one; the submission's token is appended.
    E.g. `cluster=slurm cluster.comment=project-42`."""
    sbatch_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, one each; none that the launcher sets.
    E.g. `cluster=slurm cluster.sbatch_args='["--nice=100"]'`."""
    srun_args: list[str] = field(default_factory=list)
    """More arguments of srun, one each. E.g. `cluster=slurm cluster.srun_args='["--cpu-bind=none"]'`."""
    signal_lead: PositiveInt = 300
    """Seconds before the time limit at which the run gets its stop request.
    E.g. `cluster=slurm cluster.signal_lead=600`."""
    stop_limit: PositiveInt = 240
    """Seconds that ranks have for saving; then they are killed, so that the run is still queued again in time.
    E.g. `cluster=slurm cluster.stop_limit=500 cluster.signal_lead=600`."""
    requeue: Literal["auto", "requeue", "chain", "never"] = "auto"
    """Continuation of an interrupted job: `requeue` the same job, `chain` a new one to it, `auto`, whichever the site
    allows, or `never`. E.g. `cluster=slurm cluster.requeue=chain`."""
    max_requeues: Count = 20
    """Consecutive automatic requeues without progress, that is without a new checkpoint; then the run must be submitted
    again.

    Requeues with progress are not limited. E.g. `cluster=slurm cluster.max_requeues=3`."""
    submit_from_job: bool = False
    """Allow submitting from inside a job, which is refused as an accident otherwise.
    E.g. `cluster=slurm cluster.submit_from_job=true`."""

    @property
    def is_remote(self) -> bool:
        """True if processes run on other machines than the one that launches them."""
        return self.kind != LOCAL

    @property
    def worlds(self) -> int:
        """Number of worlds, sets of processes in the layout of `parallelism`, that train a run together: each a share
        of every step."""
        return 1
