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
    """Name of the experiment, which is also the folder of its runs under `paths.runs`. It has letters, digits, `.`, `_`
    and `-`. E.g. `experiment.name=my_idea`."""
    seed: Count
    """Seed of initial weights, data order and every random draw in training. E.g. `experiment.seed=1`."""
    tags: tuple[str, ...]
    """Labels of the run. They do not change what is computed. E.g. `experiment.tags='[debug,tp]'`."""
    notes: str
    """Comment on the run. It does not change what is computed. E.g. `experiment.notes='does warm-up matter?'`."""


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
    """Data source: a file of `titan_exp/data/sources`, or the import path of a class in your own package.
    E.g. `data.source=my_package.data.Source`."""
    paths: tuple[str, ...]
    """Inputs of the source. Source `text` takes files, folders and globs, and source `tokens` takes folders that
    `titan-exp tokenize` wrote. The guides of extensions say what their sources take.
    E.g. `data.paths='[notes,books/*.txt]'`."""
    weights: tuple[PositiveFloat, ...]
    """Mixture weights of source `tokens`: the share of the tokens to take from each of `paths`, in any unit. An empty
    list goes by their sizes, so that their epochs end together. Shares are exact to within a row.

    Each store has its own epochs. E.g. `data.weights='[3,7]'`."""
    document: Literal["file", "paragraph", "line"]
    """Unit of a document in source `text`: each `file`, each `paragraph` (blank lines separate them), or each `line`.
    E.g. `data.document=paragraph`."""
    dataset: str | None
    """Data set of source `huggingface`: its name on the hub, a local folder, or a loader such as `json` or `parquet`.
    E.g. `data.dataset=allenai/c4`."""
    subset: str | None
    """Configuration name of the data set, for source `huggingface`. E.g. `data.subset=en`."""
    data_files: tuple[str, ...]
    """Files of the training split, for source `huggingface` if `dataset` is a loader.
    E.g. `data.data_files='[corpus.jsonl]'`."""
    split: str
    """Split to train on, for source `huggingface`. E.g. `data.split=train`."""
    validation_split: str | None
    """Split to evaluate on, for source `huggingface`; null holds out `validation_fraction` of the training split.
    E.g. `data.validation_split=validation`."""
    text_column: str
    """Column that holds the text, for source `huggingface`. E.g. `data.text_column=content`."""
    streaming: bool
    """True if documents are read and tokenized during training, in virtual shards, instead of before it (source
    `huggingface` downloads them then, too). An epoch is then not an exact pass over the data: shards with fewer tokens
    begin again earlier.

    Local files above 1 GiB need it, or a store of `titan-exp tokenize`, because a run does not tokenize so much while
    its GPUs wait. E.g. `data.streaming=true`."""
    shuffle_buffer: PositiveInt
    """Block size of the shuffle, in documents, when source `huggingface` streams: each virtual shard shuffles its
    documents within blocks of so many. E.g. `data.shuffle_buffer=1000`."""
    tokenizer: str
    """Tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json` or of its folder. Source `tokens` takes
    `store`, the tokenizer that its stores were made with. E.g. `data.tokenizer=llama3/tokenizer.json`."""
    validation_fraction: Share
    """Fraction of the documents that are held out for evaluation and never trained on. Source `tokens` has 0, because a
    store was divided when it was made. E.g. `data.validation_fraction=0.01`."""
    validation_documents: PositiveInt | None
    """Largest number of documents of the validation split to evaluate on, the first in the source's order (in source
    `tokens`, of each store); null takes all of them.

    Training leaves out the others as well. E.g. `data.validation_documents=2048`."""
    virtual_shards: PositiveInt
    """Number of independent streams into which documents are divided if they are tokenized during training. It fixes
    their order, so it is part of the experiment. Choose a multiple of the data-parallel degree, and at most the number
    of files.

    Otherwise several ranks read and tokenize the same shards in the same order, and shards that share a file each read
    all of it. Text that is tokenized first, and source `tokens`, have no shards, because any row is found at once.
    E.g. `data.virtual_shards=512`."""
    document_mask: bool
    """True if tokens attend only within their own document. The first token of a document is then not predicted.
    E.g. `data.document_mask=true`."""
    reset_positions: bool
    """True if positions count from each document's start instead of the sequence's.
    E.g. `data.reset_positions=true`."""
    prefetch: PositiveInt
    """Number of micro-batches that are prepared ahead in the background. E.g. `data.prefetch=8`."""
    preview: PositiveInt | None
    """Step whose batch is printed as the model sees it, decoded, instead of training; null trains.
    E.g. `data.preview=1`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for a source of your own, or options of an extension's. E.g. `+data.options.url=...`."""


