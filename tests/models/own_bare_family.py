"""A user's family whose modules are plain torch: described, but without what layouts replace."""

from typing import Any

from titan_exp.models.llama import Config, spec
from titan_exp.models.spec.model_spec import ModelSpec

__all__ = ["Config", "block", "model", "spec"]


def block(config: Config, layer: int, backend: Any) -> Any:
    """One layer, of torch's modules with the names of the spec."""
    return _modules(spec(config), layer)


def model(config: Config, *, seq_len: int, backend: Any) -> Any:
    """The whole model."""
    from torch import nn

    whole: Any = nn.Module()
    described = spec(config)
    whole.embedding = nn.Embedding(config.vocab_size, config.dim)
    whole.blocks = nn.ModuleDict({str(layer): _modules(described, layer) for layer in range(config.layers)})
    whole.norm = nn.RMSNorm(config.dim)
    whole.head = nn.Linear(config.dim, config.vocab_size, bias=False)
    whole.forward = lambda tokens, positions=None, documents=None: whole.head(whole.embedding(tokens))
    return whole


def _modules(described: ModelSpec, layer: int) -> Any:
    from torch import nn

    made, description = nn.Module(), described.layers[layer]
    made.attention, made.feed_forward = nn.Module(), nn.Module()
    for linear in description.linears:
        parent, _, name = linear.name.rpartition(".")
        setattr(made.get_submodule(parent), name, nn.Linear(linear.inputs, linear.outputs, bias=False))
    for vector in description.vectors:
        setattr(made, vector.name, nn.RMSNorm(vector.size))
    return made
