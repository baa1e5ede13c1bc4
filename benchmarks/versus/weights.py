"""Cached initial weights of a case, as a Hugging Face folder that both sides load."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.versus.job import Job
from titan_exp.checkpoint.formats.export_weights import write_hf_metadata
from titan_exp.checkpoint.formats.mapping import ExportReader
from titan_exp.checkpoint.formats.open_checkpoint import run_tokenizer
from titan_exp.checkpoint.formats.safetensors import TensorSpec, write_safetensors
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.parallel.meta_init import init_weights, materialize_parameters

DTYPE = torch.bfloat16
"""Stored dtype: half the bytes to read in every process. Both sides start from the same rounded values."""


def weights_folder(job: Job, cache: Path) -> Path:
    """Cache folder of a job's weights, named by model and seed; exists only once complete."""
    run = job.experiment()
    text = json.dumps([asdict(run.model), run.experiment.seed], sort_keys=True, default=str)
    return cache / f"{run.model.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def export_weights(job: Job, cache: Path) -> Path:
    """Draw the initial weights of our configuration on the fastest device, and write them unless they are cached."""
    run, target = job.experiment(), weights_folder(job, cache)
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = build_model(run.model, seq_len=run.training.seq_len, attention_backend="flash")
    table = init_specs(model)
    assert table is not None, "the model declares its initial weights"
    device = "cpu" if job.tiny or not torch.cuda.is_available() else "cuda"
    materialize_parameters(model, torch.device(device))
    init_weights(model, table, run.experiment.seed)
    row_map = state_dict_map(run.model, "huggingface")
    reader = ExportReader(_Parameters(dict(model.named_parameters())), row_map)
    partial = Path(tempfile.mkdtemp(dir=cache, prefix=f".{target.name}."))
    try:
        write_hf_metadata(partial, run.model, DTYPE, *run_tokenizer(run.data))
        specs = [TensorSpec(name, tuple(shape), DTYPE) for name, shape in row_map.stored_shapes.items()]
        write_safetensors(
            partial, specs, lambda spec, *window: reader.read(spec.name, *window).to(DTYPE), file_bytes=5e9
        )
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


class _Parameters:
    """Parameters of a model in memory, read as from a checkpoint."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a parameter."""
        return self._parameters[name].dtype

    def read(self, name: str, *window: slice) -> Tensor:
        """Slice of a parameter, on the CPU."""
        return self._parameters[name].detach()[window].cpu()
