"""Initial distributions of the parameters of a class of transformers, read off its own initialization.

The class initializes its parameters on the meta device, where nothing is drawn, and the last operator on each is noted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_exp.models.blocks.initialization import InitSpec


def recorded_init(model: Any) -> dict[nn.Parameter, InitSpec]:
    """Initial distribution of each parameter of a meta model; those drawn from another one are left out.

    The embedding's row of a padding token, which classes set to zero, starts like the other rows.
    """
    with _InitRecorder(model) as recorder, torch.no_grad():
        model.initialize_weights()
    return {parameter: init for parameter, init in recorder.found.items() if init is not None}


class _InitRecorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {_storage(parameter): parameter for parameter in model.parameters()}
        self.found: dict[nn.Parameter, InitSpec | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) and func._schema.is_mutable else None
        parameter = None if target is None else self._parameters.get(_storage(target))
        if parameter is not None and target is not None:
            if target.numel() == parameter.numel():
                self.found[parameter] = _init_of(func, args[1:], kwargs)
            elif func._schema.name != "aten::zero_":
                self.found[parameter] = None
        return func(*args, **kwargs)


def _init_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InitSpec | None:
    match func._schema.name:
        case "aten::zero_":
            return InitSpec("zeros")
        case "aten::fill_" if args[0] in (0, 1):
            return InitSpec("ones" if args[0] else "zeros")
        case "aten::normal_":
            mean, std = (*args, 0.0, 1.0)[:2] if len(args) != 1 else (args[0], kwargs.get("std", 1.0))
            return InitSpec("normal", float(std)) if mean == 0 else None
    return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
