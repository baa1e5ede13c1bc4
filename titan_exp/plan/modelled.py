"""Which options of a run the planner knows the memory of; asked before torch is imported, to refuse at once."""

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import device_type


def require_modelled(experiment: Experiment) -> None:
    """Every option of a run is one whose memory is known.

    Raises:
        UserError: one is not.
    """
    cuda, found = device_type(experiment.cluster) == "cuda", []
    if experiment.compile.enabled:
        reason = "what compiled code keeps is not modelled yet"
        found.append(Violation("compile.enabled", True, reason, "compile=none plans the same run without"))
    if cuda and experiment.quantization.recipe != "none":
        reason = "what this recipe's CUDA kernels keep is not modelled yet"
        remedy = "quantization=none plans the same run without"
        found.append(Violation("quantization.recipe", experiment.quantization.recipe, reason, remedy))
    if cuda and experiment.parallelism.cpu_offload:
        reason = "which memory is the GPU's and which the CPU's is not told apart yet"
        found.append(Violation("parallelism.cpu_offload", True, reason, "parallelism.cpu_offload=false"))
    if cuda and experiment.model.attention_backend not in ("auto", "flash", "cudnn"):
        reason = "what this kernel keeps on CUDA is not modelled yet"
        backend = experiment.model.attention_backend
        found.append(Violation("model.attention_backend", backend, reason, "model.attention_backend=flash"))
    if cuda and experiment.data.document_mask:
        reason = "what attention with a document mask keeps on CUDA is not modelled yet"
        found.append(Violation("data.document_mask", True, reason, "data.document_mask=false"))
    if cuda and experiment.training.mixed_precision != "bf16":
        reason = "in fp32 attention is another kernel on CUDA, which is not modelled yet"
        found.append(Violation("training.mixed_precision", "fp32", reason, "training.mixed_precision=bf16"))
    if found:
        raise UserError("This run cannot be planned.", found)
