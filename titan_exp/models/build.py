"""From the model group to a module: ours, or a class of the user's own."""

from torch import nn

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.schema.import_path import import_dotted
from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.decoder import Decoder
from titan_exp.ops.attention.sdpa import AttentionBackend


def build_model(config: ModelConfig, *, seq_len: int, attention_backend: AttentionBackend) -> nn.Module:
    """Build the model on the current default device (meta, in training).

    A class of the user's own is called as `Class(config, **config.options)`; its `forward(tokens, positions,
    documents)` returns logits. Where it has a `ModuleDict` named `blocks`, those are sharded, recomputed and compiled
    one by one.

    Raises:
        UserError: the dotted name cannot be imported.
    """
    if config.architecture == "decoder":
        return Decoder(config, seq_len=seq_len, attention_backend=attention_backend)
    return import_dotted(config.architecture, "model.architecture")(config, **config.options)


def init_specs(model: nn.Module) -> dict[str, InitSpec] | None:
    """How every parameter starts, by full name; None where a model does not say so for all of them."""
    table = {
        f"{path}.{name}" if path else name: init
        for path, module in model.named_modules()
        if hasattr(module, "init_spec")
        for name, init in module.init_spec().items()  # type: ignore[operator]  # the blocks' own method
    }
    return table if all(name in table for name, _ in model.named_parameters()) else None


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Operations of a training step per token: what the model says of itself, else 6 per parameter."""
    if hasattr(model, "flops_per_token"):
        return model.flops_per_token(seq_len)  # type: ignore[operator]  # a method, not a submodule
    return 6.0 * parameter_count(model)
