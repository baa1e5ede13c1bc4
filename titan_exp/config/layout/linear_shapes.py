"""Choice of linear layers that a quantization recipe takes, by name and shape."""

import re
from fnmatch import fnmatchcase

from titan_exp.config.groups.quantization import QuantizationConfig


def is_quantized(config: QuantizationConfig, layers: int, name: str, inputs: int, outputs: int) -> bool:
    """True if the recipe quantizes a linear layer.

    Args:
        config: recipe and choice, `smallest_gemm` resolved.
        layers: blocks of the whole model.
        name: the projection's name in the whole model.
        inputs: columns of its whole weight.
        outputs: rows of its whole weight.
    """
    assert config.smallest_gemm is not None, "the recipe is not resolved"
    numbered = re.match(r"blocks\.(\d+)\.", name)
    layer = int(numbered[1]) if numbered else None
    return (
        config.recipe != "none"
        and min(inputs, outputs) >= config.smallest_gemm
        and (layer is None or config.high_precision_first <= layer < layers - config.high_precision_last)
        and not any(fnmatchcase(name, pattern) for pattern in config.filter)
    )
