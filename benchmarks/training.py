"""Training benchmarks: losses of numeric recipes, times of optimizers, and the trainer against minimal loops."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench import Output, benchmark, call_words, in_turns, option, resolved, result_of, seconds_of, threads
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.data.batch import Batch
from titan_exp.data.sources.base import build_source
from titan_exp.launch.rank.rank_env import waiting_threads
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.llama import Config
from titan_exp.optim import grad_clip
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer import commit
from titan_exp.trainer import train_step as trainer_step
from titan_exp.trainer import trainer as trainer_module
from titan_exp.trainer.distributed import joined
from titan_exp.trainer.part import Parts
from titan_exp.trainer.parts import acting_parts
from titan_exp.trainer.train_state import assemble

RECIPE_BASE = (
    *("model=llama_debug", "training.seq_len=128", "training.global_batch_size=16", "evaluation.every=0"),
    *("training.mixed_precision=bf16", "tracking.log_every=1", "checkpoint=none", "parallelism.dp_shard=1"),
    *("optimizer.lr=1e-3", "lr_schedule.warmup_steps=20", "lr_schedule.decay_steps=50"),
)
HIGH = "quantization.high_precision_first=1 quantization.high_precision_last=1"
SHORT = ("lr_schedule.warmup_steps=0", "lr_schedule.decay_steps=2")
"""Overrides of a recipe's run at its smallest."""
RECIPES = {
    "bf16": "",
    "bf16, sums in another order": "training.micro_batch_size=4",
    "bf16, sums in a third order": "training.micro_batch_size=2",
    "bf16, another attention kernel": "model.attention_backend=math",
    "fp32": "training.mixed_precision=fp32",
    "float8_tensorwise": "quantization=float8_tensorwise",
    "float8_rowwise": "quantization=float8_rowwise",
    "float8_rowwise_gw_hp": "quantization=float8_rowwise_gw_hp",
    "mxfp8": "quantization=mxfp8",
    "mxfp8, first and last block high": f"quantization=mxfp8 {HIGH}",
    "nvfp4": "quantization=nvfp4",
    "nvfp4, stochastic rounding": "quantization=nvfp4 quantization.stochastic_rounding=true",
    "nvfp4, first and last block high": f"quantization=nvfp4 {HIGH}",
    "moments in bf16": "optimizer.state_precision=bf16",
    "moments in int8": "optimizer.state_precision=int8",
    "moments in fp8": "optimizer.state_precision=fp8",
}
OPTIMIZER_BASE = (
    *("model=llama_laptop", "model.dim=256", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=768"),
    *("training.seq_len=256", "training.global_batch_size=4", "checkpoint=none", "evaluation.every=0"),
    *("parallelism.dp_shard=1", "cluster.device=cpu"),
)
OPTIMIZERS = [
    *("adamw", "adamw optimizer.state_precision=bf16", "adamw optimizer.state_precision=int8"),
    *("sgd", "lion", "schedule_free_adamw lr_schedule=constant", "adafactor"),
    *("muon", "muon optimizer.precision=bf16", "muon optimizer.split_attention=head", "dion", "soap"),
]
WARMUP = 10
"""Untimed steps of a loop."""


@contextmanager
def trainer_of(run: Experiment) -> Iterator[trainer_module.Trainer]:
    """Trainer of one rank in a temporary run folder, ready to run; reports the end of the run."""
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(run))
        folder.add_attempt(world_size=1, hosts=["localhost"])
        with joined(run.cluster) as device:
            trainer = trainer_module.Trainer(run, folder, device)
            trainer.restore()
            yield trainer
            trainer.report.close("done")


@dataclass(frozen=True)
class RecipeOptions:
    steps: int = option(200, "steps of each run", smallest=6)
    only: str = option("", "prefix of cases; the baseline is trained always")
    overrides: tuple[str, ...] = option((), "overrides of every run", smallest=SHORT, positional=True)


