"""Conversion of a checkpoint, kept apart from the verb's help, which imports no torch."""

import shlex
from collections.abc import Callable
from pathlib import Path

import torch
from rich.filesize import decimal

from titan_exp.checkpoint.checkpoint_cache import local_copy, staged_upload
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.checkpoint_files import is_url
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import ConvertOptions
from titan_exp.config.devices import return_freed_memory
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.nondefault import model_overrides
from titan_exp.config.schema.component import component, is_builtin
from titan_exp.models.convert import hf_config
from titan_exp.models.convert.state_dict_map import checkpoint_formats
from titan_exp.rules.data import tokenizer_file
from titan_exp.tracking.logging import byte_progress

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp32": torch.float32}  # values of `dtype`
OWN_NAMES = ("dcp", "torch")
"""Formats that titan_exp trains from or writes for itself; by default they are converted to other tools' formats."""


def convert_command(options: ConvertOptions, run_path: Callable[[str, str], str]) -> None:
    """Convert a checkpoint; `run_path` maps the name of a run, in a folder of runs, to its folder. Raises UserError
    about an option that does not fit the checkpoint."""
    with staged_upload(options.target) as target:
        if target.exists():
            raise UserError(f"{target} exists. Use another target, or remove it first.")
        if options.model != "auto":
            component("model", options.model)
        path = local_copy(run_path(options.source, options.runs), step=options.step)
        return_freed_memory(2**20)
        source = open_checkpoint(path, options.step, trust=options.trust, averaged=options.averaged)
        if source.format == "huggingface":
            _require_family(options, source.path)
        form = _format(options, source)
        averaged = ", averaged weights" if source.averaged else ""
        print(f"{source.path}: {source.model.name} ({source.format}{averaged})")
        if source.format == "huggingface":
            values = hf_config.config_json(source.path)
            print(*hf_config.repository_lines(values, source.model.name, source.model), sep="\n")
        with byte_progress(f"writing {form}") as progress:
            export = ExportOptions(form, DTYPES[options.dtype], options.file_gb * 1e9, progress)
            written = export_weights(source, target, export)
        if source.tokenizer is None and form != "torch" and source.model.vocab_size:
            print(f"there is no tokenizer beside the weights, so copy its tokenizer.json into {options.target}")
        following = f"titan-exp generate {options.target}" if is_url(options.target) else _next(source, target, form)
    print(f"{options.target}: {form}, {decimal(written)} of weights")
    print(following)
    if options.json:
        found = {"source": str(source.path), "source_format": source.format, "model": source.model.name}
        answer(found | {"target": options.target, "format": form, "bytes": written, "next": following})


def _require_family(options: ConvertOptions, folder: Path) -> None:
    """Raise UserError if only the family that reads any type can read the model, unless `model` names it."""
    values, (name, _) = hf_config.config_json(folder), hf_config.other_family() or ("auto", None)
    if options.model != name and not hf_config.has_family(values):
        command = shlex.join(["titan-exp", "convert", options.source, options.target, f"model={name}"])
        remedy = f"{command} keeps its tensors' names, and converts back."
        raise UserError(f"{folder}: {hf_config.no_family(values)}\n  {remedy}")


def _format(options: ConvertOptions, source: OpenCheckpoint) -> str:
    ends_in_pt = options.target.endswith((".pt", ".pth"))
    if options.format == "auto":
        if ends_in_pt or source.format not in OWN_NAMES:
            return "torch" if ends_in_pt else "dcp"
        formats = checkpoint_formats(source.model)
        if "huggingface" in formats and not hf_config.export_violations(source.model):
            return "huggingface"
        expressible = "diffusers" in formats and not hf_config.diffusers_violations(source.model)
        return "diffusers" if expressible else "safetensors"
    if (options.format == "torch") != ends_in_pt:
        folder = "a folder, whose name does not end in .pt"
        kind = "a file, whose name ends in .pt" if options.format == "torch" else folder
        raise UserError(f"format={options.format} writes {kind}, and the target is {options.target}.")
    return options.format


def _next(source: OpenCheckpoint, target: Path, form: str) -> str:
    tune = f"checkpoint_dir={target}, checkpoint_files="
    loaders = {
        "huggingface": lambda: f"transformers: AutoModelForCausalLM.from_pretrained({str(target)!r})",
        "diffusers": lambda: f"diffusers: {hf_config.diffusers_class(source.model)}.from_pretrained({str(target)!r})",
        "torch": lambda: f"torch: torch.load({str(target)!r}, weights_only=True)['model']",
        "torchtune": lambda: f"torchtune: FullModelTorchTuneCheckpointer, {tune}[model.pt]",
        "llama": lambda: f"torchtune: FullModelMetaCheckpointer, {tune}[consolidated.00.pth]",
    }
    if form in loaders:
        return loaders[form]()
    if form in ("safetensors", "bfl") or not is_builtin("model", source.model.architecture):
        return f"the group model is in {target / 'model.json'}"
    overrides = model_overrides(source.model)
    if tokenizer_file(str(target)).is_file():
        overrides.append(f"data.tokenizer={target}")
    return f"to use it, type {' '.join(overrides)}"
