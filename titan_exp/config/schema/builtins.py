"""Built-in names of components; any other name is an import path of user code."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

OBJECTIVES = ("language_modeling", "rectified_flow")
"""Built-in values of `training.objective`."""

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
def metric_names() -> tuple[str, ...]:
    """Built-in values of `tracking.metrics`: the files of `titan_exp/trainer/module_metrics`."""
    files = (Path(__file__).parents[2] / "trainer" / "module_metrics").glob("*.py")
    return tuple(sorted(file.stem for file in files if file.stem not in ("__init__", "metric")))


@dataclass(frozen=True)
class SourceDescription:
    """Facts about a built-in source, which its module states in literals as `DESCRIPTION`."""

    reads: tuple[str, ...] = ()
    """Keys of `data` that choose its input, and that a source without them ignores."""
    holds: Literal["text", "tokens", "latents"] = "text"
    """Documents to tokenize, tokens of a store, or latents of images with states of their captions."""
    is_store: bool = False
    """True if its validation split was fixed when a store was made."""
    is_endless: bool = False
    """True if its documents may have no end when they are streamed."""


@cache
def sources() -> dict[str, SourceDescription]:
    """Built-in values of `data.source` with their descriptions: files of `titan_exp/data/sources`, not imported."""
    found = {}
    for path in sorted((Path(__file__).parents[2] / "data" / "sources").glob("*.py")):
        text = path.read_bytes()
        for node in ast.parse(text).body if b"\nDESCRIPTION = " in text else ():
            match node:
                case ast.Assign(targets=[ast.Name("DESCRIPTION")], value=ast.Call() as call):
                    stated = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                    found[path.stem] = SourceDescription(**stated)
    return found


@cache
def decay_names() -> tuple[str, ...]:
    """Built-in values of `lr_schedule.decay`: the functions of `Decays` in `optim/lr_schedule.py`, from its source."""
    source = ast.parse((Path(__file__).parents[2] / "optim" / "lr_schedule.py").read_bytes())
    (decays,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Decays")
    return tuple(node.name for node in decays.body if isinstance(node, ast.FunctionDef))
