"""torchtitan's side: its trainer with a model of the case's shape, our batches, and a clock around its step."""

import dataclasses
import importlib
import os
import socket
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from benchmarks.versus.cases import SEQUENCES
from benchmarks.versus.clock import Clock
from benchmarks.versus.job import LR, Job
from titan_exp.data.train_loader import TrainLoader


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
