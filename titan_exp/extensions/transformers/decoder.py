"""Transformers class as a decoder: our embedding and head around the class's own body, which attends by our kernels.

The body is called as a whole with the embedding's rows. Its blocks are the children `blocks`, and its other modules the
children `others`, so parallelism finds and replaces modules where the body calls them.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.extensions.transformers.anatomy import (
    KERNELS,
    Anatomy,
    give_kernels,
    recorded_calls,
    recorded_init,
    recorder_of,
    take_apart,
)
from titan_exp.extensions.transformers.describe import styles_of_block
from titan_exp.models.blocks.linear import InitSpec, Linear
from titan_exp.models.blocks.transformer import Embedding, Head, LogitsLoss
from titan_exp.models.spec.mixers import AttentionSpec
from titan_exp.models.spec.model_spec import ModelSpec, PipelinePlan
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, GatherInput, HeadParallel, TPStyle
from titan_exp.ops.attention.sdpa import AttentionBackend
from titan_exp.ops.cross_entropy import LossSum

if TYPE_CHECKING:
    from titan_exp.extensions.transformers.repository import Config


class ClassDecoder(nn.Module):
    """A causal language model of transformers, with the children `embedding`, `blocks`, `others` and `head`."""

    def __init__(self, config: "Config", spec: ModelSpec, backend: AttentionBackend) -> None:
        super().__init__()
        with torch.device("meta"):
            recorder = recorder_of(config)
        found = recorded_calls(recorder).found
        attention = {path: found[module] for path, module in recorder.model.named_modules() if module in found}
        anatomy = take_apart(config, KERNELS)
        self.spec, self._scale = spec, anatomy.embedding_scale
        self._init = _initial_weights(recorder)
        self._plan: dict[str, TPStyle] = {}
        modules = dict(anatomy.model.named_modules())
        self._cores = give_kernels({modules[path]: shapes for path, shapes in attention.items()}, backend)
        self.embedding = Embedding(config.vocab_size, config.dim, 0.0)
        self.embedding.weight = anatomy.embedding.get_parameter("weight")
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(anatomy.blocks)})
        self.others = nn.ModuleDict(anatomy.others)
        self.head = Head(config.dim, config.vocab_size, 0.0, tied=anatomy.tied)
        if not anatomy.tied:
            self.head.weight = anatomy.head.get_parameter("weight")
        self._replace_linears()
        if not any(refused.key == "parallelism.tp" for refused in spec.unsupported):
            self._plan_tensor_parallelism(anatomy, attention)
        # The body is not a child itself, because its modules have our names.
        self._body = (anatomy.model, anatomy.body)
        self.names = our_names(self, anatomy)
        """Parameter names of the class, by our names."""

    def forward(
        self,
        x: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        documents: Int[Tensor, "batch seq"] | None = None,
        loss: LogitsLoss | None = None,
    ) -> Float[Tensor, "batch seq vocab"] | LossSum | tuple[LossSum, ...]:
        """Compute logits of the next token, or their loss; see `models/decoder.py`."""
        seq, device = x.shape[1], x.device
        masks = tuple(core.mask(documents, positions, seq=seq, device=device) for core in self._cores)
        rows = self.embedding(x)
        if self._scale is not None:
            rows = rows * torch.full((), self._scale, dtype=rows.dtype, device=device)
        places = torch.arange(seq, device=device)[None] if positions is None else positions
        hidden = self._body[1](inputs_embeds=rows, position_ids=places, use_cache=False, masks=masks)[0]
        return self.embedding(hidden, self.head, loss) if self.spec.tied else self.head(hidden, loss=loss)

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears, by full name."""
        return self._plan

    def pp_plan(self) -> PipelinePlan:
        """Plan that names the children that FSDP gathers for their own calls."""
        return self.spec.pipeline

    def init_spec(self) -> dict[str, InitSpec]:
        """Initial distributions of the class's own initialization, by full name."""
        theirs = {ours: self._init.get(name) for ours, name in self.names.items()}
        return {name: init for name, init in theirs.items() if init is not None}

    def reset_buffers(self) -> None:
        """Compute the class's buffers (RoPE) once they have memory."""
        for module in self.modules():
            own_parameters = any(True for _ in module.parameters(recurse=False))
            if not own_parameters and any(True for _ in module.buffers(recurse=False)):
                self._body[0]._init_weights(module)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a training step per token, as executed."""
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
            for path, module in block.named_modules():
                if path in styles.gathering:
                    module.tp_style = GatherInput()  # type: ignore[assignment]  # plain attributes
                elif path in styles.heads:
                    module.tp_style = HeadParallel()  # type: ignore[assignment]
                elif not any(path.startswith(f"{gathering}.") for gathering in styles.gathering):
                    module.tp_style = SEQUENCE_PARALLEL  # type: ignore[assignment]
        for module in self.others.modules():
            module.tp_style = SEQUENCE_PARALLEL  # type: ignore[assignment]


def our_names(model: ClassDecoder, anatomy: Anatomy) -> dict[str, str]:
    """Names of the class's parameters, by our names."""
    theirs = {parameter: name for name, parameter in anatomy.model.named_parameters()}
    return {name: theirs[parameter] for name, parameter in model.named_parameters()}


def _initial_weights(recorder: Anatomy) -> dict[str, InitSpec]:
    init = recorded_init(recorder.model)
    return {name: init[parameter] for name, parameter in recorder.model.named_parameters() if parameter in init}
