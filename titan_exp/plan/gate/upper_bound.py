"""Upper bound of a rank's memory from shapes alone; where it fits, nothing is traced. Imports no torch.

It assumes the worst of every option: nothing sharded, divided or recomputed, fp32 throughout, all attention scores
kept, every micro-batch of a pipeline in flight.
"""

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.parameter_count import has_known_state, parameters
from titan_exp.config.layout.resolved_layout import ResolvedLayout

BYTES_PER_PARAMETER = 128
"""16 for weight, gradient and AdamW's moments; 28 for FSDP's gathered and reduced copies; 20 for temporaries of the
update and of clipping; 24 for the copies of an asynchronous save; 40 to spare."""
PROCESS_OVERHEAD = {"cpu": 2**30, "cuda": 4 * 2**30}
"""Bytes beside tensors: Python and torch on a CPU (a third to a half of it, measured); on CUDA the context, and the
workspaces and buffers of cuBLAS and NCCL."""


def upper_bound(experiment: Experiment) -> int | None:
    """Bytes that the process of any rank stays below; None where the model or the optimizer is the user's own."""
    weights = parameters(experiment.model)
    if weights is None or not has_known_state(experiment.optimizer.name):
        return None
    layout, model, seq = ResolvedLayout.of(experiment), experiment.model, experiment.training.seq_len
    attention = (model.heads + 2 * model.kv_heads) * model.head_dim
    # Elements of every tensor that a block makes, and of its gradient.
    block = 16 * model.dim + 16 * model.ffn_dim + 8 * attention + 6 * model.heads * seq
    ends = 6 * model.vocab_size + 4 * model.dim
    rows = layout.micro_batch_size if layout.parallelism.pp == 1 else layout.sequences_per_dp_rank
    # Recipes keep quantized copies beside their sources.
    recipe = 1 if experiment.quantization.recipe == "none" else 2
    # A CUDA graph keeps its own memory, beside that of an evaluation.
    passes = 2 if experiment.compile.cuda_graphs else 1
    tensors = BYTES_PER_PARAMETER * weights + passes * 4 * rows * seq * (model.layers * block + ends)
    compiler = 2**30 if experiment.compile.enabled else 0
    return recipe * tensors + PROCESS_OVERHEAD[layout.device_type] + compiler
