"""Groups `activation_checkpoint` and `compile`."""

import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from titan_exp.config.groups.types import PositiveInt, Ratio


class AutomaticSave(NamedTuple):
    """Entry `auto/3` of `activation_checkpoint.save`."""

    every: int
    """Every n-th block saves one call more, if the budget of n blocks has room for it."""
    more: bool | None = None
    """True or False if all blocks do, or none: samples of the planner, whose blocks are alike."""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activations that backward recomputes."""

    mode: Literal["none", "full", "every_n", "selective", "budget"]
    """Activation checkpointing: `none` keeps every activation; `full` keeps each block's input and recomputes the rest;
    `every_n` does that to some blocks; `selective` keeps the outputs of chosen operators too; `budget` lets the
    compiler choose. E.g. `activation_checkpoint.mode=full`."""
    every: PositiveInt
    """Mode `every_n`: 2 recomputes every second block. E.g. `activation_checkpoint.every=3`."""
    save: list[str]
    """Mode `selective`: `[auto]` saves what attention and reducing collectives return, and within `budget` the matmuls
    with the fewest bytes per recomputed FLOP; `[auto/3]` lets every third block save one matmul more if the budget of
    three blocks has room for it. Or operators, named as in `torch.ops`; `aten.mm/2` saves every second call in a block,
    the first included. E.g. `activation_checkpoint.save='[aten.mm/2]'`."""
    budget: Ratio
    """Mode `budget`: memory for activations as a share of the compiler's default, 0 being `full`. Mode `selective` with
    `[auto]`: bytes of saved matmuls as a share of all that backward needs. E.g. `activation_checkpoint.budget=0.3`."""

    @property
    def automatic(self) -> AutomaticSave | None:
        """Parsed `[auto]` or `[auto/n]` of mode `selective`; None for a list by hand and other modes."""
        if self.mode != "selective" or len(self.save) != 1:
            return None
        found = re.fullmatch(r"auto(?:/([1-9]\d*))?([+-])?", self.save[0])
        return found and AutomaticSave(int(found[1] or 1), {"+": True, "-": False}.get(found[2]))

    def with_blocks_alike(self, *, more: bool) -> "ActivationCheckpointConfig":
        """Variant of an automatic list whose blocks all save one call more, or none does."""
        assert self.automatic is not None, "blocks differ with an automatic list only"
        return replace(self, save=[f"auto/{self.automatic.every}{'+' if more else '-'}"])


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, part by part."""

    enabled: Literal["auto", True, False]
    """Compile the parts in `components`. `auto` does on a GPU, except where a part would be refused, as a line says
    then; it runs eagerly on a CPU. A run's config holds what it chose. E.g. `compile.enabled=false`."""
    components: list[Literal["blocks", "loss"]]
    """Parts to compile: `blocks`, each transformer block (they share one compiled graph), and `loss`, the loss from
    logits. E.g. `compile.components=[loss]`."""
    backend: str
    """torch.compile backend: `inductor`, or `aot_eager`, which traces without generating code.
    E.g. `compile.backend=aot_eager`."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch once and replay that, compiled or not: for models so small that
    launching kernels takes longer than running them. One GPU.

    The pass's activations stay reserved, and gradients are kept between steps. It has not been run on a GPU.
    E.g. `compile.cuda_graphs=true`."""

    autotune_gemms: Literal["auto", "always", "never"] = "auto"
    """Time cuBLAS and Triton kernels for each matmul of compiled blocks, and use the fastest: on CUDA with
    `backend=inductor`, and not with `training.deterministic`. `auto` does on a single GPU; several ranks may choose
    differently.

    Another kernel gives other bits. Timings are cached beside the runs; without them, the first step takes longer, as
    the log says. It has not been run on a GPU. E.g. `compile.autotune_gemms=never`."""

    def compiles(self, component: Literal["blocks", "loss"]) -> bool:
        """True if this part of a training step is compiled."""
        assert self.enabled != "auto", "resolved before launch"
        return self.enabled and component in self.components

    def autotunes_gemms(self, ranks: int) -> bool:
        """True if matmul kernels are timed in a run of so many ranks on CUDA."""
        return self.autotune_gemms == "always" or (self.autotune_gemms == "auto" and ranks == 1)
