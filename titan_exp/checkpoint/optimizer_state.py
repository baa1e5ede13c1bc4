"""Optimizer state of a checkpoint: tensors by full parameter name, and other values as JSON.

Keys are `optimizer.<full parameter name>.<state name>` for tensors (in a list or dict, followed by the place in it),
and `optimizer_values.<kind>.<full parameter name>` for JSON. Kinds are `state`, numbers and containers of the
parameter's state; `group`, changes by the optimizer to its group since it was built; `local`, names of tensors that a
rank keeps as a plain tensor of its shard's shape; and `none` for a parameter without state.
"""

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.grad_clip import AVERAGE_NORM
from titan_exp.optim.parameter_groups import changed_groups, reset_groups
from titan_exp.optim.weight_average import AVERAGE
from titan_exp.parallel.mesh import gather_objects
from titan_exp.tracking.logging import get_logger

_MAX_INLINE = 4096  # maximum number of elements of a tensor in a parameter group
_SCALARS = (bool, int, float, str)


class UnsavedStateError(UserError):
    """State of an optimizer that a checkpoint cannot carry."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where} {reason}, which a checkpoint cannot hold. Keep numbers, text, None, tensors, and lists, tuples "
            "and dicts of them in optimizer.state[parameter] or in optimizer.param_groups."
        )


def encode(value: object, where: str, keep: Callable[[str, Tensor], Any]) -> Any:
    """Encode a value as JSON; `keep` replaces each tensor, given place and value. Raises UnsavedStateError."""
    kind = type(value)
    if value is None or kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return {"tensor": keep(where, value)}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return {kind.__name__: [encode(part, f"{where}.{index}", keep) for index, part in enumerate(value)]}
    if isinstance(value, dict) and kind is dict:
        if odd := [key for key in value if type(key) not in _SCALARS]:
            raise UnsavedStateError(where, f"has a key of {type(odd[0]).__name__}")
        return {"dict": [[key, encode(part, f"{where}.{key}", keep)] for key, part in value.items()]}
    raise UnsavedStateError(where, f"is a {kind.__module__}.{kind.__qualname__}")


def decode(tree: Any, take: Callable[[Any], Tensor]) -> Any:
    """Decode a value of `encode`; `take` returns the tensor of a replacement. Raises UserError if it is damaged."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case {"tensor": kept}:
            return take(kept)
        case {"list": [*parts]}:
            return [decode(part, take) for part in parts]
        case {"tuple": [*parts]}:
            return tuple(decode(part, take) for part in parts)
        case {"dict": [*pairs]} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {key: decode(part, take) for key, part in pairs}
    damage = "a value of the optimizer's state is not a number, a text or a container"
    raise UserError(f"The checkpoint is damaged: {damage}.")


def inline(where: str, tensor: Tensor) -> dict[str, Any]:
    """Encode a small tensor of a parameter group whole. Raises UnsavedStateError if it is large or sharded."""
    if isinstance(tensor, DTensor) or tensor.numel() > _MAX_INLINE:
        kind = "a sharded tensor" if isinstance(tensor, DTensor) else f"a tensor of {tensor.numel():,} numbers"
        raise UnsavedStateError(where, f"is {kind} in a parameter group")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(content).decode(),
        "on_host": tensor.device.type == "cpu",
    }


def from_inline(kept: Any, device: torch.device) -> Tensor:
    """Decode a tensor of `inline`, to the host or the device, as it was. Raises UserError if it is damaged."""
    try:
        dtype = getattr(torch, kept["dtype"])
        content = bytearray(base64.b64decode(kept["bytes"], validate=True))
        found = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if content else torch.empty(0, dtype=dtype)
        return found.clone().reshape(kept["shape"]).to("cpu" if kept["on_host"] else device)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        damage = f"we cannot read a tensor of a parameter group ({error})"
        raise UserError(f"The checkpoint is damaged: {damage}.") from error


OPTIMIZER_PREFIX, VALUES_PREFIX = "optimizer.", "optimizer_values."
SMALL = 16  # largest number of elements of a whole tensor that ranks compare before a save


@dataclass(frozen=True)
class SavedTensor:
    """Global shape and dtype of a tensor in a checkpoint."""

    shape: torch.Size  # shape of the whole tensor
    dtype: torch.dtype  # dtype as saved


