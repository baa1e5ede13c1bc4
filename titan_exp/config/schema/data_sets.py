"""Data sets of a run: sources with their typed options, and the group `data` and metrics of each validation set."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from titan_exp.config.data_files import Manifest, store_names, store_splits, tokenizer_file, tokenizer_path
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import provided, shipped_options
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import described, sources
from titan_exp.config.schema.typed_config import group_of, to_dict, typed_options
from titan_exp.config.secrets import revealed


def source_member(source: str, name: str) -> Any:
    """Member of this name of a source of the core or of an extension: of its module, or else of its class `build`. None
    without such a member, and for a user's own class. Imports the module."""
    if source not in sources():
        return None
    module = import_module(provided("sources").get(source, f"titan_exp.data.sources.{source}"))
    return getattr(module, name, getattr(getattr(module, "build", None), name, None))


def asked(source: str, name: str) -> Any:
    """`source_member` of a source of text; None for others, whose modules may import torch."""
    return source_member(source, name) if described(source).holds == "text" else None


def source_arguments(options: Any, config: DataConfig) -> tuple[Any, ...]:
    """Arguments of a source and of its `open_files`: the group `data`, and its options if it has a dataclass of them.
    Raises UserError if an option does not fit, or the environment lacks a secret."""
    config = revealed(config, "data")
    return (config,) if options is None else (config, typed_options(options, config.options, "data.options"))


def open_files(config: DataConfig) -> Any:
    """Files that a built-in source of text lists, as its `open_files` returns them; None if it lists none. Raises
    UserError if it cannot."""
    find = asked(config.source, "open_files")
    return None if find is None else find(*source_arguments(asked(config.source, "Options"), config))


def corpus_entries(config: DataConfig) -> tuple[str, ...]:
    """Files, folders and globs of this machine that a built-in source of text reads; empty for data elsewhere."""
    key, entries = described(config.source).files, asked(config.source, "local_entries")
    return getattr(config, key) if key else () if entries is None else entries(config)


THE_RUNS = ("tokenizer", "document_mask", "reset_positions", "prefetch", "preview")
"""Keys of the group `data` that a set shares with its run."""
DOCUMENTS = ("source", "paths", "document", "dataset", "subset", "data_files", "split", "validation_split")
DOCUMENTS += ("validation_fraction", "validation_documents")
"""Keys of the group `data` that choose the documents of a validation set."""
WHOLE: dict[str, Any] = {"validation_fraction": 0.0, "validation_split": None, "validation_documents": None}
"""Keys of the group `data` of a set that does not have them: it reads all documents."""
HOLD_TEXT = ("text", "tokens")
"""Kinds of `SourceDescription.holds` whose tokens stand for bytes of text."""
LOSS, BITS = "validation_loss", "validation_bits_per_byte"
OF_THE_RUN = (LOSS, "validation_perplexity", "validation_tokens", BITS)
"""Metrics of the run's own validation set. Stores of a mixture, and further sets, have LOSS and BITS of their own. BITS
lack for stores whose copy of the tokenizer cannot be read."""


def validation_sets(experiment: Experiment) -> dict[str, Experiment]:
    """Experiment of each set by name: the run's, with the set's data and sequence length. Raises UserError if a key of
    a set is unknown, or has a wrong value."""
    sets = {}
    for name, found in experiment.evaluation.sets.items():
        data = _data(experiment, f"evaluation.sets.{name}", found.data)
        length = experiment.training.seq_len if found.seq_len is None else found.seq_len
        training = replace(experiment.training, seq_len=length)
        evaluation = replace(experiment.evaluation, sets={})
        sets[name] = replace(experiment, data=data, training=training, evaluation=evaluation)
    return sets


def validation_metrics(experiment: Experiment) -> list[str] | None:
    """Names of the validation metrics that a run logs; None if only its source knows them. Raises UserError if a set
    cannot be read."""
    sets = validation_sets(experiment)
    if not {described(one.data.source).holds for one in (experiment, *sets.values())} <= {*HOLD_TEXT}:
        return None
    names = [*mixed_stores(experiment.data)]
    for name, one in sets.items():
        names += [name, *(f"{name}/{split}" for split in _splits(one.data))]
    return [*OF_THE_RUN, *(f"{kind}/{name}" for kind in (LOSS, BITS) for name in names)]


def validation_documents(experiment: Experiment, metric: str) -> tuple[str, dict[str, Any]]:
    """Group that chooses the documents of a validation metric, such as `data`, and its keys that do, with the unit of a
    loss: of the set or the store that the metric names, or else of the run. Raises UserError if a set, or its stores,
    cannot be read."""
    kind, _, name = metric.partition("/")
    own, _, part = name.partition("/")
    group, data, sets = "data", experiment.data, validation_sets(experiment)
    chosen: dict[str, Any] = {"paths": mixed_stores(data).get(name, data.paths)}
    if own in sets:
        group, data = f"evaluation.sets.{own}.data", sets[own].data
        store, split = _splits(data).get(part, (None, None))
        chosen = {} if store is None else {"paths": str(store.path), "validation_split": split}
    found = {key: getattr(data, key) for key in DOCUMENTS} | chosen
    if kind != BITS:
        # Digest of the tokenizer's file, of which each store has a copy; else its name.
        file = tokenizer_file(data.tokenizer)
        found["tokenizer"] = sha256(file.read_bytes()).hexdigest() if file.is_file() else data.tokenizer
    return group, found


def mixed_stores(data: DataConfig) -> dict[str, str]:
    """Stores of a mixture by name."""
    mixed = described(data.source).holds == "tokens" and len(data.paths) > 1
    return dict(zip(store_names(data.paths), data.paths, strict=True)) if mixed else {}


def _splits(data: DataConfig) -> dict[str, tuple[Manifest, str]]:
    """Splits that a set on stores reads, if they are several, by name: it reads all documents."""
    found = store_splits(data.paths, all_documents=True) if described(data.source).holds == "tokens" else {}
    return found if len(found) > 1 else {}


def _data(experiment: Experiment, key: str, own: Mapping[str, Any]) -> DataConfig:
    if taken := [name for name in THE_RUNS if name in own]:
        remedy = f"leave it out, and the set has data.{taken[0]} of the run"
        raise _refusal(Violation(f"{key}.data.{taken[0]}", own[taken[0]], "a set has the run's own", remedy))
    values = to_dict(experiment)["data"]
    shared = {name: values[name] for name in THE_RUNS}
    if (source := own.get("source", experiment.data.source)) != experiment.data.source:
        values |= _option(str(source)) | shared
        values["tokenizer"] = "store" if described(str(source)).holds == "tokens" else tokenizer_path(experiment.data)
    elif "paths" in own:
        values["weights"] = []
    try:
        return group_of({"data": {**values, **WHOLE, **own}}, "data", Path(key))
    except UserError as error:
        moved = [replace(one, field=f"{key}.{one.field}") for one in error.violations]
        raise _refusal(*moved) from error


def _option(name: str) -> dict[str, Any]:
    """Keys of the shipped option of a source, with those of the options that it begins with; none of your own."""
    if (file := shipped_options("data").get(name)) is None:
        return {"paths": [], "options": {}}
    values = read_yaml(file, "an option of the group data")
    begins = [one for one in values.pop("defaults", []) if one != "_self_"]
    return {key: value for part in (*map(_option, begins), values) for key, value in part.items()}


def _refusal(*violations: Violation) -> UserError:
    return UserError("Cannot read a validation set.", violations)
