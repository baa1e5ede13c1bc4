"""Trainer overhead over minimal PyTorch loops with the same model, on this machine's CPU.

    python benchmarks/trainer_overhead.py [--steps 150] [--rounds 2]

All train the default experiment's model on text of the same size, in turn, each in a fresh process. The minimal loops
cut random windows out of one array and run forward, backward, clipping and AdamW: `torch` with modules of torch alone,
`plain` with our modules. Ours adds everything a run does: data order with its state, metrics, heartbeat, async
checkpoints. Prints the rates, our ratio to each loop, and a breakdown of our additional time.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.data.sources.base import build_source
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.llama import Config
from titan_exp.optim import grad_clip
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer import commit
from titan_exp.trainer import train_step as trainer_step
from titan_exp.trainer import trainer as trainer_module
from titan_exp.trainer.distributed import joined

WARMUP = 10


def experiment(steps: int) -> Experiment:
    overrides = [f"training.steps={steps}", "training.evaluate_every=0", "checkpoint.every=50", "cluster.device=cpu"]
    return resolve_layout(to_experiment(compose(overrides)), 1)


class Block(nn.Module):
    """Transformer block as one writes it with torch: a linear layer for each projection, complex RoPE, SDPA."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = width = config.dim // config.heads
        self.norms = nn.ModuleList(nn.RMSNorm(config.dim, config.norm_eps) for _ in range(2))
        queries, keys = width * config.heads, width * config.kv_heads
        self.projections = nn.ModuleList(nn.Linear(config.dim, size, bias=False) for size in (queries, keys, keys))
        self.gate, self.up = (nn.Linear(config.dim, config.ffn_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(queries, config.dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """One layer."""
        normed = self.norms[0](x)
        query, key, value = (project(normed).unflatten(-1, (-1, self.width)) for project in self.projections)
        query, key = (
            torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * rope).flatten(-2)
            for heads in (query, key)
        )
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class TorchModel(nn.Module):
    """The default model in modules of torch alone."""

    rope: Tensor

    def __init__(self, config: Config, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        width = config.dim // config.heads
        angles = torch.outer(torch.arange(seq_len), config.rope.theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles)[:, None])
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.head(self.norm(x))


def torch_alone(steps: int) -> dict[str, Any]:
    """Minimal loop with modules of torch; returns its rate over the steps after warm-up."""
    run = experiment(steps)
    assert isinstance(run.model, Config), "the default model"
    return minimal(run, TorchModel(run.model, run.training.seq_len))


def plain(steps: int) -> dict[str, Any]:
    """Minimal loop with our modules; returns its rate over the steps after warm-up."""
    run = experiment(steps)
    training = run.training
    with torch.device("meta"):
        model = build_model(run.model, seq_len=training.seq_len, attention_backend="flash")
    materialize_parameters(model, torch.device("cpu"))
    table = init_specs(model)
    assert table is not None
    init_weights(model, table, run.experiment.seed)
    return minimal(run, model)


def minimal(run: Experiment, model: nn.Module) -> dict[str, Any]:
    """Minimal loop; returns its rate over the steps after warm-up."""
    training, steps = run.training, run.training.steps
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    source = build_source(run.data)
    text = "".join(source[index] for index in range(100)).encode()  # type: ignore[index]  # a random-access source
    corpus = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    random = torch.Generator().manual_seed(0)
    started = 0.0
    for step in range(steps):
        if step == WARMUP:
            started = time.perf_counter()
        places = torch.randint(len(corpus) - training.seq_len - 1, (training.global_batch_size,), generator=random)
        windows = torch.stack([corpus[place : place + training.seq_len + 1] for place in places.tolist()])
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss.item()
    seconds = time.perf_counter() - started
    return {"tokens_per_second": (steps - WARMUP) * training.global_batch_size * training.seq_len / seconds}


def ours(steps: int) -> dict[str, Any]:
    """Trainer; returns its rate over the same steps, and seconds by activity."""
    spent: dict[str, float] = {}
    started = 0.0
    run = experiment(steps)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(run))
        folder.add_attempt(world_size=1, hosts=["localhost"])
        with joined(run.cluster) as device:
            trainer = trainer_module.Trainer(run, folder, device)
            trainer.restore()
            timed = _Timed(spent)
            timed.method(trainer.loader, "__next__", "next batch")
            timed.function(commit, "sync_step_flags", "agree on tokens and stop")
            timed.function(trainer_module, "seed_step", "seed the step")
            timed.function(trainer_step, "global_grad_norm", "gradient norm")
            timed.function(grad_clip, "scale_gradients", "clip")
            timed.method(trainer.report, "end_step", "heartbeat")
            timed.method(trainer.report, "row", "reduce a row")
            timed.method(trainer.report, "write", "log a row")
            timed.method(trainer.checkpointer, "save", "checkpoint: copy the state, start writing")
            timed.method(trainer.checkpointer, "poll", "checkpoint: publish")
            one_step = trainer._one_step

            def step() -> bool:
                nonlocal started
                if trainer.step == WARMUP:
                    started = time.perf_counter()
                    spent.clear()
                return one_step()

            trainer._one_step = step
            trainer.run()
            seconds = time.perf_counter() - started
            trainer.report.close("done")
    tokens = (steps - WARMUP) * run.training.global_batch_size * run.training.seq_len
    share = {name: value / seconds for name, value in spent.items()}
    return {"tokens_per_second": tokens / seconds, "share": share}


class _Timed:
    """Adds the time inside calls to an account."""

    def __init__(self, spent: dict[str, float]) -> None:
        self.spent = spent

    def method(self, owner: Any, name: str, account: str) -> None:
        if name == "__next__":
            # Looked up on the class by next().
            self.function(type(owner), name, account)
        else:
            self.function(owner, name, account)

    def function(self, owner: Any, name: str, account: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._account(account):
                return original(*args, **kwargs)

        setattr(owner, name, call)

    @contextmanager
    def _account(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started


ROLES: dict[str, Callable[[int], dict[str, Any]]] = {"torch": torch_alone, "plain": plain, "ours": ours}
"""Loops by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(ROLES[options.role](options.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {role: [] for role in ROLES}
    for turn in range(options.rounds):
        for role in list(ROLES)[:: 1 if turn % 2 == 0 else -1]:
            command = [sys.executable, str(Path(__file__)), "--role", role, "--steps", str(options.steps)]
            # As the launcher sets for its ranks; the minimal loop has torch's defaults.
            extra = {"OMP_WAIT_POLICY": "PASSIVE"} if role == "ours" else {}
            environment = {**os.environ, **extra}
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            found[role].append(json.loads(output.splitlines()[-1]))
    rates = {role: [run["tokens_per_second"] for run in runs] for role, runs in found.items()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    for role, values in rates.items():
        print(f"{role:6} {statistics.median(values):8,.0f} tokens/s   ({', '.join(f'{v:,.0f}' for v in values)})")
    for role in ("torch", "plain"):
        print(f"ratio to {role:6} {statistics.median(rates['ours']) / statistics.median(rates[role]):8.3f}")
    print("\nshare of our wall time outside forward, backward and AdamW (clipping is in the plain loop too):")
    for name in found["ours"][0]["share"]:
        print(f"  {statistics.median(run['share'][name] for run in found['ours']):7.3%}  {name}")


if __name__ == "__main__":
    main()
