"""From an experiment to a model on this rank's device, ready to train."""

import functools

import torch
from torch import nn

from titan_exp.config.experiment import Experiment
from titan_exp.models.build import build_model, flops_per_token, initial_table, parameter_count
from titan_exp.ops.attention import choose_backend
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.materialize import copy_initial_weights, draw_initial_weights, materialize
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.log import get_logger


class BuiltModel:
    """A parallel model with its initial weights, and what is known of the whole of it."""

    def __init__(self, experiment: Experiment, mesh: Mesh) -> None:
        backend = choose_backend(
            experiment.model.attention_backend,
            mesh.device,
            bf16=experiment.training.mixed_precision == "bf16",
            documents=experiment.data.document_mask,
            parts=experiment.parallelism.cp > 1 and experiment.parallelism.cp_method != "ulysses",
        )
        build = functools.partial(
            build_model, experiment.model, seq_len=experiment.training.seq_len, attention_backend=backend
        )
        with torch.device("meta"):
            model = build()
        self.parameters = parameter_count(model)
        """Number of parameters of the whole model."""
        self.flops_per_token = flops_per_token(model, experiment.training.seq_len)
        """Operations of a training step per token."""
        table = initial_table(model)
        parallelize(model, experiment, mesh)
        materialize(model, mesh.device, cpu_offload=experiment.parallelism.cpu_offload)
        if table is not None:
            draw_initial_weights(model, table, experiment.experiment.seed)
        else:
            copy_initial_weights(model, build, experiment.experiment.seed)
        self.module: nn.Module = model
        """The model."""
        get_logger().info(
            "%s: %s parameters, attention by %s on %s",
            experiment.model.name,
            f"{self.parameters:,}",
            backend,
            mesh.device.type,
        )
