"""Groups `experiment`, `paths`, `data`, `checkpoint`, `tracking`, `profiling`, `plan`, `cluster`: around the steps."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import Count, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True)
class RunConfig:
    """Group `experiment`."""

    name: str
    """Folder of the run under `paths.runs`; letters, digits, `.`, `_` and `-`. E.g. `experiment.name=my_idea`."""
    seed: Count
    """Seed of initial weights, data order and every random draw in training. E.g. `experiment.seed=1`."""
    tags: tuple[str, ...]
    """Labels of the run; they do not change what is computed. E.g. `experiment.tags='[debug,tp]'`."""
    notes: str
    """Comment on the run; it does not change what is computed. E.g. `experiment.notes='does warm-up matter?'`."""


@dataclass(frozen=True)
class PathsConfig:
    """Group `paths`."""

    runs: str
    """Folder that holds every run folder. E.g. `paths.runs=/scratch/runs`."""


@extended("data")
@dataclass(frozen=True)
class DataConfig:
    """A source of documents, a tokenizer, and a fixed order."""

    source: str
    """Source of data: a file of `titan_exp/data/sources`, or the import path of a class in your own package.
    E.g. `data.source=my_package.data.Source`."""
    paths: tuple[str, ...]
    """Source `text`: files, folders and globs. Source `tokens`: folders that `titan-exp tokenize` wrote. Sources of
    extensions: what their guides say. E.g. `data.paths='[notes,books/*.txt]'`."""
    weights: tuple[PositiveFloat, ...]
    """Source `tokens`: share of the tokens to take from each of `paths`, in any unit; empty is by their sizes, so that
    their epochs end together. Shares are exact to within a row.

    Each store has its own epochs. E.g. `data.weights='[3,7]'`."""
    document: Literal["file", "paragraph", "line"]
    """Source `text`: unit of a document: each file, each paragraph (blank lines separate them), or each line.
    E.g. `data.document=paragraph`."""
    dataset: str | None
    """Source `huggingface`: name on the hub, a local folder, or a loader such as `json` or `parquet`.
    E.g. `data.dataset=allenai/c4`."""
    subset: str | None
    """Source `huggingface`: the data set's configuration name. E.g. `data.subset=en`."""
    data_files: tuple[str, ...]
    """Source `huggingface`: files for the training split, where `dataset` is a loader.
    E.g. `data.data_files='[corpus.jsonl]'`."""
    split: str
    """Source `huggingface`: split to train on. E.g. `data.split=train`."""
    validation_split: str | None
    """Source `huggingface`: split to evaluate on; null holds out `validation_fraction` of the training split.
    E.g. `data.validation_split=validation`."""
    text_column: str
    """Source `huggingface`: column that holds the text. E.g. `data.text_column=content`."""
    streaming: bool
    """Read and tokenize while training, in virtual shards, instead of tokenizing first (source `huggingface`:
    downloading too). An epoch is then no exact pass over the data: shards with fewer tokens begin again earlier.

    Local files above 1 GiB need it, or a store of `titan-exp tokenize`: a run does not tokenize them while its GPUs
    wait. E.g. `data.streaming=true`."""
    shuffle_buffer: PositiveInt
    """Source `huggingface` when streaming: documents among which each virtual shard picks the next.
    E.g. `data.shuffle_buffer=1000`."""
    tokenizer: str
    """`bytes`, or the path of a Hugging Face `tokenizer.json` (or of the folder that holds it). Source `tokens`:
    `store`, the one that the stores were made with. E.g. `data.tokenizer=llama3/tokenizer.json`."""
    validation_fraction: Share
    """Share of documents held out for evaluation, chosen by document and never trained on. Source `tokens`: 0, as a
    store was divided when it was made. E.g. `data.validation_fraction=0.01`."""
    validation_documents: PositiveInt | None
    """At most this many documents of the validation split are evaluated on, the first in the source's order (of each
    store); null is all of them.

    Those left out are not trained on either. E.g. `data.validation_documents=2048`."""
    virtual_shards: PositiveInt
    """Independent streams into which documents are divided that are tokenized while training; part of the experiment,
    as it fixes their order. Best a multiple of the data-parallel degree, and at most the number of files.

    Otherwise several ranks read and tokenize the same shards, in the same order, and shards that share a file each read
    all of it. Text that is tokenized first, and source `tokens`, have none: any row is found at once.
    E.g. `data.virtual_shards=512`."""
    document_mask: bool
    """Tokens attend only within their own document, and the first token of a document is not predicted.
    E.g. `data.document_mask=true`."""
    reset_positions: bool
    """Positions count from each document's start instead of the sequence's. E.g. `data.reset_positions=true`."""
    prefetch: PositiveInt
    """Micro-batches prepared ahead in the background. E.g. `data.prefetch=8`."""
    preview: PositiveInt | None
    """Print the batch that the model sees at this step, decoded, and train nothing; null trains.
    E.g. `data.preview=1`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for a source of your own, or options of an extension's. E.g. `+data.options.url=...`."""


