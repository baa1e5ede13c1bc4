"""The whole configuration of one run, frozen."""

from dataclasses import dataclass, field

from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig, CompileConfig
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import LRScheduleConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.plan import PlanConfig
from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.config.groups.run import PathsConfig, RunConfig
from titan_exp.config.groups.tracking import ProfilingConfig, TrackingConfig
from titan_exp.config.groups.training import TrainingConfig


@dataclass(frozen=True)
class Experiment:
    """One run: a field for each configuration group, in the order in which `conf/config.yaml` composes them."""

    experiment: RunConfig
    """Name, seed and words about the run."""
    paths: PathsConfig
    """Places on disk."""
    training: TrainingConfig
    """Steps, sizes, precision."""
    model: ModelConfig
    """Architecture and shape."""
    parallelism: ParallelismConfig
    """Degrees of the mesh."""
    optimizer: OptimizerConfig
    """From gradients to updates."""
    lr_schedule: LRScheduleConfig
    """Learning rate over steps."""
    quantization: QuantizationConfig
    """Low-precision matmuls."""
    activation_checkpoint: ActivationCheckpointConfig
    """Activation checkpointing."""
    compile: CompileConfig
    """torch.compile."""
    data: DataConfig
    """Text, tokens, order."""
    checkpoint: CheckpointConfig
    """Saving and retention."""
    tracking: TrackingConfig
    """Metric sinks."""
    profiling: ProfilingConfig
    """Traces."""
    cluster: ClusterConfig
    """The machine."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """The look at memory before a launch; runs of older versions have none."""
