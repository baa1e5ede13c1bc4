"""An upper bound of what a rank's process can take, from shapes alone: where it fits, nothing has to be traced.

It supposes the worst of every option: nothing sharded, divided or recomputed, fp32 throughout, every score of
attention kept, every micro-batch of a pipeline held at once. Imports no torch.
"""

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.parameter_count import has_known_state
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LayerSpec

FOR_A_PARAMETER = 128
"""Bytes: 16 for weight, gradient and AdamW's moments; 28 for what FSDP gathers and reduces, with its buffers; 20 for an
update's and clipping's temporaries; 24 for the copies of a save in the background; and 40 to spare."""
FOR_THE_PROCESS = {"cpu": 2**30, "cuda": 4 * 2**30}
"""Bytes beside tensors: on a CPU Python and torch (a third to a half of that, seen); on CUDA the context, and the
workspaces and buffers of cuBLAS and NCCL."""


def upper_bound(experiment: Experiment) -> int | None:
    """Bytes that the process of any rank stays below; None where the model or the optimizer is the user's own.

    Args:
        experiment: the run, its layout resolved.
    """
    spec = model_spec(experiment.model)
    if spec is None or not has_known_state(experiment.optimizer.name):
        return None
    seq = experiment.training.seq_len
    # Twice the numbers of each tensor that a block makes: what is kept, and its gradient.
    blocks = sum(_numbers_per_token(layer, seq) for layer in spec.layers)
    ends = 6 * spec.vocab_size + 4 * spec.dim
    layout = ResolvedLayout.of(experiment)
    rows = experiment.training.global_batch_size // layout.dp_degree
    rows = layout.micro_batch_size if experiment.parallelism.pp == 1 else rows
    # Recipes keep what they have rounded beside what it was.
    recipe = 1 if experiment.quantization.recipe == "none" else 2
    # A recorded pass keeps its memory, and evaluation takes its own.
    passes = 2 if experiment.compile.cuda_graphs else 1
    tensors = FOR_A_PARAMETER * spec.parameters + passes * 4 * rows * seq * (blocks + ends)
    process = FOR_THE_PROCESS[device_type(experiment.cluster)]
    # The compiler, and its processes.
    return recipe * tensors + process + (2**30 if experiment.compile.enabled else 0)


def _numbers_per_token(layer: LayerSpec, seq: int) -> int:
    """Numbers that a block keeps per token at most, their gradients included: each linear's output eight times over
    (rotated, cast, split), and all scores of attention."""
    outputs = sum(linear.outputs * linear.active_experts for linear in layer.linears)
    scores = 0 if layer.attention is None else 6 * layer.attention.heads * seq
    return 8 * outputs + scores