@extended("checkpoint")
@dataclass(frozen=True)
class CheckpointConfig:
    """Distributed checkpoints of the whole training state."""

    mode: Literal["async", "async_pinned", "async_process", "sync", "off"]
    """Saving mode: `async` pauses training only to copy the state, and writes it in the background. `async_pinned`
    copies into pinned memory (CUDA), and `async_process` writes from a separate process (through /dev/shm). `sync`
    pauses until the checkpoint is durable. `off` saves none, so that an interrupted run starts over.
    E.g. `checkpoint.mode=sync`."""
    every: PositiveInt | None
    """Steps between checkpoints; null sets no such interval. The last step and a stop request are always saved.
    E.g. `checkpoint.every=1000`."""
    every_minutes: PositiveFloat | None
    """Minutes between checkpoints on rank 0's clock, besides `every`, whichever comes first; null sets no such
    interval. E.g. `checkpoint.every_minutes=30`."""
    keep: PositiveInt
    """Number of newest complete checkpoints that are kept. An older one is deleted only after a newer one is durable.
    E.g. `checkpoint.keep=5`."""
    keep_every: PositiveInt | None
    """Steps between checkpoints that are kept forever, besides the newest: those of steps that are multiples of it.
    null keeps none of them. E.g. `checkpoint.keep_every=10000`."""
    fail_after_minutes: PositiveFloat | None
    """Minutes since the first of several failed saves (full or read-only disk) after which the run fails. A last save
    is tried then. null, the default, trains on with a warning in `status` and in the progress display, because the disk
    may recover. E.g. `checkpoint.fail_after_minutes=60`."""
    last: Literal["full", "weights"]
    """Content of the last checkpoint: `full`, or `weights`, which is a third of the size with AdamW. A run can start
    from it, but not resume. E.g. `checkpoint.last=weights`."""
    remote: str | None
    """URL to which complete checkpoints are uploaded (`s3://bucket/prefix`, `gs://…`, `file:///mnt/share`), as
    `<experiment.name>/<run id>/step-…`, and from which a run without its folder resumes; null uploads none. A
    checkpoint is skipped if a newer one is complete before its upload begins. The URL must hold no credential: those
    come from the environment. E.g. `checkpoint.remote=s3://bucket/runs`."""
    remote_wait_minutes: PositiveFloat
    """Minutes that a finished run waits for uploads. After a stop request it waits one at most.
    E.g. `checkpoint.remote_wait_minutes=30`."""
    export: Literal["none", "bf16", "fp32"]
    """Dtype of the weights that all ranks export in parallel after the last step, as a Hugging Face folder in the run's
    `export/`: `bf16` or `fp32`. `none` exports nothing. E.g. `checkpoint.export=bf16`."""
    export_every: PositiveInt | None
    """Steps between further exports, during which training pauses; null exports only after the last step.
    E.g. `checkpoint.export_every=10000`."""
    initial: str | None = None
    """Initial weights of a new run: a run folder, checkpoint or Hugging Face folder, or its URL, saved in any layout;
    null draws them at random. The key is part of the run's identity.
    E.g. `checkpoint.initial=runs/first/6c43198cf79b`."""
    initial_exclude: list[str] = field(default_factory=list)
    """Patterns of full names (`head.*`) of weights that are initialized all the same.
    E.g. `checkpoint.initial_exclude='[head.*]'`."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys of the model, or `data.tokenizer`, that may differ from those of the weights that a run begins with,
    although the same weights then compute something else. E.g. `checkpoint.accept_changes='[data.tokenizer]'`."""
    continue_from: str | None = None
    """Parent run, whose whole state (weights, optimizer, data position, counters) a new run begins with: its folder,
    name or id, one of its checkpoints, or its URL. `auto` takes the run of the same name that differs only in layout,
    steps and schedule; null begins anew.

    Model, optimizer, data and seed must be the same. Layout, steps, schedule, batch size and everything else may
    differ. Of several runs, `auto` takes the one with the most steps, and without any it begins anew. The key is part
    of the run's identity. E.g. `checkpoint.continue_from=first/6c43198cf79b`."""
    continue_step: PositiveInt | None = None
    """Step of the parent's checkpoint; null takes the newest one at the first start.
    E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_step=800`."""
    continue_data: Literal["same", "restart"] = "same"
    """Data position of a continued run: `same` reads on where the parent stopped, and `restart` reads from the
    beginning, also from other data.
    E.g. `checkpoint.continue_from=first/6c43198cf79b checkpoint.continue_data=restart`."""


