"""Checkpoint opening in any format: run, DCP, Hugging Face, diffusers, Meta, torchtune or torch file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from titan_exp.checkpoint.formats import safetensors, torch_file
from titan_exp.checkpoint.formats.mapping import ImportReader, check_tensors, require_size
from titan_exp.checkpoint.load_state import is_training_state
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_writer import find_damage, raise_if_damaged
from titan_exp.config.data_files import tokenizer_path
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_object, table
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.typed_config import load_group
from titan_exp.data.tokenizers import TOKENIZER_FILES, build_tokenizer
from titan_exp.models.convert import hf_config
from titan_exp.models.convert.decoder_state_dict import META
from titan_exp.models.convert.state_dict_map import CheckpointFormat, checkpoint_formats, state_dict_map
from titan_exp.models.spec.lookup import family_violations, model_spec, mtp_depth, with_mtp_depth
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.meta_init import local_shard
from titan_exp.rules.weights import GivenWeights, require_fit

FORMATS = ("bfl", "dcp", "diffusers", "huggingface", "llama", "safetensors", "torch", "torchtune")
"""Readable and writable formats."""

TORCHTUNE_FILE = "model.pt"  # weights file in a torchtune folder, next to `model.json`


@dataclass(frozen=True)
class OpenCheckpoint:
    """Opened checkpoint: weights as titan_exp parameters, model and tokenizer."""

    path: Path
    format: str
    model: ModelConfig
    parameters: safetensors.TensorReader  # reader of titan_exp parameters by full name
    tokenizer: str | None = None  # `bytes`, or the path of a tokenizer.json or of a folder with one; None without one
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # `bos_token_id` and `eos_token_id`, if known
    averaged: bool = False  # True if the weights are a run's averages (`weight_average`)


def open_checkpoint(path: Path, step: int = 0, *, trust: bool = False, averaged: bool = False) -> OpenCheckpoint:
    """Detect a path's format and open it; for a run folder, the checkpoint of `step` (0 is the newest). Raises
    UserError if the path is not a checkpoint, or the checkpoint is incomplete or damaged, or has no `averaged` weights;
    Untrusted if the model is code that a run of another user names, without `trust`."""
    source = _open(path, step, trust)
    if not averaged:
        return source
    found = averaged_where_saved(source)
    if not found.averaged:
        raise UserError(
            f"--averaged: {source.path} has no averaged weights. Runs with weight_average=ema have them in every "
            "checkpoint, runs with weight_average=tail in those of the last weight_average.steps steps."
        )
    return found


def averaged_where_saved(source: OpenCheckpoint) -> OpenCheckpoint:
    """Return the checkpoint with its averaged weights if it has any, else unchanged."""
    if source.format != "dcp":
        return source
    averages = torch_file.DCPTensorReader(source.path, averaged=True)
    return replace(source, parameters=averages, averaged=True) if averages.has_averages else source


def _open(path: Path, step: int, trust: bool) -> OpenCheckpoint:
    if not path.exists():
        raise UserError(f"{path} does not exist. To list runs, type ls -d runs/*/*/")
    if path.is_file():
        return _open_bfl(path) if path.suffix == ".safetensors" else _open_torch_file(path, trust)
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        return _open_dcp(_checkpoint_of_run(path, step), trust)
    if step:
        raise UserError(f"step={step}: only a run folder has several checkpoints, and {path} is not one.")
    if (path / ".metadata").is_file():
        return _open_dcp(path, trust)
    if (path / hf_config.FILE).is_file() and ((path / TORCHTUNE_FILE).is_file() or any(path.glob("*.safetensors"))):
        return _open_described(path, trust)
    if (path / "params.json").is_file() and any(path.glob("consolidated.*.pth")):
        return _open_meta(path, trust)
    if (path / "config.json").is_file():
        is_diffusers = hf_config.DIFFUSERS_CLASS in hf_config.config_json(path)
        return _open_diffusers(path) if is_diffusers else open_huggingface(path)
    raise UserError(f"{path} is not a checkpoint.\n  {_explain_missing(path)}")


def open_huggingface(folder: Path, architecture: str | None = None, *, mtp: bool = True) -> OpenCheckpoint:
    """Open a Hugging Face folder as an architecture; None reads it from config.json. Without `mtp`, its modules of
    multi-token prediction are not read. Raises UserError if the architecture is unknown, or a file is missing or
    damaged."""
    values, prefixes = hf_config.language_model(hf_config.config_json(folder))
    model = _require_supported(hf_config.from_huggingface(values, folder.absolute().name, architecture), folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds config.json and no *.safetensors. Older files (pytorch_model.bin) become safetensors by "
            "loading and saving them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    quantized, store = hf_config.quantized_weights(values), safetensors.SafetensorsReader(folder)
    if quantized == "mxfp4":
        store = safetensors.MXFP4Reader(store)
    elif quantized is not None:
        store = safetensors.BlockFP8Reader(store, quantized)
    elif prefixes:
        pairs = [(name, prefix) for name in store.shapes for prefix in prefixes if name.startswith(prefix)]
        own_names = {prefixes[prefix] + name.removeprefix(prefix): name for name, prefix in pairs}
        store = safetensors.RenamedReader(store, own_names, others=False)
    # Some tied checkpoints also store the head, and old ones a RoPE table.
    unread = hf_config.unread_prefixes(values, architecture)
    # transformers drops the modules' weights but keeps their number in config.json.
    if not mtp or (unread and not any(name.startswith(unread) for name in store.shapes)):
        model = with_mtp_depth(model, 0)
    extra = {name for name in store.shapes if name.endswith("rotary_emb.inv_freq") or name.startswith(unread)}
    parameters, special = _mapped(store, model, "huggingface", folder, extra), hf_config.special_tokens_of(values)
    return OpenCheckpoint(folder, "huggingface", model, parameters, _tokenizer_in(folder), special)


def run_tokenizer(config: DataConfig) -> tuple[str | None, dict[str, Any]]:
    """Tokenizer and special tokens of a run, as in `OpenCheckpoint`; None and empty if the tokenizer is missing."""
    try:
        end = build_tokenizer(config).end_of_text
        return tokenizer_path(config), {"bos_token_id": end, "eos_token_id": end}
    except UserError:
        return None, {}


def _checkpoint_of_run(path: Path, step: int) -> Path:
    checkpoints = CheckpointFolder(path / "checkpoints")
    steps = checkpoints.complete_steps()
    if not steps:
        remedy = "To list runs with one, type ls -d runs/*/*/checkpoints/"
        raise UserError(f"{path} contains no complete checkpoint. {remedy}")
    if step and step not in steps:
        raise UserError(f"step={step}: {path} has checkpoints of steps {', '.join(map(str, steps))}.")
    return checkpoints.path_of(step or steps[-1])


def _open_dcp(path: Path, trust: bool) -> OpenCheckpoint:
    # No collectives: in a job of several ranks, only some may open it.
    raise_if_damaged(path, find_damage(path))
    store = torch_file.DCPTensorReader(path)
    if not store.shapes:
        raise UserError(f"{path} is a DCP checkpoint without a model: no key begins with 'model.'.")
    described, run_config = path / hf_config.FILE, path.parent.parent / "config.yaml"
    if described.is_file():
        model, special = _described_model(path, trust)
        tokenizer = _tokenizer_in(path)
    elif run_config.is_file():
        model = load_group(run_config, "model", trust=trust)
        tokenizer, special = run_tokenizer(load_group(run_config, "data", imports=()))
    else:
        raise UserError(
            f"{path} is a DCP checkpoint outside of a run, without a description of its model: {hf_config.FILE} is "
            "missing. Name the run folder, or the checkpoint in it."
        )
    _check_own_names(model, store, path)
    return OpenCheckpoint(path, "dcp", model, store, tokenizer, special)


def _open_meta(folder: Path, trust: bool) -> OpenCheckpoint:
    # titan_exp's model.json contains more than Meta's params.json.
    known, special = _described_model(folder, trust) if (folder / hf_config.FILE).is_file() else (None, {})
    model, store = torch_file.open_consolidated(folder, known)
    model = _require_supported(model, folder)
    # A head equal to the embedding is tied.
    parameters = _mapped(store, model, "llama", folder, {torch_file.IGNORED, META.parts["head.weight"]})
    return OpenCheckpoint(folder, "llama", model, parameters, _tokenizer_in(folder), special)


def _open_described(folder: Path, trust: bool) -> OpenCheckpoint:
    """Open safetensors with the model's own names, or torchtune's file, beside `model.json`."""
    model, special = _described_model(folder, trust)
    if not (folder / TORCHTUNE_FILE).is_file():
        store = safetensors.SafetensorsReader(folder)
        if "bfl" in checkpoint_formats(model) and {*state_dict_map(model, "bfl").stored_shapes} == {*store.shapes}:
            return OpenCheckpoint(folder, "bfl", model, _mapped(store, model, "bfl", folder, set()))
        return _own_names(folder, "safetensors", model, store, special)
    store = torch_file.TorchFileReader(torch_file.torch_load_safely(folder / TORCHTUNE_FILE))
    parameters = _mapped(store, model, "torchtune", folder, set())
    return OpenCheckpoint(folder, "torchtune", model, parameters, _tokenizer_in(folder), special)


def _open_diffusers(folder: Path) -> OpenCheckpoint:
    model = _require_supported(hf_config.from_diffusers(hf_config.config_json(folder), folder.absolute().name), folder)
    parameters = _mapped(safetensors.SafetensorsReader(folder), model, "diffusers", folder, set())
    return OpenCheckpoint(folder, "diffusers", model, parameters)


def _open_bfl(file: Path) -> OpenCheckpoint:
    store = safetensors.SafetensorsReader(file.parent, file.name)
    model = _require_supported(hf_config.from_bfl(store.shapes, file.stem), file)
    return OpenCheckpoint(file, "bfl", model, _mapped(store, model, "bfl", file, set()))


def _open_torch_file(path: Path, trust: bool) -> OpenCheckpoint:
    if path.name.startswith("consolidated.") and path.with_name("params.json").is_file():
        raise UserError(f"{path} is one file of Meta's Llama. Use its folder: {path.parent}")
    content = torch_file.torch_load_safely(path)
    tensors = content.get("model")
    if not isinstance(tensors, dict) or "config" not in content:
        raise UserError(
            f"{path} is a torch file, but not of titan-exp: it has no 'model' and 'config' (it has "
            f"{', '.join(map(str, list(content)[:4]))}). For Meta's files use the folder with params.json."
        )
    model, special = hf_config.from_json(table(content["config"], f"{path}: config"), path, trust)
    return _own_names(path, "torch", model, torch_file.TorchFileReader(tensors), special)


def _own_names(
    path: Path, form: str, model: ModelConfig, store: safetensors.TensorReader, special: Mapping[str, Any]
) -> OpenCheckpoint:
    _check_own_names(model, store, path)
    return OpenCheckpoint(path, form, model, store, _tokenizer_in(path), special)


def _check_own_names(model: ModelConfig, store: safetensors.TensorReader, path: Path) -> None:
    spec = model_spec(model)
    if spec is not None:
        training = frozenset(name for name in store.shapes if is_training_state(name))
        check_tensors(store.shapes, spec.state_shapes, where=str(path), optional=training)


def _mapped(
    store: safetensors.TensorReader, model: ModelConfig, mapped_format: CheckpointFormat, path: Path, extra: set[str]
) -> ImportReader:
    if mapped_format not in checkpoint_formats(model):
        weights = f"the weights of model.architecture={model.architecture}"
        raise UserError(f"{path}: {weights} have no names in the format {mapped_format}.")
    require_size(model, store.shapes.values(), str(path))
    row_map = state_dict_map(model, mapped_format)
    renamed = {name: own for name, own in row_map.aliases.items() if name not in store.shapes and own in store.shapes}
    store = safetensors.RenamedReader(store, renamed) if renamed else store
    wanted = {name: shape for name, shape in row_map.stored_shapes.items() if name not in row_map.copies}
    check_tensors(store.shapes, wanted, where=str(path), optional=row_map.optional | extra)
    return ImportReader(store, row_map)


def _require_supported(model: ModelConfig, path: Path) -> ModelConfig:
    violations = list(family_violations(model))
    if violations:
        raise UserError(f"titan_exp cannot compute the model in {path}.", violations)
    return model


def _described_model(folder: Path, trust: bool) -> tuple[ModelConfig, Mapping[str, Any]]:
    return hf_config.from_json(read_object(folder / hf_config.FILE), folder / hf_config.FILE, trust)


def _tokenizer_in(folder: Path) -> str | None:
    return str(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


def _explain_missing(path: Path) -> str:
    if any(path.glob("*.safetensors")):
        return "It holds safetensors without config.json, which describes the model."
    if any(path.glob("consolidated.*.pth")):
        return "It holds consolidated.*.pth without params.json."
    if (path / "config.yaml").is_file():
        return "It is a run without a checkpoint."
    if CheckpointFolder(path).complete_steps():
        return f"It holds the checkpoints of a run. Use one of them, or the run: {path.parent}"
    return (
        "Readable are: a run folder, a checkpoints/step-… folder, a folder of Hugging Face or diffusers (config.json "
        "and *.safetensors), Meta's Llama (params.json and consolidated.*.pth), *.safetensors of Black Forest Labs, "
        "and output of convert."
    )


@torch.no_grad()
def load_hf_sharded(
    model: torch.nn.Module, config: ModelConfig, folder: Path, exclude: Sequence[str] = (), accepted: Sequence[str] = ()
) -> None:
    """Load the weights of a Hugging Face folder into a model or a pipeline stage, without communication. The model's
    dtypes may differ from the files'; parameters whose full name matches `exclude` keep their values. Raises UserError
    if the folder cannot be read, or if its model differs from `config`, beyond the `accepted` keys, so that the same
    weights would compute something else."""
    if "huggingface" not in checkpoint_formats(config):
        reason = "has no tensor names in Hugging Face's format"
        raise UserError(f"{folder}: model.architecture={config.architecture} {reason}.")
    source = open_huggingface(folder, config.architecture, mtp=mtp_depth(config) > 0)
    require_fit(config, GivenWeights(str(folder), source.model), exclude, accepted)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in source.parameters.shapes)
    for name, tensor in (*model.named_parameters(), *buffers):
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        part = local_shard(tensor)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local_tensor(tensor).copy_(source.parameters.read(name, *window))