@benchmark
def recipes(options: RecipeOptions, out: Output) -> None:
    """Loss of numeric recipes, trained for a few hundred steps from the same weights on the same data.

    Recipes are emulated where the device does not support them, so this measures numerics, not speed. The table
    compares mean losses of the last sixth of the steps. The rows after the baseline, bf16 with other summation orders,
    show the noise level; single steps differ more.
    """
    torch.set_num_threads(threads())
    form = {"loss at the end": ".4f", "− bf16": "+.4f", "largest of a step": ".4f", "s": ".0f"}
    table = out.table({"recipe": ""} | form, f"{options.steps} steps")
    baseline: list[float] = []
    for name, words in RECIPES.items():
        if baseline and not name.startswith(options.only):
            continue
        begin = time.perf_counter()
        run = resolved(*RECIPE_BASE, f"training.steps={options.steps}", *words.split(), *options.overrides)
        with trainer_of(run) as trainer:
            trainer.run()
            losses = [float(row["loss"] or 0) for row in read_metrics(trainer.folder.metrics)]
        end = options.steps * 5 // 6
        less = [mine - theirs for mine, theirs in zip(losses, baseline, strict=True)] if baseline else []
        apart = (mean(less[end:]), max(map(abs, less))) if less else (None, None)
        baseline = baseline or losses
        table.add(name, mean(losses[end:]), *apart, time.perf_counter() - begin)