@extended("checkpoint")
@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "async_pinned", "async_process", "sync", "off"]
    """Way of saving: `async` pauses training only to stage the state and writes in the background; `async_pinned`
    stages into pinned memory (CUDA), `async_process` writes in a separate process (through /dev/shm); `sync` pauses
    until the checkpoint is durable; `off` saves none, so that an interrupted run starts over.
    E.g. `checkpoint.mode=sync`."""
    every: PositiveInt | None
    """Steps between checkpoints; null for none. The last step and a stop request are always saved.
    E.g. `checkpoint.every=1000`."""
    every_minutes: PositiveFloat | None
    """Minutes between checkpoints on rank 0's clock, whichever comes first; null for none.
    E.g. `checkpoint.every_minutes=30`."""
    keep: PositiveInt
    """Number of newest complete checkpoints kept; an older one is deleted only after a newer one is durable.
    E.g. `checkpoint.keep=5`."""
    keep_every: PositiveInt | None
    """Checkpoints whose step is a multiple of it are kept forever, besides the newest; null keeps none of them.
    E.g. `checkpoint.keep_every=10000`."""
    fail_after_minutes: PositiveFloat | None
    """Minutes without a complete checkpoint, while saves fail (full or read-only disk), after which the run fails; a
    last save is tried then. Null trains on with a warning in `status` and in the progress display, as is the default:
    the disk may recover. E.g. `checkpoint.fail_after_minutes=60`."""
    last: Literal["full", "weights"]
    """Content of the last checkpoint: `full`, or `weights`, a third of the size, from which a run can be started, but
    not resumed. E.g. `checkpoint.last=weights`."""
    remote: str | None
    """URL to which every complete checkpoint is uploaded (`s3://bucket/prefix`, `gs://…`, `file:///mnt/share`), as
    `<experiment.name>/<run id>/step-…`, and from which a run without its folder resumes; null uploads none. It must
    hold no credential: those come from the environment. E.g. `checkpoint.remote=s3://bucket/runs`."""
    remote_wait_minutes: PositiveFloat
    """Minutes a finished run waits for uploads; at most one after a stop request.
    E.g. `checkpoint.remote_wait_minutes=30`."""
    export: Literal["none", "bf16", "fp32"]
    """Dtype of the weights exported after the last step, as a Hugging Face folder in the run's `export/`, by all ranks
    in parallel; `none` exports nothing. E.g. `checkpoint.export=bf16`."""
    export_every: PositiveInt | None
    """Steps between further exports, during which training pauses; null exports only after the last step.
    E.g. `checkpoint.export_every=10000`."""
    initial: str | None = None
    """Run folder, checkpoint or Hugging Face folder, or its URL, whose weights a new run starts from, saved in any
    layout; null initializes them. Part of the run's identity. E.g. `checkpoint.initial=runs/first/6c43198cf79b`."""
    initial_exclude: list[str] = field(default_factory=list)
    """Patterns of full names (`head.*`) of weights that are initialized nevertheless.
    E.g. `checkpoint.initial_exclude='[head.*]'`."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys of the model, or `data.tokenizer`, that may differ from those of the weights that a run begins with, though
    the same weights then compute something else. E.g. `checkpoint.accept_changes='[data.tokenizer]'`."""
    continue_from: str | None = None
    """Run whose whole state (weights, optimizer, data position, counters) a new run begins with: its folder, name or
    id, one of its checkpoints, or its URL. `auto` takes the run of the same name that differs in layout, steps and
    schedule alone; null begins anew.

    Model, optimizer, data and seed must be the same; layout, steps, schedule, batch size and all else may differ. Of
    several runs, `auto` takes the one with the most steps, and none if there is none. Part of the run's identity.
    E.g. `checkpoint.continue_from=first/6c43198cf79b`."""
    continue_step: PositiveInt | None = None
    """Step of that run's checkpoint; null is the newest at the first start.
    E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_step=800`."""
    continue_data: Literal["same", "restart"] = "same"
    """Data of a continued run: `same` reads on where that run stopped; `restart` reads from the beginning, also of
    other data. E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_data=restart`."""


