"""The whole configuration of one run, frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from titan_exp.config.extension import extended
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
from titan_exp.config.groups.training import (
    EvaluationConfig,
    GradClipConfig,
    ParametrizationConfig,
    TrainingConfig,
    WeightAverageConfig,
)
from titan_exp.config.groups.types import Count, PositiveBlockCount, PositiveInt


class Change(Enum):
    """Effect of another value of a field on weights that were trained with the first one."""

    FUNCTION = "function"
    """The same weights compute something else. Every field that declares nothing has this effect, and a run that begins
    with the weights is refused."""
    MEANT = "meant"
    """They compute something else, which is often the purpose; the log names it."""
    NOTHING = "nothing"
    """They compute the same: a label, a kernel, the draw of initial weights, the objective of training."""


NO_CHANGE: Mapping[str, Any] = {"change": Change.NOTHING}
"""Metadata of a field, or of a group in it: another value changes nothing that given weights compute."""
MAY_BE_MEANT: Mapping[str, Any] = {"change": Change.MEANT}
"""Metadata of a field whose other value is often meant."""


@dataclass(frozen=True)
class ModelConfig:
    """Fields that every model has."""

    name: str = field(metadata=NO_CHANGE)
    """Published name of the model, which tables show. E.g. `model.name=my-model`."""
    architecture: str
    """Model family (`llama`, `qwen3`), or the import path of a module or class of your own.

    A module has the same public names as a family (`my_package.my_model`). A class may be a plain one
    (`my_package.models.Mamba`). E.g. `model.architecture=llama`."""
    layers: PositiveBlockCount
    """Number of blocks. E.g. `model.layers=8`."""
    dim: PositiveInt
    """Width of the residual stream. E.g. `model.dim=768`."""
    vocab_size: Count
    """Vocabulary size: number of rows of the embedding, at least as many as the tokenizer has tokens. It is 0 for a
    model that reads no tokens. E.g. `model.vocab_size=50304`."""
    context: PositiveInt = field(metadata=MAY_BE_MEANT)
    """Context length in tokens of the published model. `training.seq_len` may exceed it only as far as a scaling of
    RoPE stretches it. E.g. `model.context=32768`."""

    @property
    def has_own_blocks(self) -> bool:
        """True if the family's blocks are written here: the compiler may refuse another library's."""
        return True

    def effective(self) -> "ModelConfig":
        """The same model, with all keys that others leave without effect at their defaults."""
        return self


@extended()
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Configuration of a run: a field for each group, in the order of `conf/config.yaml`, then those of extensions."""

    experiment: RunConfig
    """Name, seed, tags and notes of the run. E.g. `experiment.name=my_idea`."""
    paths: PathsConfig
    """Folder that holds the runs. E.g. `paths.runs=/scratch/runs`."""
    training: TrainingConfig
    """Length, batch size, precision and objective of training."""
    model: ModelConfig
    """Architecture and shape of the model."""
    parallelism: ParallelismConfig
    """Degrees of the device mesh, and how each axis works."""
    optimizer: OptimizerConfig
    """Optimizer with its hyperparameters."""
    parametrization: ParametrizationConfig = field(default_factory=ParametrizationConfig)
    """Scaling of initial weights and hyperparameters with the model's shape. Runs of older versions have none."""
    lr_schedule: LRScheduleConfig
    """Learning rate over the steps."""
    grad_clip: GradClipConfig = field(default_factory=GradClipConfig)
    """Gradient clipping. Runs of older versions have the default."""
    weight_average: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """Average of the weights over the steps. Runs of older versions have none."""
    quantization: QuantizationConfig
    """Low-precision matmuls."""
    activation_checkpoint: ActivationCheckpointConfig
    """Activation checkpointing."""
    compile: CompileConfig
    """Compilation by torch.compile."""
    data: DataConfig
    """Data source, tokenizer and order."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluations while training."""
    checkpoint: CheckpointConfig
    """Checkpoints and exports, and the state that a run begins with."""
    tracking: TrackingConfig
    """Sinks of metrics."""
    profiling: ProfilingConfig
    """Profiler traces and memory breakdowns."""
    cluster: ClusterConfig
    """Machines and scheduler."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Memory prediction before a launch. Runs of older versions have none."""
