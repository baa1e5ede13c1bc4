"""Rules about recorded passes: what a CUDA graph can hold, and what is known to leave everything where it was."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.rules.rule import rules

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile that record nothing themselves."""
KERNELS = ("auto", "cudnn", "flash", "efficient", "math")
"""Attention that is torch's own from its mask on."""
RECIPES = ("none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp")
"""Recipes whose casts are torch's or ours."""

_FIELD = "compile.cuda_graphs"
_WITHOUT = f"{_FIELD}=false"


def passes_can_be_recorded(experiment: Experiment) -> Iterator[Violation]:
    """A GPU computes, and nothing of a pass asks the host for anything."""
    if not experiment.compile.cuda_graphs:
        return
    if device_type(experiment.cluster) == "cpu":
        yield _refused("a CUDA graph records what a GPU does, and this run is on a CPU")
    if experiment.parallelism.cpu_offload:
        yield _refused(
            "parallelism.cpu_offload copies weights from the CPU's memory to another place in every pass",
            "parallelism.cpu_offload=false",
        )
    compile_, architecture = experiment.compile, experiment.model.architecture
    if compile_.enabled and compile_.backend not in BACKENDS:
        backend = compile_.backend
        yield _refused(f"compile.backend={backend} may record graphs of its own", f"compile.backend={listed(BACKENDS)}")
    if architecture not in ARCHITECTURES:
        yield _refused(
            f"a recording is right where a pass does the same for all tokens, which is not known of {architecture}",
            "model.architecture=decoder",
        )
    kernel = experiment.model.attention_backend
    if kernel not in KERNELS:
        yield _refused(
            f"what model.attention_backend={kernel} computes on the host in each pass is not known",
            f"model.attention_backend={listed(KERNELS)}",
        )
    recipe = experiment.quantization.recipe
    if recipe not in RECIPES:
        yield _refused(
            f"what the casts of quantization.recipe={recipe} compute on the host is not known",
            f"quantization={listed(RECIPES)}",
        )
    if experiment.training.fp32_modules:
        yield _refused(
            "training.fp32_modules keeps modules in fp32 by FSDP, which gathers weights to another place in every pass",
            "training.fp32_modules=[]",
        )


def one_rank_records(experiment: Experiment) -> Iterator[Violation]:
    """No messages between ranks, and no weights that are gathered from them."""
    world = ResolvedLayout.of(experiment).world_size
    if experiment.compile.cuda_graphs and world > 1:
        parallelism = experiment.parallelism
        degrees = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
        named = [f"{name}={getattr(parallelism, name)}" for name in degrees if getattr(parallelism, name) > 1]
        yield _refused(
            f"there are {world} ranks (parallelism: {', '.join(named)}); weights that they share are gathered to "
            "another place in every pass, and recorded messages between ranks have not been tried",
            "one rank: parallelism.dp_shard=1 and every other degree 1",
        )


def _refused(reason: str, remedy: str = "") -> Violation:
    return Violation(_FIELD, True, reason, f"{_WITHOUT}, or {remedy}" if remedy else _WITHOUT)


RULES = rules(
    passes_can_be_recorded,
)
LAYOUT_RULES = rules(
    one_rank_records,
)