def optimizer_state_dict(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state tensors by key, not copied; of a tied tensor with copies in two parts, the first part's."""
    return first_by_name(optimizer_tensors(parts, optimizer))


def first_by_name(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by name, the first of each."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        tensors.setdefault(name, tensor)
    return tensors


def optimizer_tensors(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Keys and tensors of optimizer state, including every copy of a tied parameter."""
    for part in parts:
        own = dict(part.named_parameters())
        # A plain model's weights have an entry for each name of a tied parameter, so the average has one as well.
        for name, parameter in part.named_parameters(remove_duplicate=False):
            for key, value in _tensors(parameter, optimizer.state.get(parameter, {})).items():
                if name in own or key == AVERAGE:
                    yield f"{OPTIMIZER_PREFIX}{name}.{key}", _whole(parameter, value)


def optimizer_values(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """JSON values of optimizer state by `<kind>.<full parameter name>`. Raises UnsavedStateError."""
    group_of = {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    if odd := [key for key in optimizer.state if key not in group_of]:
        raise UnsavedStateError(f"optimizer.state[{odd[0]!r}]"[:200], "is the state of no parameter")
    values = dict[str, Any]()
    groups = [
        {key: encode(value, f"param_groups[{index}][{key!r}]", inline) for key, value in changed.items()}
        for index, changed in enumerate(changed_groups(optimizer))
    ]
    for name, parameter in _named(parts):
        if parameter not in group_of:
            continue
        state = optimizer.state.get(parameter, {})
        if odd := [key for key in state if type(key) is not str]:
            raise UnsavedStateError(f"optimizer.state[{name}]", f"has a key of {type(odd[0]).__name__}")
        found = {
            "state": _trees(name, state),
            "group": groups[group_of[parameter]],
            "local": [key for key, value in _tensors(parameter, state).items() if _is_shard(parameter, value)],
            "none": bool(optimizer.state) and not state,
        }
        values |= {f"{kind}.{name}": value for kind, value in found.items() if value}
    return values


def prepare_optimizer_state(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, SavedTensor],
    values: Mapping[str, Any],
    *,
    keeps: Collection[str] = (),
    whole: bool = False,
) -> None:
    """Give an optimizer the saved `values`, and memory for the `saved` tensors, which are then loaded; collective.

    A step with zero gradients places the tensors of the optimizer's first step. Tensors of a later step are placed like
    the parameter if they have its shape, else whole on every rank. Optional tensors are left out unless this run
    `keeps` them by name, or `whole` asks for all. Raises UserError if values of a group do not fit the groups of this
    layout.
    """
    named = list(_named(parts))
    wanted = {name: dict[str, SavedTensor]() for name, _ in named}
    for key, tensor in saved.items():
        if (place := _place(key, wanted)) is not None:
            wanted[place[0]][place[1]] = tensor
    state = optimizer.state
    if _on_any_rank(name for name, p in named if not wanted[name].keys() <= _tensors(p, state.get(p, {})).keys()):
        init_optimizer_state(parts, optimizer)
    reset_groups(optimizer)
    # A parameter's state may exist on a single rank.
    elsewhere = _on_any_rank(name for name, parameter in named if state.get(parameter))
    lacking = set[str]()
    for name, parameter in named:
        if state.get(parameter) or name not in elsewhere:
            known = {*keeps, *_tensors(parameter, state.get(parameter, {}))}
            found = wanted[name].items()
            kept = {key: x for key, x in found if whole or key in known or not is_optional(f".{key}")}
            lacking |= _prepare(parameter, state, name, kept, values)
    if lacking:
        get_logger().warning(
            "the checkpoint has no %s of the optimizer's state, which are not tensors: an earlier version did not save "
            "them. They begin anew",
            ", ".join(sorted(lacking)),
        )
    names = {parameter: name for name, parameter in named}
    for group in optimizer.param_groups:
        _restore_group(group, {names[p]: values.get(f"group.{names[p]}", {}) for p in group["params"] if p in names})


def init_optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Allocate optimizer state for loading, by a step with zero gradients; parameters keep their values."""
    parameters = [parameter for _, parameter in _named(parts)]
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def saved_tensors(state: Mapping[str, Tensor]) -> dict[str, SavedTensor]:
    """Shapes and dtypes of tensors by key."""
    return {key: SavedTensor(tensor.shape, tensor.dtype) for key, tensor in state.items()}


def empty_tensors(
    parts: Sequence[nn.Module], like: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]
) -> dict[str, Tensor]:
    """Allocate another group's tensors by key, placed like this group's of the same key, or like its parameter."""
    named = dict(_named(parts))
    found = dict[str, Tensor]()
    for key, tensor in saved.items():
        place = _place(key, named)
        if key in like and like[key].shape == tensor.shape:
            found[key] = torch.empty_like(like[key])
        elif place is not None:
            found[key] = _empty(named[place[0]], tensor)
    return found


def differing_between_ranks(state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """Keys of optimizer values and small whole tensors that differ between ranks; collective over the group."""
    own = {
        key: zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, value in state.items()
        if key.startswith(VALUES_PREFIX)
        or (key.startswith(OPTIMIZER_PREFIX) and not isinstance(value, DTensor) and value.numel() <= SMALL)
    }
    known = dict[str, set[int]]()
    for found in gather_objects(own, group):
        for key, checksum in found.items():
            known.setdefault(key, set()).add(checksum)
    return sorted(key for key, checksums in known.items() if len(checksums) > 1)


def average_key(name: str) -> str:
    """Key of a parameter's averaged weights."""
    return f"{OPTIMIZER_PREFIX}{name}.{AVERAGE}"


def is_average(key: str) -> bool:
    """True for the key of averaged weights."""
    return key.endswith(f".{AVERAGE}")


def is_optional(key: str) -> bool:
    """True for optimizer state that a continued run can begin without: averages, clipping, and parts of extensions."""
    return key.rpartition(".")[2] in {AVERAGE, AVERAGE_NORM, *provided("kept_state")}


def equals_weights(key: str) -> bool:
    """True for optimizer state that equals the weights whenever a checkpoint is saved."""
    return provided("kept_state").get(key.rpartition(".")[2], False)


def _named(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    named = (pair for part in parts for pair in part.named_parameters())
    return ((name, parameter) for name, parameter in named if parameter.requires_grad)


def _place(key: str, names: Mapping[str, Any]) -> tuple[str, str] | None:
    """Parameter of `names`, and state name, that a key belongs to."""
    words = key.removeprefix(OPTIMIZER_PREFIX).split(".")
    for count in range(len(words) - 1, 0, -1):
        if (name := ".".join(words[:count])) in names:
            return name, ".".join(words[count:])
    return None


def _tensors(parameter: Tensor, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Tensors of a parameter's state by name; tensors in containers are named by place. Raises UnsavedStateError."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[key] = value
        elif isinstance(value, list | tuple | dict):
            encode(value, key, found.setdefault)
    return found


def _trees(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    where, trees = f"optimizer.state[{name}].", dict[str, Any]()
    for key, value in state.items():
        if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
            raise UnsavedStateError(f"{where}{key}", f"is a DTensor placed {list(value.placements)}")
        if not isinstance(value, Tensor):
            trees[key] = encode(value, f"{where}{key}", lambda place, _: place.removeprefix(where))
    return trees


def _is_shard(parameter: Tensor, tensor: Tensor) -> bool:
    """True for a plain tensor of the shape of this rank's shard of a sharded parameter."""
    if isinstance(tensor, DTensor) or not isinstance(parameter, DTensor) or not tensor.dim():
        return False
    sharded = any(not isinstance(place, Replicate) for place in parameter.placements)
    return sharded and tensor.shape == local_tensor(parameter).shape


def _whole(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Wrap state as one tensor over the ranks that shard it; shares memory with it."""
    if not _is_shard(parameter, tensor):
        return tensor
    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)


def _empty(parameter: Tensor, saved: SavedTensor) -> Tensor:
    if saved.shape == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=saved.dtype)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=local_tensor(parameter.detach()).device)


def _prepare(
    parameter: Tensor, states: Any, name: str, wanted: Mapping[str, SavedTensor], values: Mapping[str, Any]
) -> set[str]:
    """Prepare a parameter's state for the `wanted` tensors, by state name. Returns names of numbers that the optimizer
    has and an early checkpoint lacks."""
    trees, local = values.get(f"state.{name}", {}), values.get(f"local.{name}", [])
    if not isinstance(trees, dict):
        raise UserError(f"The checkpoint is damaged: its values of {name}'s optimizer state are not a table.")
    state = states[parameter]
    present, taken = _tensors(parameter, state), set[str]()

    def take(key: Any) -> Tensor:
        if key not in wanted:
            raise UserError(f"The checkpoint is damaged: it has no {key} of {name}'s optimizer state.")
        taken.add(key)
        if key in present and _whole(parameter, present[key]).shape == wanted[key].shape:
            return present[key]
        empty = _empty(parameter, wanted[key])
        return local_tensor(empty) if key in local else empty

    numbers = {key for key, value in state.items() if not isinstance(value, Tensor | list | tuple | dict)}
    if (not wanted and f"none.{name}" in values) or trees:
        # State that the zero step has made and the saved optimizer lacked.
        for key in [key for key in state if key not in trees and key not in wanted and not is_optional(f".{key}")]:
            if not wanted or not isinstance(state[key], Tensor):
                del state[key]
    for key, tree in trees.items():
        state[key] = decode(tree, take)
    for key in [key for key in wanted if key not in taken]:
        state[key] = take(key)
    if not state:
        del states[parameter]
    return numbers if wanted and not trees else set()


def _restore_group(group: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Set a group to the values that its parameters' groups had. Raises UserError if these differ."""
    texts = defaultdict[str, list[str]](list)
    for name, values in found.items():
        texts[json.dumps(values, sort_keys=True)].append(name)
    if len(texts) > 1:
        (one, *_), (other, *_) = list(texts.values())[:2]
        keys = {*found[one], *found[other]}
        keys = sorted(key for key in keys if found[one].get(key) != found[other].get(key))
        raise UserError(
            f"The optimizer's group values {', '.join(keys)} differ between {one} and {other}, which are one parameter "
            "group in this layout and were two in that of the checkpoint: they cannot be carried. Continue in the "
            "layout of the checkpoint."
        )
    device = next((local_tensor(parameter.detach()).device for parameter in group["params"]), torch.device("cpu"))
    for text in texts:
        for key, tree in json.loads(text).items():
            group[key] = decode(tree, lambda kept: from_inline(kept, device))


def _on_any_rank(names: Iterable[str]) -> set[str]:
    own = list(names)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set(own)
    return {name for found in gather_objects(own) for name in found}
