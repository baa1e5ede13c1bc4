"""Both sides of the comparison: a clock around their steps, their trainers, and the weights they start from."""

import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench import GIB
from benchmarks.versus.cases import LR, SEQUENCES, Job
from titan_exp.checkpoint.formats.export_weights import write_hf_metadata
from titan_exp.checkpoint.formats.mapping import ExportReader
from titan_exp.checkpoint.formats.open_checkpoint import run_tokenizer
from titan_exp.checkpoint.formats.safetensors import TensorSpec, write_safetensors
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.data.train_loader import TrainLoader
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.tracking.run_folder.run_folder import RunFolder

LOSSES = 5
"""Number of first losses to compare."""
DTYPE = torch.bfloat16
"""Stored dtype: half the bytes to read in every process. Both sides start from the same rounded values."""


class Clock:
    """Records the ends of steps, and keeps losses on the device. Both sides call it at the same places."""

    def __init__(self, warmup: int) -> None:
        self._cuda, self._warmup = torch.cuda.is_available(), warmup
        self._marks: list[Any] = []
        self._losses: list[Any] = []
        self._allocated = self._reserved = 0

    def begin_step(self) -> None:
        """Before the first step, return to the device what building the model and loading weights left cached."""
        if self._cuda and not self._marks:
            torch.cuda.empty_cache()

    def end_step(self, loss: Any) -> None:
        """Record that a step was queued."""
        self._losses.append(loss.detach().clone())
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()
        if len(self._marks) > self._warmup:
            # Read at every step: a trainer's own report may reset the peaks.
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        elif len(self._marks) == self._warmup:
            torch.cuda.reset_peak_memory_stats()

    def result(self, tokens: int) -> dict[str, Any]:
        """Rate and memory (GiB; None on a CPU) of the timed steps of `tokens` tokens, and the first losses."""
        marks = self._marks[self._warmup - 1 :]
        if self._cuda:
            torch.cuda.synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
        else:
            seconds = [end - begin for begin, end in pairwise(marks)]
        return {
            "tokens_per_second": tokens / statistics.median(seconds),
            "steps": len(seconds),
            "allocated": self._allocated / GIB if self._cuda else None,
            "reserved": self._reserved / GIB if self._cuda else None,
            "losses": [float(loss) for loss in self._losses[:LOSSES]],
        }


def weights_folder(job: Job, cache: Path) -> Path:
    """Cache folder of a job's weights, named by model and seed; exists only once complete."""
    run = job.experiment()
    text = json.dumps([dataclasses.asdict(run.model), run.experiment.seed], sort_keys=True, default=str)
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


def ours(job: Job, cache: Path) -> dict[str, Any]:
    """Train as a launched rank does; returns the clock's result. What it compiles or tunes stays in the cache."""
    from titan_exp.trainer import rank_main
    from titan_exp.trainer import trainer as trainer_module

    run, clock = job.experiment(), Clock(job.warmup)
    train_step = trainer_module.train_step

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.begin_step()
        result = train_step(*args, **kwargs)
        clock.end_step(result.metrics["loss"])
        return result

    trainer_module.train_step = timed
    # The place of a run folder: caches lie two levels above it.
    runs = cache / "runs" / run.experiment.name
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as path:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(run))
        folder.add_attempt(world_size=1, hosts=["localhost"])
        rank_main.main(path)
    return clock.result(run.training.global_batch_size * run.training.seq_len)


def peer_options(job: Job, dump: str) -> list[str]:
    """torchtitan's command line for a job."""
    loaded = [
        *("--checkpoint.enable", "--checkpoint.load_only", f"--checkpoint.initial_load_path={job.weights}"),
        *("--checkpoint.initial_load_in_hf", f"--model.hf_assets_path={job.weights}"),
    ]
    case = job.case
    return [
        *("--model.name=versus", "--model.flavor=versus", f"--job.dump_folder={dump}"),
        *(f"--training.seq_len={job.seq_len}", f"--training.local_batch_size={SEQUENCES}", "--training.max_norm=1.0"),
        *(f"--training.steps={job.steps}", "--metrics.log_freq=1000000"),
        *("--optimizer.name=AdamW", f"--optimizer.lr={LR}", "--optimizer.weight_decay=0.1"),
        *("--optimizer.beta1=0.9", "--optimizer.beta2=0.95", "--optimizer.eps=1e-8"),
        # Constant learning rate: no warm-up, and a decay to 100 %.
        *("--lr_scheduler.warmup_steps=0", "--lr_scheduler.min_lr_factor=1.0"),
        *([] if job.weights is None else loaded),
        *([] if "--activation_checkpoint.mode=selective" in case.peer else ["--activation_checkpoint.mode=none"]),
        *case.peer,
    ]


