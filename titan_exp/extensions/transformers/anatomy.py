"""Parts of a transformers class: embedding, list of blocks, head, everything else around the blocks, and initial
weights.

The class initializes its parameters on the meta device, where nothing is drawn, and we note the last operator on each.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.transformers.repository import build_class
from titan_exp.models.blocks.linear import InitSpec
from titan_exp.models.spec.mixers import AttentionSpec
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention

if TYPE_CHECKING:
    from titan_exp.extensions.transformers.repository import Config


KERNELS = "titan_exp"  # name of the attention implementation by our kernels, for which transformers makes no masks

RECORDER = "titan_exp_recorder"  # name of the attention implementation that computes nothing and records its arguments

KNOWN_OPTIONS = frozenset(
    {
        "sliding_window",
        "position_ids",
        "use_cache",
        "is_causal",
        "cache_position",
        "cu_seq_lens_q",
        "output_router_logits",
    }
)
"""Arguments, besides tensors, scaling, dropout and masks, that the kernels handle or that training never passes."""


@dataclass
class AttentionCalls:
    """Calls of the attention of a model, recorded in a forward pass on the meta device."""

    found: dict[nn.Module, AttentionSpec] = field(default_factory=dict)
    """Attention spec of each module that called attention."""
    unknown: dict[str, object] = field(default_factory=dict)  # arguments that the kernels do not support
    dropout: float = 0.0  # largest dropout of attention probabilities
    masks_arrive: bool = True  # True if every call got the masks that were passed to the model
    is_causal: bool = True  # False if a module sees later tokens
    uncut: str | None = None
    """Reason why more than hidden states goes from block to block, so that no stage can begin at one."""

    def add(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        masks: object = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Record a call, as an attention function of transformers; returns values of the right shape."""
        heads, width = query.shape[1], query.shape[3]
        self.found[module] = AttentionSpec(
            heads,
            key.shape[1],
            width,
            value.shape[3],
            qk_dim_key="the head size of config.json",
            window=options.get("sliding_window"),
            scale=None if scaling is None or abs(scaling - width**-0.5) < 1e-9 else float(scaling),
        )
        self.unknown |= {key: given for key, given in options.items() if given is not None and key not in KNOWN_OPTIONS}
        self.dropout = max(self.dropout, dropout)
        self.masks_arrive &= masks is not None
        self.is_causal &= getattr(module, "is_causal", True) and options.get("is_causal", True) is not False
        return query.new_empty(query.shape[0], query.shape[2], heads, value.shape[3]), None


_RECORDING: ContextVar[AttentionCalls] = ContextVar("recording")


def give_kernels(found: dict[nn.Module, AttentionSpec], backend: AttentionBackend) -> None:
    """Give each attention module the kernel of its pattern as `core`, and the number of its pattern."""
    patterns = list(dict.fromkeys(spec.pattern for spec in found.values()))
    for module, spec in found.items():
        module.core = CausalAttention(backend, spec.scale, spec.pattern)
        module.mask_number = patterns.index(spec.pattern)  # type: ignore[assignment]  # a plain attribute


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *, masks: Sequence[Any], **_: Any
) -> tuple[Tensor, None]:
    """Attend by the module's kernel and the mask of its pattern, as an attention function of transformers."""
    out = module.core(query, key, value, masks[module.mask_number])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(KERNELS, _attend)
AttentionInterface.register(RECORDER, lambda *args, **kwargs: _RECORDING.get().add(*args, **kwargs))


PROBED_TOKENS = 8  # number of tokens in the meta-device forward pass that reveals attention shapes


@dataclass(frozen=True)
class Anatomy:
    """A transformers model taken apart; the modules are the model's own."""

    model: Any
    embedding: nn.Embedding
    embedding_scale: float | None  # factor of the embedding's output rows; None if there is none
    blocks_path: str  # path of the list of blocks in the model's body, such as `layers`
    blocks: nn.ModuleList
    others: dict[str, nn.Module]  # outermost modules of the body beside embedding and blocks, by path with `_` for dots
    head: nn.Linear
    tied: bool  # True if the head uses the embedding's weight
    names: dict[nn.Parameter, str]  # names of the class's parameters

    @property
    def plan(self) -> dict[str, Any]:
        """Pipeline plan of the class: inputs and outputs of its body's modules by path; empty if it brings none."""
        return getattr(self.body.config, "base_model_pp_plan", None) or {}

    @property
    def body(self) -> Any:
        """Body: the model without its head."""
        return self.model.base_model


def take_apart(config: "Config", attention: str) -> Anatomy:
    """Build the model of a config on the current default device, and find its parts. Raises UserError if there is no
    such class, or its parts are not those of a decoder whose head is one matmul."""
    try:
        model = build_class(config, attention)
    except UserError:
        raise
    except Exception as error:  # a class may raise anything
        reason = " ".join(str(error).split())[:300]
        kind = config.config_json.get("model_type")
        raise unsupported(f"a {kind} with our attention fails with {type(error).__name__}: {reason}") from error
    name, body = type(model).__name__, model.base_model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    lists = ((path, module) for path, module in body.named_modules() if path and isinstance(module, nn.ModuleList))
    path, blocks = next(((path, found) for path, found in lists if len(found) == config.layers), ("", None))
    if blocks is None:
        raise unsupported(f"{name} has no list of {config.layers} blocks")
    if not isinstance(embedding, nn.Embedding) or embedding.weight.shape != (config.vocab_size, config.dim):
        raise unsupported(f"{name}'s token embedding is not a table of model.vocab_size by model.dim")
    if type(head) is not nn.Linear or head.bias is not None or head.weight.shape != embedding.weight.shape:
        raise unsupported(f"{name}'s head is not a linear layer from model.dim to model.vocab_size without bias")
    scale = getattr(embedding, "scalar_embed_scale", None)
    if type(embedding) is not nn.Embedding and scale is None:
        raise unsupported(f"{name}'s token embedding is a {type(embedding).__name__}, which does more than look up")
    taken = {embedding, blocks}
    others = {path.replace(".", "_"): module for path, module in _outermost(body, taken)}
    names = {parameter: key for key, parameter in model.named_parameters()}
    anatomy = Anatomy(model, embedding, scale, path, blocks, others, head, head.weight is embedding.weight, names)
    held = [embedding, blocks, head, *others.values()]
    found = {parameter for module in held for parameter in module.parameters()}
    lost = [key for parameter, key in names.items() if parameter not in found]
    if lost:
        raise unsupported(f"{name} has parameters outside its embedding, blocks and head: {', '.join(lost[:3])}")
    return anatomy


