"""Built-in names of components; any other name is an import path of user code."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan_exp.config.extension import provided, source_file

LANGUAGE_MODELING = "language_modeling"
"""The core's own `training.objective`."""

TOKENIZERS = ("bytes", "store")
"""Built-in values of `data.tokenizer`; anything else is a path."""

BYTES_VOCABULARY = 257
"""Tokens of the tokenizer `bytes`: 256 byte values and the end of text."""

COMPILE_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")
"""Values of `compile.backend`."""


def objective_names() -> tuple[str, ...]:
    """Values of `training.objective` that are not import paths."""
    return (LANGUAGE_MODELING, *provided("objectives"))


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
    """Keys of `data` that choose its documents, and that a source without them ignores. With `document`, its documents
    are the plain text of its files, each of which is one or is divided."""
    files: str = ""
    """Key of `reads` that holds files, folders and globs of this machine, each of which must match a file."""
    holds: str = "text"
    """`text`, documents to tokenize; `tokens`, those of a store; or samples of a kind that an extension trains on."""
    is_store: bool = False
    """True if its validation split was fixed when a store was made."""
    is_endless: bool = False
    """True if its documents may have no end when they are streamed."""
    has_options: bool = False
    """True if it takes `data.options`: found by itself where its module or class has `Options`, a dataclass of them."""


_HAS_OPTIONS = re.compile(rb"^ *(class Options\b|Options = )", re.MULTILINE)


@cache
def sources() -> dict[str, SourceDescription]:
    """Built-in values of `data.source` and those of extensions, in order, with their descriptions: files of
    `titan_exp/data/sources` and modules of extensions, not imported."""
    found = {}
    files = {path.stem: path for path in (Path(__file__).parents[2] / "data" / "sources").glob("*.py")}
    files |= {name: source_file(module) for name, module in provided("sources").items()}
    for name, path in sorted(files.items()):
        text = path.read_bytes()
        for node in ast.parse(text).body if b"\nDESCRIPTION = " in text else ():
            match node:
                case ast.Assign(targets=[ast.Name("DESCRIPTION")], value=ast.Call() as call):
                    stated = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                    found[name] = SourceDescription(**{"has_options": bool(_HAS_OPTIONS.search(text)), **stated})
    return found


def described(source: str) -> SourceDescription:
    """Description of a source by `data.source`; the defaults for a class of the user's."""
    return sources().get(source, SourceDescription())


@cache
def decay_names() -> tuple[str, ...]:
    """Built-in values of `lr_schedule.decay`: the functions of `Decays` in `optim/lr_schedule.py`, from its source."""
    source = ast.parse((Path(__file__).parents[2] / "optim" / "lr_schedule.py").read_bytes())
    (decays,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Decays")
    return tuple(node.name for node in decays.body if isinstance(node, ast.FunctionDef))