def batches(job: Job) -> Iterator[Any]:
    """Batches of our run, for both trainers."""
    run = job.experiment()
    yield from TrainLoader(
        run.data,
        run.training,
        run.experiment.seed,
        dp_rank=0,
        dp_degree=1,
        micro_batch_size=run.training.global_batch_size,
        pin_memory=torch.cuda.is_available(),
    )


def peer(job: Job) -> dict[str, Any]:
    """Train with torchtitan; returns the clock's result."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    if job.tiny:
        _let_torchtitan_use_the_cpu()
    # torchtitan imports torchft where it finds it, and with it telemetry that a GPU machine need not have.
    sys.modules["torchft"] = None  # type: ignore[assignment]  # found nowhere
    if job.tiny and find_spec("triton") is None:
        _import_kernels_without_triton()
    from torchtitan.config import ConfigManager  # type: ignore[import-not-found]
    from torchtitan.models.moe import MoEArgs  # type: ignore[import-not-found]
    from torchtitan.protocols.train_spec import register_train_spec  # type: ignore[import-not-found]
    from torchtitan.train import Trainer  # type: ignore[import-not-found]

    clock, model = Clock(job.warmup), job.experiment().model
    known = importlib.import_module(f"torchtitan.models.{job.case.peer_family}").get_train_spec()
    arguments = dict(job.case.peer_model, vocab_size=model.vocab_size)
    if "moe_args" in arguments:
        arguments["moe_args"] = MoEArgs(**arguments["moe_args"])
    shape = type(next(iter(known.model_args.values())))(**arguments)

    class Loader:
        """Our batches in torchtitan's format; its state is never saved."""

        def __iter__(self) -> Iterator[Any]:
            return (({"input": batch.tokens}, batch.labels) for batch in batches(job))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Timed(Trainer):
        """torchtitan's trainer with a clock."""

        def forward_backward_step(self, **arguments: Any) -> Any:
            loss = super().forward_backward_step(**arguments)
            self.last_loss = loss.detach()
            return loss

        def train_step(self, data_iterator: Any) -> None:
            clock.begin_step()
            super().train_step(data_iterator)
            clock.end_step(self.last_loss)

    spec = dataclasses.replace(
        known,
        model_args={"versus": shape},
        build_dataloader_fn=lambda **_: Loader(),
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )
    register_train_spec("versus", spec)
    with tempfile.TemporaryDirectory() as dump:
        trainer = Timed(ConfigManager().parse_args(peer_options(job, dump)))
        trainer.train()
        found = clock.result(SEQUENCES * job.seq_len)
        trainer.close()
        torch.distributed.destroy_process_group()
    return found


def _import_kernels_without_triton() -> None:
    """Import torchtitan's kernels, none of which a CPU calls, with a stand-in for triton while they are defined."""
    name, package = "torchtitan.models.moe.kernels", find_spec("torchtitan")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0], "models", "moe", "kernels.py")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    vars(triton).update(jit=lambda function: function, language=language)
    vars(language).update(constexpr=int)
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        kernels = module_from_spec(spec)
        spec.loader.exec_module(kernels)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]
    sys.modules[name] = kernels


def _let_torchtitan_use_the_cpu() -> None:
    """Give torchtitan the functions of a device module and of counts that a CPU lacks, and float8 emulation.

    torchtitan takes a machine without an accelerator for one with CUDA.
    """
    import torch._utils
    from torchao.float8 import Float8LinearConfig

    nothing = types.SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**34),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: nothing
    histc: Any = torch.histc
    torch.histc = lambda ids, **bins: histc(ids.float(), **bins).to(ids.dtype)
    from_recipe_name = Float8LinearConfig.from_recipe_name
    Float8LinearConfig.from_recipe_name = lambda recipe_name: dataclasses.replace(
        from_recipe_name(recipe_name), emulate=True
    )


def run_role(role: str, job: dict[str, Any], cache: str) -> dict[str, Any]:
    """Result of a role in this process."""
    task = Job(**job)
    if role == "weights":
        return {"folder": str(export_weights(task, Path(cache)))}
    return ours(task, Path(cache)) if role == "ours" else peer(task)
