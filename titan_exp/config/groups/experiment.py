"""The whole configuration of one run, frozen."""

from dataclasses import dataclass, field

from titan_exp.config.extension import extended
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import LRScheduleConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    QuantizationConfig,
)
from titan_exp.config.groups.run import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    PathsConfig,
    PlanConfig,
    ProfilingConfig,
    RunConfig,
    TrackingConfig,
)
from titan_exp.config.groups.training import GradClipConfig, ParametrizationConfig, TrainingConfig, WeightAverageConfig


@extended()
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Configuration of a run: a field for each group, in the order of `conf/config.yaml`, then those of extensions."""

    experiment: RunConfig
    """Name, seed, tags and notes. E.g. `experiment.name=my_idea`."""
    paths: PathsConfig
    """Folder of runs. E.g. `paths.runs=/scratch/runs`."""
    training: TrainingConfig
    """Steps, sizes, precision."""
    model: ModelConfig
    """Architecture and shape."""
    parallelism: ParallelismConfig
    """Degrees of the mesh."""
    optimizer: OptimizerConfig
    """Optimizer."""
    parametrization: ParametrizationConfig = field(default_factory=ParametrizationConfig)
    """Initial weights and hyperparameters by the model's shape; runs of older versions have none."""
    lr_schedule: LRScheduleConfig
    """Learning rate over steps."""
    grad_clip: GradClipConfig = field(default_factory=GradClipConfig)
    """Gradient clipping; runs of older versions have the default."""
    weight_average: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """Average of the weights over steps; runs of older versions have none."""
    quantization: QuantizationConfig
    """Low-precision matmuls."""
    activation_checkpoint: ActivationCheckpointConfig
    """Activation checkpointing."""
    compile: CompileConfig
    """torch.compile."""
    data: DataConfig
    """Data source, tokenizer, order."""
    checkpoint: CheckpointConfig
    """Saving and retention."""
    tracking: TrackingConfig
    """Metric sinks."""
    profiling: ProfilingConfig
    """Traces."""
    cluster: ClusterConfig
    """Machines and scheduler."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Memory prediction before a launch; runs of older versions have none."""