def recorded_calls(anatomy: Anatomy) -> AttentionCalls:
    """Attention calls in a forward pass on the meta device, for a model with the recorder as its attention. Raises
    UserError if the model does more with its hidden states or logits than the head's matmul."""
    model, name = anatomy.model, type(anatomy.model).__name__
    seen: dict[str, Any] = {}
    # What depends on the hidden states then requires a gradient.
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is anatomy.embedding.weight)
    flow = _Flow(anatomy)
    hooks = [
        *flow.hooks,
        anatomy.head.register_forward_hook(lambda _, inputs, output: seen.update(input=inputs[0], output=output)),
        anatomy.body.register_forward_hook(lambda _, __, output: seen.update(hidden=output[0])),
    ]
    tokens = torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device="meta")
    positions = torch.arange(PROBED_TOKENS, device="meta")[None]
    calls = AttentionCalls()
    token = _RECORDING.set(calls)
    try:
        rows = anatomy.embedding(tokens)
        logits = model(inputs_embeds=rows, position_ids=positions, use_cache=False, masks=()).logits
    except Exception as error:  # a class may raise anything
        reason = " ".join(str(error).split())[:300]
        raise unsupported(f"{name} fails on the meta device with {type(error).__name__}: {reason}") from error
    finally:
        _RECORDING.reset(token)
        for hook in hooks:
            hook.remove()
    if not {"input", "hidden"} <= seen.keys():
        raise unsupported(f"{name} does not call its body and its head as a whole")
    if _storage(seen["input"]) != _storage(seen["hidden"]):
        raise unsupported(f"{name} changes the hidden states before its head (perhaps by a scale or a projection)")
    calls.uncut = flow.refusal
    if _storage(logits) != _storage(seen["output"]):
        raise unsupported(f"{name} changes its logits after the head (perhaps by a scale or a soft cap)")
    return calls


def unsupported(reason: str) -> UserError:
    """Make the error that refuses a class."""
    remedy = "give a repository with another class, or write a module of your own (titan-exp help own-model)"
    return UserError("This run cannot start.", [Violation("model.repository", "", reason, remedy)])


def recorded_init(model: Any) -> dict[Tensor, InitSpec]:
    """Initial distribution of each parameter and buffer of a meta model; those with a distribution that we lack are
    left out. A padding token's embedding row, which classes set to zero, starts like the other rows."""
    with _InitRecorder(model) as recorder, torch.no_grad():
        model.initialize_weights()
    return {parameter: init for parameter, init in recorder.found.items() if init is not None}


def _outermost(module: nn.Module, taken: set[nn.Module], prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Outermost modules that are not taken and contain no taken module."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if child in taken:
            continue
        if any(part in taken for part in child.modules()):
            found += _outermost(child, taken, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", child))
    return found


class _Flow:
    """Tensors that go from block to block in a forward pass whose hidden states require gradients, by `hooks`."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._last: Tensor | None = None
        self._number = -1
        self.refusal: str | None = None
        self.hooks = [
            hook
            for number, block in enumerate(anatomy.blocks)
            for hook in (
                block.register_forward_pre_hook(partial(self._before, number), with_kwargs=True),
                block.register_forward_hook(self._after),
            )
        ]
        tables = (module for module in anatomy.others.values() if any(True for _ in module.parameters()))
        self.hooks += [module.register_forward_pre_hook(self._end) for module in tables]

    def _before(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        kind, (hidden, *others) = type(block).__name__, args or (kwargs.get("hidden_states"),)
        more = {"a further argument": others, **{key: value for key, value in kwargs.items() if value is not hidden}}
        passed = [
            key
            for key, value in more.items()
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
        ]
        if passed:
            self._refuse(f"each {kind} also gets {passed[0]}, which depends on the embedding or on earlier blocks")
        if number != self._number + 1:
            self._refuse(f"its blocks are not called once each, in order ({kind})")
        if self._last is not None and not (isinstance(hidden, Tensor) and _storage(hidden) == _storage(self._last)):
            self._refuse(f"the hidden states change between one {kind} and the next")
        self._number = number

    def _after(self, block: nn.Module, _: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            self._refuse(f"a {type(block).__name__} returns more than hidden states")
        self._last = output if isinstance(output, Tensor) else None

    def _end(self, module: nn.Module, _: Any) -> None:
        if self._number < 0:
            self._refuse(f"its {type(module).__name__} comes before the blocks")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


class _InitRecorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {_storage(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.found: dict[Tensor, InitSpec | None] = {}

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