@extended("tracking")
@dataclass(frozen=True)
class TrackingConfig:
    """Metric sinks. `metrics.jsonl` is always written and complete; the others are best-effort copies."""

    log_every: PositiveInt
    """Steps between rows of metrics. E.g. `tracking.log_every=1`."""
    tensorboard: bool
    """True if metrics also go to TensorBoard files in the run folder. E.g. `tracking.tensorboard=true`."""
    wandb: bool
    """True if metrics also go to Weights & Biases. E.g. `tracking.wandb=true`."""
    wandb_mode: Literal["auto", "online", "offline"]
    """W&B mode. `auto` is WANDB_MODE if that is set, else `online` if this machine is logged in, else `offline`.
    E.g. `tracking.wandb_mode=offline`."""
    wandb_project: str
    """Project of W&B. E.g. `tracking.wandb_project=ablations`."""
    wandb_entity: str | None
    """Team or user of W&B; null takes the account's default. E.g. `tracking.wandb_entity=my-team`."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of modules that join the rows: `max_logit` (the largest attention logit) and other files of
    `titan_exp/trainer/module_metrics`, or import paths of classes of your own. They change no result.
    E.g. `tracking.metrics=[max_logit]`."""


@dataclass(frozen=True)
class ProfilingConfig:
    """A torch profiler window and a memory breakdown, written to `traces/`."""

    enabled: bool
    """True if every rank records a trace of torch's profiler into `traces/`. E.g. `profiling.enabled=true`."""
    start: Count
    """Steps that an attempt trains before recording starts. E.g. `profiling.start=20`."""
    steps: PositiveInt
    """Number of recorded steps. E.g. `profiling.steps=5`."""
    memory_step: PositiveInt | None = None
    """Step after whose optimizer update every rank writes a memory breakdown, which includes the peak of that step;
    null writes none.

    On CUDA it also writes a snapshot for torch's viewer with allocation stacks, which slow the steps before it a
    little. E.g. `profiling.memory_step=5`."""


