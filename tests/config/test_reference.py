"""Texts that `make golden` generates from the docstrings of the config dataclasses: the reference of every key,
docs/reference.md, and the comments in conf/.
"""

import ast
import re
from collections import defaultdict
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.config.conf_files import allowed, default_of, first_here, options, written
from titan_exp.config.errors.user_error import listed
from titan_exp.config.extension import added_groups, added_keys, help_line, provided, source_file
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.component import KINDS, builtin_components, component_config
from titan_exp.config.schema.foreign_code import decay_names, sources
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.config.schema.schema import (
    annotation_of,
    declared_in,
    docstrings,
    example_of,
    hints,
    keys,
    meaning_of,
    texts,
    value_keys,
)
from titan_exp.config.study.ladder import Ladder
from titan_exp.config.study.study import Axis, Halving, Pairs, Range, Search, StudyFile
from titan_exp.optim.lr_schedule import Decays

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
SOURCES = Path(__file__).parents[2] / "titan_exp" / "data" / "sources"
FILES = list(dict.fromkeys(file for option in options() for file in option.files))
HEADING = """\
# Every key

Written by `make golden` from the config dataclasses; do not edit. Defaults are those of `titan-exp train` with no
override; – marks a key that the default configuration does not have.
"""


def _first_line(source: str) -> str:
    added = provided("sources")
    file = source_file(added[source]) if source in added else SOURCES / f"{source}.py"
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    meaning = text.partition("\n")[0].removeprefix(f"Source `{source}`: ")
    return f"{meaning[0].upper()}{meaning[1:]}"


BUILT_IN = {
    "lr_schedule.decay": {name: getattr(Decays, name).__doc__ for name in decay_names()},
    "training.objective": {name: help_line(path) for name, path in provided("objectives").items()},
    "data.source": {name: _first_line(name) for name in sources()},
}
"""Meanings of built-in values that are described in their own modules, by key."""


def reference() -> str:
    default = compose([])
    lines = [HEADING]
    for group, meaning in docstrings(Experiment).items():
        lines += [f"## {group}", "", meaning, "", "| key | default | meaning |", "|---|---|---|"]
        lines += [_row(key, default) for key in value_keys() if key.startswith(f"{group}.")]
        lines.append("")
    lines += ["## Study files", "", "Keys of `sweeps/NAME.yaml`.", "", "| key | meaning |", "|---|---|"]
    places = {"": StudyFile, "axes[1].": Axis, "search.": Search, "search.ranges.KEY.": Range, "halving.": Halving}
    places |= {"pairs.": Pairs, "ladder.": Ladder}
    for place, kind in places.items():
        rows = [(f"`{place}{name}`", f"{text.meaning} E.g. `{text.example}`.") for name, text in texts(kind).items()]
        lines += [f"| {key} | {meaning} |" for key, meaning in rows]
    return "\n".join([*lines, ""])


def _row(key: str, default: Any) -> str:
    value = OmegaConf.select(default, key, default=...)
    shown = "–" if value is ... else f"`{_text(value) or repr('')}`"
    built_in = "".join(f" `{name}`: {meaning}" for name, meaning in BUILT_IN.get(key, {}).items())
    example = f" E.g. `{example_of(key)}`." if example_of(key) else ""
    meaning = f"{_meaning(key, default)}{built_in}{example}".replace("|", r"\|")
    return f"| `{key}` | {shown} | {meaning} |"


def _meaning(key: str, default: Any) -> str:
    """Meaning of a key; of one by which components mean different things with the components, the default first."""
    group = key.partition(".")[0]
    found = defaultdict[str, list[str]](list)
    for name in sorted(
        builtin_components(group) if group in KINDS else (), key=lambda name: name != default[group][KINDS[group].key]
    ):
        kind = component_config(group, name)
        if key in kind_keys(kind, f"{group}."):
            annotation, meaning = declared_in(kind, key)
            found[f"{meaning}{allowed(meaning, annotation)}"].append(name)
    if len(found) < 2:
        return f"{meaning_of(key)}{allowed(meaning_of(key), annotation_of(key))}"
    of_default = default[group][KINDS[group].key] in next(iter(found.values()))
    texts = [f"{listed([f'`{name}`' for name in names], 'and')}: {text}" for text, names in found.items()]
    return " ".join([next(iter(found)), *texts[1:]] if of_default else texts)


def kind_keys(kind: Any, prefix: str) -> set[str]:
    """Dotted keys of a group's class."""
    nested = (kind_keys(inner, f"{prefix}{name}.") for name, inner in hints(kind).items() if is_dataclass(inner))
    return {f"{prefix}{name}" for name in hints(kind)}.union(*nested)


def _text(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)


def test_the_files_of_conf_are_current(golden: Any):
    """A comment above a key is its docstring's first paragraph, and a key with a default is in some option."""
    # Written before the reference, which has the composed defaults.
    for path in FILES:
        golden(path, written(path))


def test_the_reference_is_current(golden: Any):
    golden(REFERENCE, reference())


def test_a_default_is_that_of_new_runs_too():
    """The default of a dataclass is that of older runs, which lack the key; conf/ parts from it on purpose only."""
    parted, added = set(), {key for group in added_groups() for key in added_keys(group)}  # composed with defaults
    for path in FILES:
        values = flatten(read_yaml(path, "an option"))
        for key, (field, *_) in first_here(path, values).items():
            if key not in added and default_of(field) not in (MISSING, values[key]) and "${" not in str(values[key]):
                parted.add(key)
    assert parted == {"smallest_gemm"}


def test_a_default_of_a_recipe_names_the_key_of_its_group_that_it_follows():
    """Else whoever varies one of the two varies the other as well, and does not know."""
    found, silent = set(), []
    for path in FILES:
        group = path.parent.name
        for key, value in flatten(read_yaml(path, "an option")).items() if group in hints(Experiment) else ():
            for followed in re.findall(r"\$\{\.(\w+)\}", str(value)) if group != "model" else ():
                found.add(f"{group}.{key}")
                silent += [f"{path.name}: {key}"] * (f"`{followed}`" not in meaning_of(f"{group}.{key}"))
    assert (silent, found) == ([], {"lr_schedule.decay_steps"})


def test_every_group_and_key_has_a_meaning():
    assert set(docstrings(Experiment)) == set(hints(Experiment))
    assert [key for key in keys() if not meaning_of(key)] == []
    # "Tokens in a sequence. E.g. `training.seq_len=8192`."
    assert [key for key in value_keys() if not re.search(rf"(^|[ +]){re.escape(key)}[=.]", example_of(key))] == []
