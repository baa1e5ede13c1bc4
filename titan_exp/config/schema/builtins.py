"""Built-in names of components; any other name is an import path of user code."""

import ast
from functools import cache
from pathlib import Path

OBJECTIVES = ("language_modeling", "rectified_flow")
"""Built-in values of `training.objective`."""

SOURCES = ("python_stdlib", "text", "huggingface", "tokens", "latents", "images")
"""Built-in values of `data.source`."""

STORES = ("tokens", "latents")
"""Values of `data.source` that read stores, whose validation split was fixed when they were made."""

LATENTS = ("latents", "images")
"""Values of `data.source` with latents of images and states of their captions, from a store or encoded in training."""

TOKENIZERS = ("bytes", "store")
"""Built-in values of `data.tokenizer`; anything else is a path."""

BYTES_VOCABULARY = 257
"""Tokens of the tokenizer `bytes`: 256 byte values and the end of text."""

COMPILE_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")
"""Values of `compile.backend`."""


@cache
def executor_names() -> tuple[str, ...]:
    """Built-in values of `cluster.kind`: the folders of `titan_exp/launch` that hold an executor."""
    return tuple(sorted(path.parent.name for path in (Path(__file__).parents[2] / "launch").glob("*/executor.py")))


@cache
def decay_names() -> tuple[str, ...]:
    """Built-in values of `lr_schedule.decay`: the functions of `Decays` in `optim/lr_schedule.py`, from its source."""
    source = ast.parse((Path(__file__).parents[2] / "optim" / "lr_schedule.py").read_bytes())
    (decays,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Decays")
    return tuple(node.name for node in decays.body if isinstance(node, ast.FunctionDef))