@dataclass(frozen=True)
class PlanConfig:
    """Memory prediction before a run is started."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """Action if the predicted peak exceeds the device's memory: `refuse` does not start the run, `warn` starts it with
    a warning, `off` predicts nothing. E.g. `plan.gate=warn`."""
    predict: Literal["needed", "always"] = "needed"
    """Runs to predict: `needed` skips those that fit by an upper bound (small models), and `always` predicts them too,
    to compare prediction and measurement. Predictions are cached. E.g. `plan.predict=always`."""
    layout_check: Literal["auto", "on", "off"] = "auto"
    """Check of the layout: a small model of the run's kind trains two steps in fp64, on one rank and in each axis that
    the run asks for, and a run whose layouts differ is refused. `auto` checks a model or objective of your own and a
    class of transformers, `on` every model, and `off` none. With `plan.gate=warn` a difference is a warning.
    E.g. `plan.layout_check=on`."""
    seconds: PositiveFloat = 300.0
    """Seconds that a launch waits for the prediction of a run, and for the check of its layout. A run that takes longer
    starts unchecked, with a warning. E.g. `plan.seconds=30`."""
    worst_expert_load: Annotated[float, Ge(1)] = 2.0
    """Load of a rank's experts, in multiples of the mean, for which `titan-exp plan` also prints the memory if
    `parallelism.ep` is above 1. A value of 1 leaves it out.

    Nothing bounds the load. Load balance makes a high one rare. E.g. `plan.worst_expert_load=4`."""


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
    """Device type: `cpu`, `cuda`, or `auto`, which is CUDA if this machine has a GPU. SLURM needs an explicit type,
    because its nodes may differ from this machine. E.g. `cluster.device=cpu`."""
    nodes: PositiveInt | None
    """Number of machines that parallelism.dp_shard=-1 fills. It is 1 for `local`. With SLURM, null asks for as many as
    the degrees need. E.g. `cluster.nodes=1`."""
    gpus_per_node: PositiveInt | None
    """Number of GPUs of a node; null counts those of this machine, and SLURM needs a number. A CPU machine offers one
    process. E.g. `cluster.gpus_per_node=4`."""
    threads_per_process: PositiveInt | None
    """Number of CPU threads of each process; null divides this machine's cores evenly. With SLURM, null takes
    cluster.cpus_per_gpu. E.g. `cluster.threads_per_process=1`."""
    peak_tflops: PositiveFloat | None
    """Dense bf16 peak of one device in TFLOP/s, for MFU; null looks the device up, and reports no MFU for an unknown
    one. E.g. `cluster.peak_tflops=989`."""
    hang_warn_minutes: PositiveFloat | None = 5.0
    """Minutes without progress after which a rank warns. The limit is at least three times the median step, and three
    times as long for the start, the first step, an evaluation and a save. null never warns.
    E.g. `cluster.hang_warn_minutes=2`."""
    hang_kill_minutes: PositiveFloat | None = 15.0
    """Minutes without progress after which every rank writes its stacks and ends with exit code 86. The limit is at
    least ten times the median step, and three times as long for the start, the first step, an evaluation and a save.
    null never ends the run. E.g. `cluster.hang_kill_minutes=null`."""
    expandable_segments: bool = True
    """True if CUDA's allocator grows its segments instead of reserving new ones, which wastes less memory. It has no
    effect with `compile.cuda_graphs`, or if the environment sets the allocator (PYTORCH_ALLOC_CONF) or registers its
    segments with NCCL (TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK). E.g. `cluster.expandable_segments=false`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of an executor of your own, the fields of its `Options`. The executors `local` and `slurm` have none.
    E.g. `+cluster.options.hosts='[node1,node2]'`."""
    processes_per_node: PositiveInt | None = None
    """Number of processes on a node without GPUs; null puts all on one. A node with GPUs has a process for each GPU.
    E.g. `cluster=slurm cluster.processes_per_node=8`."""
    link_gbs: PositiveFloat | None = None
    """Bandwidth in GB/s, in one direction, between a device and its neighbours in a node, for predictions; null takes
    the device's. E.g. `cluster.link_gbs=450`."""
    network_gbs: PositiveFloat | None = None
    """Bandwidth in GB/s, in one direction, from a device to other nodes (its share of the node's adapters), for
    predictions; null takes one adapter for each device, as the maker's reference system has.
    E.g. `cluster.network_gbs=25`."""
    gpu_type: str | None = None
    """GPU type to ask for, by the site's name for it; null takes any. E.g. `cluster=slurm cluster.gpu_type=h100`."""
    partition: str | None = None
    """Partition of the cluster; null leaves it to the site. E.g. `cluster=slurm cluster.partition=gpu`."""
    account: str | None = None
    """Account that the job is charged to. E.g. `cluster=slurm cluster.account=my_group`."""
    qos: str | None = None
    """Quality of service. E.g. `cluster=slurm cluster.qos=normal`."""
    constraint: str | None = None
    """Features that nodes must have. E.g. `cluster=slurm cluster.constraint=ib`."""
    reservation: str | None = None
    """Reservation to run in. E.g. `cluster=slurm cluster.reservation=friday`."""
    exclude: str | None = None
    """Nodes to leave out. E.g. `cluster=slurm cluster.exclude=node7`."""
    time_limit: str | None = None
    """Time limit in SLURM's format: minutes, M:S, H:M:S, D-H or D-H:M:S; null leaves it to the site. A run that needs
    longer saves, stops and is requeued. E.g. `cluster=slurm cluster.time_limit=24:00:00`."""
    memory_gb: Count | None = None
    """Memory of each node in GiB; 0 takes all of it, and null leaves it to the site.
    E.g. `cluster=slurm cluster.memory_gb=0`."""
    cpus_per_gpu: PositiveInt | None = None
    """Number of cores of each process; null leaves it to the site. E.g. `cluster=slurm cluster.cpus_per_gpu=12`."""
    array_limit: PositiveInt | None = None
    """Largest number of runs of one sweep that run at a time; null sets no limit.
    E.g. `cluster=slurm cluster.array_limit=8`."""
    container_image: str | None = None
    """Container image that ranks run in; null runs them on the node itself.
    E.g. `cluster=slurm cluster.container_image=/images/torch.sqsh`."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime: `pyxis`, by arguments of srun, or `apptainer`, by its command.
    E.g. `cluster=slurm cluster.container_runtime=apptainer`."""
    container_mounts: list[str] = field(default_factory=list)
    """Folders to mount in the container, as FROM:TO. The folder of the runs is always mounted.
    E.g. `cluster=slurm cluster.container_mounts='[/data:/data]'`."""
    python: str | None = None
    """Python interpreter of the ranks; null takes the one that submits or, in a container, `python3`.
    E.g. `cluster=slurm cluster.python=/opt/bin/python`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. They are saved in the run folder and must hold no credentials.
    E.g. `cluster=slurm +cluster.environment='{NCCL_DEBUG:WARN}'`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before the ranks start. E.g. `cluster=slurm cluster.setup='[module load cuda]'`."""
    comment: str | None = None
    """Comment of the job, for sites that require one. The launcher appends the submission's token.
    E.g. `cluster=slurm cluster.comment=project-42`."""
    sbatch_args: list[str] = field(default_factory=list)
    """Further arguments of sbatch, one in each entry. Arguments that the launcher sets are refused.
    E.g. `cluster=slurm cluster.sbatch_args='["--nice=100"]'`."""
    srun_args: list[str] = field(default_factory=list)
    """Further arguments of srun, one in each entry. E.g. `cluster=slurm cluster.srun_args='["--cpu-bind=none"]'`."""
    signal_lead: PositiveInt = 300
    """Seconds before the time limit at which the run gets its stop request.
    E.g. `cluster=slurm cluster.signal_lead=600`."""
    stop_limit: PositiveInt = 240
    """Seconds that ranks have for saving after a stop request, below signal_lead. Then they are killed, so that there
    is time to requeue the run. E.g. `cluster=slurm cluster.stop_limit=500 cluster.signal_lead=600`."""
    requeue: Literal["auto", "requeue", "chain", "never"] = "auto"
    """Continuation of an interrupted job: `requeue` queues the same job again, `chain` submits a new one after it, and
    `auto` chains only if the site forbids requeueing. `never` does neither.
    E.g. `cluster=slurm cluster.requeue=chain`."""
    max_requeues: Count = 20
    """Largest number of consecutive automatic requeues without progress, that is without a new checkpoint. After that
    you must submit the run again.

    Requeues with progress are not limited. E.g. `cluster=slurm cluster.max_requeues=3`."""
    submit_from_job: bool = False
    """True if you may submit from inside a job, which is refused as an accident otherwise.
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
