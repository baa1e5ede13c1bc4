"""Transformers class as a decoder: our embedding and head around the class's own body, which attends by our kernels.

The body is called as a whole with the embedding's rows. Its blocks are the children `blocks`, and its other modules the
children `others` and, without parameters, `constants`, so parallelism finds and replaces modules where the body calls
them. A pipeline stage calls the body with stand-ins for the blocks of other stages.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.extensions.transformers.anatomy import (
    KERNELS,
    RECORDER,
    Anatomy,
    give_kernels,
    recorded_calls,
    recorded_init,
    take_apart,
)
from titan_exp.extensions.transformers.describe import styles_of_block
from titan_exp.extensions.transformers.experts import ClassMixture, adopt_experts
from titan_exp.models.blocks.linear import InitSpec, Linear
from titan_exp.models.blocks.transformer import Embedding, Head, LogitsLoss
from titan_exp.models.spec.mixers import AttentionSpec
from titan_exp.models.spec.model_spec import ModelSpec, PipelinePlan
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, GatherInput, HeadParallel, TPStyle, WholeTokens
from titan_exp.ops.attention.sdpa import AttentionBackend
from titan_exp.ops.cross_entropy import LossSum

if TYPE_CHECKING:
    from titan_exp.extensions.transformers.repository import Config


class ClassDecoder(nn.Module):
    """A causal language model of transformers, with the children `embedding`, `blocks`, `others` and `head`."""

    def __init__(self, config: "Config", spec: ModelSpec, backend: AttentionBackend) -> None:
        super().__init__()
        with torch.device("meta"):
            recorder = take_apart(config, RECORDER)
        init = recorded_init(recorder.model)
        self._init = {name: init[parameter] for parameter, name in recorder.names.items() if parameter in init}
        zeroed = [name for name, buffer in recorder.model.named_buffers() if init.get(buffer) == InitSpec("zeros")]
        adopt_experts(recorder)
        found = recorded_calls(recorder).found
        attention = {path: found[module] for path, module in recorder.model.named_modules() if module in found}
        anatomy = take_apart(config, KERNELS)
        adopt_experts(anatomy)
        self.spec, self._scale = spec, anatomy.embedding_scale
        self._plan: dict[str, TPStyle] = {}
        modules = dict(anatomy.model.named_modules())
        for path, _, name in (name.rpartition(".") for name in zeroed):
            modules[path].zeroed = (*getattr(modules[path], "zeroed", ()), name)
        give_kernels({modules[path]: shapes for path, shapes in attention.items()}, backend)
        self.embedding = Embedding(config.vocab_size, config.dim, 0.0)
        self.embedding.weight = anatomy.embedding.get_parameter("weight")
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(anatomy.blocks)})
        tables = {path for path, module in anatomy.others.items() if any(True for _ in module.parameters())}
        self.others = nn.ModuleDict({path: module for path, module in anatomy.others.items() if path in tables})
        self.constants = nn.ModuleDict({path: module for path, module in anatomy.others.items() if path not in tables})
        self.head = Head(config.dim, config.vocab_size, 0.0, tied=anatomy.tied)
        if not anatomy.tied:
            self.head.weight = anatomy.head.get_parameter("weight")
        self._replace_linears()
        if not any(refused.key == "parallelism.tp" for refused in spec.unsupported):
            self._plan_tensor_parallelism(anatomy, attention)
        # The body is not a child itself, because its modules have our names.
        self._body = (anatomy.model, anatomy.body, anatomy.blocks)
        self.names = {name: anatomy.names[parameter] for name, parameter in self.named_parameters()}
        """Parameter names of the class, by our names."""
        self.positions_restart = True
        """True if `positions` may restart within a sequence, False if they count through it."""
        self._stage: _Stage | None = None

    def forward(
        self,
        x: Int[Tensor, "batch seq"] | Float[Tensor, "batch part dim"],
        positions: Int[Tensor, "batch seq"] | None = None,
        documents: Int[Tensor, "batch seq"] | None = None,
        loss: LogitsLoss | None = None,
    ) -> Float[Tensor, "batch seq vocab"] | Float[Tensor, "batch part dim"] | LossSum | tuple[LossSum, ...]:
        """Compute logits of the next token, their loss, or hidden states for the next stage; see
        `models/decoder.py`."""
        if self._stage is None:  # parallelism has replaced modules by now
            self._stage = _Stage(self.blocks, self._body[2])
        seq, device = x.shape[1] if positions is None else positions.shape[1], x.device
        restarting = positions if self.positions_restart else None
        masks = tuple(core and core.mask(documents, restarting, seq=seq, device=device) for core in self._stage.cores)
        rows = x if x.is_floating_point() else self.embedding(x)
        if self._scale is not None and rows is not x:
            rows = rows * torch.full((), self._scale, dtype=rows.dtype, device=device)
        places = torch.arange(seq, device=device)[None] if positions is None else positions
        self._stage.received = x if rows is x else None
        try:
            hidden = self._body[1](inputs_embeds=rows, position_ids=places, use_cache=False, masks=masks)[0]
        except _StageEnd as end:
            return end.hidden
        finally:
            self._stage.received = None
        return self.embedding(hidden, self.head, loss) if self.spec.tied else self.head(hidden, loss=loss)

    def tp_plan(self) -> dict[str, TPStyle]:
        return {name: style for name, style in self._plan.items() if name.split(".")[1] in self.blocks}

    def pp_plan(self) -> PipelinePlan:
        return self.spec.pipeline

    def init_spec(self) -> dict[str, InitSpec]:
        theirs = {ours: self._init.get(name) for ours, name in self.names.items()}
        return {name: init for name, init in theirs.items() if init is not None}

    def reset_buffers(self) -> None:
        """Compute the class's buffers (RoPE) once they have memory."""
        for module in self.modules():
            for name in getattr(module, "zeroed", ()):
                module.get_buffer(name).zero_()
            own_parameters = any(True for _ in module.parameters(recurse=False))
            if not own_parameters and any(True for _ in module.buffers(recurse=False)):
                self._body[0]._init_weights(module)

    def flops_per_token(self, seq_len: int) -> float:
        return self.spec.flops_per_token(seq_len)

    def _replace_linears(self) -> None:
        """Replace the blocks' linears by ours, whose matmul recipes and tensor parallelism can replace."""
        for block in self.blocks.values():
            for path, module in list(block.named_modules()):
                if type(module) is nn.Linear:
                    with torch.device("meta"):
                        linear = Linear(module.in_features, module.out_features, 0.0)
                    linear.weight, linear.bias = module.weight, module.bias
                    linear.init_spec = dict  # type: ignore[method-assign]  # the model declares it
                    block.set_submodule(path, linear)
        for end in (self.embedding, self.head):
            end.init_spec = dict  # type: ignore[method-assign]

    def _plan_tensor_parallelism(self, anatomy: Anatomy, attention: dict[str, AttentionSpec]) -> None:
        paths = dict(anatomy.model.named_modules())
        shapes = {paths[path]: spec for path, spec in attention.items()}
        for number, block in self.blocks.items():
            calls = [(path, shapes[module]) for path, module in block.named_modules() if module in shapes]
            styles = styles_of_block(anatomy, block, calls[0] if calls else None)
            self._plan |= {f"blocks.{number}.{path}": style for path, style in styles.linears.items()}
            ours = {part for module in block.modules() if isinstance(module, ClassMixture) for part in module.modules()}
            for path, module in block.named_modules():
                if module in ours:
                    continue
                if path in styles.gathering:
                    module.tp_style = GatherInput()  # type: ignore[assignment]  # plain attributes
                elif path in styles.whole:
                    module.tp_style = WholeTokens()  # type: ignore[assignment]
                elif path in styles.heads:
                    module.tp_style = HeadParallel()  # type: ignore[assignment]
                elif not any(path.startswith(f"{gathering}.") for gathering in styles.gathering):
                    module.tp_style = SEQUENCE_PARALLEL  # type: ignore[assignment]
        for module in (*self.others.modules(), *self.constants.modules()):
            module.tp_style = SEQUENCE_PARALLEL  # type: ignore[assignment]