class OptimizerCase:
    """An optimizer with its own model."""

    def __init__(self, words: list[str]) -> None:
        self.experiment = resolved(*words)
        self._state = assemble(self.experiment, ResolvedLayout.of(self.experiment), torch.device("cpu"))
        self._parts = Parts(acting_parts(self.experiment, self._state))
        self._state.built.init_weights()
        self._state.model.weights.refresh()
        self.parameters = sum(parameter.numel() for parameter in self._state.model.parameters())
        self.updates, self.steps = list[float](), list[float]()
        self._state.optimizer.step = self._timed(self._state.optimizer.step)  # type: ignore[method-assign]

    def step(self, batch: Any) -> None:
        """Train one step and note its times."""
        training, begin = self.experiment.training, time.process_time()
        trainer_step.train_step(
            self._state,
            self._parts,
            [batch],
            step=1 + len(self.steps),
            tokens=[training.global_batch_size * training.seq_len],
            lr=1e-4,
        )
        self.steps.append(time.process_time() - begin)

    def _timed(self, update: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            self.updates.append(seconds_of(update, time.process_time))

        return timed


@dataclass(frozen=True)
class OptimizerOptions:
    rounds: int = option(20, "timed steps of each case", smallest=1)
    overrides: tuple[str, ...] = option((), "overrides of every case", positional=True)


@benchmark
def optimizers(options: OptimizerOptions, out: Output) -> None:
    """CPU time of an optimizer's update, and of a whole step with it, against AdamW's, in a single thread.

    Each round trains every case for one step, on equal batches, so that what else the machine does falls on all. Means
    are over rounds; SOAP's cover its power iterations if rounds are a multiple of `optimizer.precondition_every`.
    """
    torch.set_num_threads(1)
    words, untimed = [*OPTIMIZER_BASE, *options.overrides], 3
    with joined(resolved(*words).cluster):
        cases = {name: OptimizerCase([*words, *f"optimizer={name}".split()]) for name in OPTIMIZERS}
        first = cases[OPTIMIZERS[0]]
        training, vocab = first.experiment.training, first.experiment.model.vocab_size
        size = f"{first.parameters / 1e6:.1f} M parameters, batches of {training.global_batch_size} x"
        form = {"update, ms": ".1f", "fastest, ms": ".1f", "/ AdamW": ".2f", "step, ms": ".0f", "step / AdamW": ".2f"}
        title = f"{size} {training.seq_len} tokens, {options.rounds} rounds"
        table = out.table({"optimizer=": ""} | form, title)

        def batch(number: int) -> Batch:
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(vocab, (training.global_batch_size, training.seq_len), generator=generator)
            return Batch(tokens, tokens, None, None)

        in_turns(
            {name: lambda case=case: case.step(batch(len(case.steps))) for name, case in cases.items()},
            untimed + options.rounds,
        )
    for name, case in cases.items():
        (update, step), (base, whole) = ((mean(it.updates[untimed:]), mean(it.steps[untimed:])) for it in (case, first))
        table.add(name, 1e3 * update, 1e3 * min(case.updates[untimed:]), update / base, 1e3 * step, step / whole)


def experiment(steps: int) -> Experiment:
    """Experiment of every loop."""
    return resolved(f"training.steps={steps}", "evaluation.every=0", "checkpoint.every=50", "cluster.device=cpu")


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
    with trainer_of(run) as trainer:
        for owner, name, activity in (
            # next() looks it up on the class.
            (type(trainer.loader), "__next__", "next batch"),
            (commit, "sync_step_flags", "agree on tokens and stop"),
            (trainer_module, "seed_step", "seed the step"),
            (trainer_step, "global_grad_norm", "gradient norm"),
            (grad_clip, "scale_gradients", "clip"),
            (trainer.report, "end_step", "heartbeat"),
            (trainer.report, "row", "reduce a row"),
            (trainer.report, "write", "log a row"),
            (trainer.checkpointer, "save", "checkpoint: copy the state, start writing"),
            (trainer.checkpointer, "poll", "checkpoint: publish"),
        ):
            account(spent, owner, name, activity)
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
    tokens = (steps - WARMUP) * run.training.global_batch_size * run.training.seq_len
    share = {name: value / seconds for name, value in spent.items()}
    return {"tokens_per_second": tokens / seconds, "share": share}


def account(spent: dict[str, float], owner: Any, name: str, activity: str) -> None:
    """Add the time inside calls of an owner's function to an activity."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        spent[activity] = spent.get(activity, 0.0) + time.perf_counter() - begin
        return result

    setattr(owner, name, call)


@dataclass(frozen=True)
class OverheadOptions:
    steps: int = option(150, f"steps of a loop, {WARMUP} of them untimed", smallest=WARMUP + 2)
    rounds: int = option(2, "processes of each loop", smallest=1)


@benchmark
def trainer_overhead(options: OverheadOptions, out: Output) -> None:
    """Trainer overhead over minimal PyTorch loops with the same model, on this machine's CPU.

    All train the default experiment's model on text of the same size, in turn, each in a fresh process. The minimal
    loops cut random windows out of one array and run forward, backward, clipping and AdamW: `torch` with modules of
    torch alone, `plain` with our modules. Ours adds everything a run does: data order with its state, metrics,
    heartbeat, async checkpoints. Prints the rates, our ratio to each loop, and a breakdown of our additional time;
    clipping is in the plain loop too.
    """
    loops = {
        name: partial(result_of, call_words(loop, steps=options.steps))
        for name, loop in (("torch", torch_alone), ("plain", plain), ("ours", ours))
    }
    # As the launcher sets for its ranks; the minimal loops have torch's defaults.
    loops["ours"] = partial(loops["ours"], **waiting_threads())
    found = in_turns(loops, options.rounds, swap=True)
    rates = {role: [run["tokens_per_second"] for run in runs] for role, runs in found.items()}
    table = out.table({"loop": "", "tokens/s": ",.0f", "ours / it": ".3f", "each": ""}, f"{options.steps} steps")
    for role, values in rates.items():
        ratio = statistics.median(rates["ours"]) / statistics.median(values)
        table.add(role, statistics.median(values), ratio, ", ".join(f"{value:,.0f}" for value in values))
    title = "Share of our wall time outside forward, backward and AdamW"
    table = out.table({"activity": "", "share": ".3%"}, title)
    for name in found["ours"][0]["share"]:
        table.add(name, statistics.median(run["share"][name] for run in found["ours"]))
