"""Upper bound of a rank's memory from shapes alone; if it fits, nothing is traced. Imports no torch.

Assumes the worst case of every option: nothing sharded, divided or recomputed, fp32 throughout, all attention scores
kept, every micro-batch of a pipeline in flight.
"""

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.plan.device_memory import symmetric_memory
from titan_exp.plan.exchange import exchange_of

BYTES_PER_PARAMETER = 128
"""20 for weight, gradient and three numbers of optimizer state; 28 for FSDP's gathered and reduced copies; 20 for
temporaries of the update and of clipping; 28 for the copies of an asynchronous save; 32 as margin."""
BYTES_PER_STATE = 12
"""Each further number of optimizer state, its copy in a save, and a temporary."""
PROCESS_OVERHEAD = {"cpu": 2**30, "cuda": 4 * 2**30}
"""Non-tensor bytes: Python and torch on a CPU (a third to a half of it, measured); on CUDA the context, and the
workspaces and buffers of cuBLAS and NCCL."""


def upper_bound(experiment: Experiment) -> int | None:
    """Upper bound of any rank's process in bytes; None with a user-defined model or optimizer."""
    spec = model_spec(experiment.model)
    state = experiment.optimizer.max_state
    if spec is None or state is None:
        return None
    layout, seq = ResolvedLayout.of(experiment), experiment.training.seq_len
    # Through symmetric memory, every tensor of rows has room for those of all ranks.
    room = layout.parallelism.ep if layout.parallelism.symmetric_exchange else 1
    blocks = sum(_numbers_per_token(layer, seq, room) for layer in spec.blocks)
    ends = (6 * spec.vocab_size + 4 * spec.dim) * (1 + len(spec.mtp_layers))
    rows = layout.micro_batch_size if layout.parallelism.pp == 1 else layout.sequences_per_dp_rank
    # Recipes keep quantized copies in addition to their sources.
    recipe = 1 if experiment.quantization.recipe == "none" else 2
    # A CUDA graph keeps its memory in addition to an evaluation's.
    passes = 2 if experiment.compile.cuda_graphs else 1
    numbers = state + experiment.weight_average.enabled + exchange_of(experiment).most_numbers(state)
    per_parameter = BYTES_PER_PARAMETER + BYTES_PER_STATE * max(0, numbers - 3)
    tensors = int(per_parameter * spec.parameters) + passes * 4 * rows * seq * (blocks + ends)
    compiler = 2**30 if experiment.compile.enabled else 0
    beside = PROCESS_OVERHEAD[layout.device_type] + compiler + symmetric_memory(layout, spec)
    return recipe * tensors + beside


def _numbers_per_token(layer: LayerSpec, seq: int, room: int) -> int:
    """Upper bound of elements that a block keeps per token, with their gradients: eight times each linear's output
    (rotated, cast, split), of experts for `room` times the rows, and all attention scores."""
    rows = ((linear, room if linear.experts > 1 else 1) for linear in layer.linears)
    outputs = sum(linear.outputs * linear.active_experts * times for linear, times in rows)
    scores = 0 if layer.attention is None else 6 * layer.attention.heads * seq
    return 8 * outputs + scores