class _Stage:
    """Blocks of a pipeline stage in the class's own list, where stand-ins take the places of other stages' blocks."""

    def __init__(self, own: nn.ModuleDict, blocks: nn.ModuleList) -> None:
        self.received: Tensor | None = None
        """Hidden states of the previous stage."""
        numbers = [int(number) for number in own]
        for number in range(len(blocks)):
            blocks[number] = own[str(number)] if number in numbers else _OtherStage(self, ends=number > numbers[-1])
        found: dict[int, Any] = {
            module.mask_number: module.core  # type: ignore[misc]  # plain attributes
            for module in own.modules()
            if hasattr(module, "mask_number")
        }
        self.cores: list[Any] = [found.get(number) for number in range(max(found, default=-1) + 1)]
        """Attention cores by the number of their mask; None for a pattern of other stages."""


class _OtherStage(nn.Module):
    """Stand-in for a block of another stage: hands on what the stage has received, or ends it."""

    def __init__(self, stage: _Stage, *, ends: bool) -> None:
        super().__init__()
        self._stage, self._ends = stage, ends

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._ends:
            raise _StageEnd(args[0] if args else kwargs["hidden_states"])
        assert self._stage.received is not None, "earlier stages send theirs"
        return self._stage.received


class _StageEnd(Exception):  # no error
    """End of a stage's blocks in the middle of the class's body, which would go on with its last norm."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
