"""Trains a model of ours on two ranks without our trainer: the library's pieces, called one after the other.

    torchrun --nproc-per-node 2 docs/examples/train_by_hand.py model=llama_debug parallelism.tp=2

Words are overrides, as for `titan-exp train`. The losses are those of `titan-exp train` with the same words, bit for
bit. It trains dense language models without a pipeline. What the trainer adds: checkpoints, rows and sinks, evaluation,
parts of your own, recipes of low precision, experts, pipelines, replica groups. Take a piece away, or put yours in its
place.
"""

import os
import sys
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.train_loader import TrainLoader
from titan_exp.models.build import build_model, choose_attention_backend, init_specs
from titan_exp.optim.grad_clip import global_grad_norm, scale_gradients
from titan_exp.optim.lr_schedule import LRSchedule, set_lr
from titan_exp.optim.optimizer import build_optimizer
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.meta_init import buffer_places, every_weight, init_buffers, init_weights, materialize_parameters
from titan_exp.parallel.tensor_parallel.styles import reduce_partial_gradients, vocab_shard
from titan_exp.rules import check
from titan_exp.trainer.distributed import joined, seed_step
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.objective import build_objective


def main(words: list[str]) -> list[float]:
    """Train; returns the losses."""
    # Compose the configuration, check it, and resolve its layout: no torch is needed up to here.
    words = [*words, "training.mixed_precision=fp32"]  # bf16 on one data rank needs copies of weights: ComputeWeights
    experiment = check(resolve_layout(to_experiment(compose(words)), int(os.environ.get("WORLD_SIZE", "1"))))
    layout = ResolvedLayout.of(experiment)

    # Join the process group, and name its axes.
    with joined(experiment.cluster) as device:
        mesh = build_mesh(layout.parallelism, device)
        model = build(experiment, layout, mesh)
        return train(experiment, layout, mesh, model)


def build(experiment: Experiment, layout: ResolvedLayout, mesh: Mesh) -> nn.Module:
    """The parallel model with its initial weights, which do not depend on the layout."""
    training = experiment.training
    backend = choose_attention_backend(
        experiment.model, mesh.device, bf16=False, seq_len=training.seq_len, documents=experiment.data.document_mask
    )
    new = partial(build_model, experiment.model, seq_len=training.seq_len, attention_backend=backend)

    # On the meta device nothing is allocated: each rank makes its own shards below.
    with torch.device("meta"):
        model = new()
    specs, places = init_specs(model), buffer_places(model)
    assert specs is not None, "families of ours say how each weight is drawn"

    # Tensor, expert and context parallelism, compilation, activation checkpointing, FSDP: in this order.
    parallelize(model, mesh, layout, experiment.activation_checkpoint, experiment.compile)

    # Memory, then values: each weight has a generator of its own, keyed by its name.
    unfilled = materialize_parameters(model, mesh.device)
    init_buffers(places, unfilled, new, experiment.experiment.seed)
    init_weights(model, specs, experiment.experiment.seed, every_weight)
    return model


def train(experiment: Experiment, layout: ResolvedLayout, mesh: Mesh, module: nn.Module) -> list[float]:
    """The training loop."""
    training, seed = experiment.training, experiment.experiment.seed

    # The objective computes the loss of a micro-batch, of this rank's shard of the vocabulary under loss parallelism.
    shard = vocab_shard(mesh, experiment.model.vocab_size) if layout.parallelism.loss_parallel else None
    objective = build_objective(training, experiment.compile, shard)
    model = EagerModel(module, objective, mesh)
    optimizer = build_optimizer(model.parts, experiment.optimizer)
    schedule = LRSchedule(experiment.lr_schedule, peak=experiment.optimizer.lr, steps=training.steps)
    loader = TrainLoader(
        experiment.data,
        training,
        seed,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dp_degree,
        micro_batch_size=layout.micro_batch_size,
        pin_memory=mesh.device.type == "cuda",
    )
    losses = []
    with closing(loader):
        for step in range(1, training.steps + 1):
            seed_step(seed, step, mesh)
            batches = [next(loader) for _ in range(layout.gradient_accumulation_at(step))]

            # The loss is a mean over the tokens of the global batch, so ranks count them first.
            tokens = torch.tensor(sum(objective.count(batch) for batch in batches))
            dist.all_reduce(tokens, group=mesh.cpu_group)
            metrics = model.forward_backward(batches, [int(tokens) // mesh.batch_replicas])

            # FSDP has reduced its gradients; those of weights that tensor-parallel ranks share are summed here.
            reduce_partial_gradients(model.parts, mesh)
            grad_norm = global_grad_norm(model.parameters())
            if training.max_grad_norm is not None:
                scale_gradients(model.parameters(), grad_norm, training.max_grad_norm)

            set_lr(optimizer, schedule(step))
            optimizer.step()
            optimizer.zero_grad()

            # Each rank has its share of the mean loss.
            loss = metrics["loss"].double().cpu()
            dist.all_reduce(loss, group=mesh.cpu_group)
            losses.append(float(loss) / mesh.loss_replicas)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {losses[-1]:.4f}  grad norm {float(grad_norm):.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