@extended("tracking")
@dataclass(frozen=True)
class TrackingConfig:
    """Metric sinks. `metrics.jsonl` is always written and complete; the others are best-effort copies."""

    log_every: PositiveInt
    """Steps between rows of metrics. E.g. `tracking.log_every=1`."""
    tensorboard: bool
    """Also log to TensorBoard files in the run folder. E.g. `tracking.tensorboard=true`."""
    wandb: bool
    """Also log to Weights & Biases. E.g. `tracking.wandb=true`."""
    wandb_mode: Literal["auto", "online", "offline"]
    """`auto` is online if this machine is logged in, else offline. E.g. `tracking.wandb_mode=offline`."""
    wandb_project: str
    """W&B project. E.g. `tracking.wandb_project=ablations`."""
    wandb_entity: str | None
    """W&B team or user; null is the account's default. E.g. `tracking.wandb_entity=my-team`."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of modules that join the rows: `max_logit` (the largest attention logit) and other files of
    `titan_exp/trainer/module_metrics`, or import paths of your own classes. They change no result.
    E.g. `tracking.metrics=[max_logit]`."""


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler window and a memory breakdown, written to `traces/`."""

    enabled: bool
    """Record a torch profiler trace on every rank, into `traces/`. E.g. `profiling.enabled=true`."""
    start: Count
    """Step after which recording starts. E.g. `profiling.start=20`."""
    steps: PositiveInt
    """Steps recorded. E.g. `profiling.steps=5`."""
    memory_step: PositiveInt | None = None
    """Step after whose optimizer update every rank writes a memory breakdown, including the peak of that step; null
    never.

    On CUDA with a snapshot for torch's viewer and allocation stacks, which slow the steps before it a little.
    E.g. `profiling.memory_step=5`."""


@dataclass(frozen=True)
class PlanConfig:
    """Memory prediction before a run is started."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """Action if the predicted peak exceeds the device's memory: `refuse` does not start the run, `warn` starts it with
    a warning, `off` predicts nothing. E.g. `plan.gate=warn`."""
    predict: Literal["needed", "always"] = "needed"
    """`needed` skips runs that fit by an upper bound (small models); `always` predicts them too, to compare prediction
    and measurement. Predictions are cached. E.g. `plan.predict=always`."""
    seconds: PositiveFloat = 300.0
    """Seconds that a launch waits for the prediction; a run that takes longer starts unchecked, with a warning.
    E.g. `plan.seconds=30`."""
    worst_expert_load: Annotated[float, Ge(1)] = 2.0
    """Load of a rank's experts, in multiples of the mean, for which `titan-exp plan` tells the memory beside that of
    uniform routing, with `parallelism.ep`; 1 leaves it out.

    Nothing bounds it: balance makes it rare. E.g. `plan.worst_expert_load=4`."""


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
