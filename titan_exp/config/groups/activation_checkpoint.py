"""Groups `activation_checkpoint` and `compile`."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveInt, Ratio


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activations that backward recomputes."""

    mode: Literal["none", "full", "every_n", "selective", "budget"]
    """`none` keeps every activation; `full` keeps each block's input and recomputes the rest; `every_n` does that to
    some blocks; `selective` keeps the outputs of chosen operators too; `budget` lets the compiler choose."""
    every: PositiveInt
    """Mode `every_n`: 2 recomputes every second block."""
    save: list[str]
    """Mode `selective`: operators, named as in `torch.ops`, whose outputs are saved; `aten.mm/2` saves every second
    call in a block, the first included."""
    budget: Ratio
    """Mode `budget`: memory for activations as a share of the compiler's default, 0 being `full`."""


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, part by part."""

    enabled: bool
    """Compile the parts in `components`."""
    components: list[Literal["blocks", "loss"]]
    """`blocks`: each transformer block (they share one compiled graph); `loss`: the loss from logits."""
    backend: str
    """torch.compile backend: `inductor`; `aot_eager` traces without generating code."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch once and replay that, compiled or not: for models so small that
    launching kernels takes longer than running them. One GPU. The pass's activations stay reserved, and gradients are
    kept between steps. It has not been run on a GPU."""

    def compiles(self, component: Literal["blocks", "loss"]) -> bool:
        """True if this part of a training step is compiled."""
        return self.enabled and component in self.components
