"""Comparison with torchtitan 0.2.2 on one GPU: tokens/s, memory and first losses from the same weights.

    python benchmarks/versus_torchtitan.py                     # every case; needs a GPU and torchtitan==0.2.2
    python benchmarks/versus_torchtitan.py --case 8b_bf16_compile --case 1b_bf16_compile
    python benchmarks/versus_torchtitan.py --smoke             # seconds on a CPU, to check the script

Nothing is installed. Both train from the same weights (exported once by ours) on the same tokens in the same order
with the same AdamW and a constant learning rate, alternating (A B B A) in fresh processes. The table compares
the median step after warm-up, timed by device events without synchronization. `--smoke`
replaces torchtitan by a minimal PyTorch loop around our model, labelled as such; its rates are meaningless.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
PEER = "0.2.2"
"""Reference version of torchtitan."""
WARMUP, TIMED = 10, 15
"""Minimum numbers of warm-up and timed steps."""
LOSSES = 5
"""Number of first losses to compare."""
LR = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """Row of the table, for both sides."""

    title: str
    """Label in the table."""
    model: tuple[str, ...] = ()
    """Our model overrides; the weights are exported for torchtitan."""
    peer_model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Equivalent torchtitan model arguments."""
    ours: tuple[str, ...] = ()
    """Our other overrides."""
    peer: tuple[str, ...] = ()
    """torchtitan options."""
    goal: float | None = None
    """Minimum ratio of our tokens/s to torchtitan's."""
    missing: str = ""
    """Reason why this row cannot run yet."""


# torchtitan always applies Llama 3.1 RoPE scaling and never ties the LM head to the embedding.
LLAMA_8B = (
    ("model=llama3_1_8b", "model.layers=8"),
    {"dim": 4096, "n_layers": 8, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
)
LLAMA_1B = (
    ("model=llama3_2_1b", "model.tied_embeddings=false", "model.rope.factor=8"),
    {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
)
COMPILE = (("compile=all",), ("--compile.enable",))


def float8(recipe: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Our and torchtitan's settings of a recipe, compiled; both exclude the LM head."""
    converter = ("--model.converters=quantize.linear.float8", f"--quantize.linear.float8.recipe_name={recipe}")
    named = (*converter, "--quantize.linear.float8.filter_fqns=output")
    return (*COMPILE[0], f"quantization=float8_{recipe}"), (*COMPILE[1], *named)


NO_EXPERTS = "ours has no experts yet"
SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
CASES = {
    "8b_bf16_eager": Case("8B×8 bf16 eager", *LLAMA_8B, goal=1.15),
    "8b_bf16_compile": Case("8B×8 bf16 compile", *LLAMA_8B, *COMPILE, goal=1.10),
    "8b_bf16_selective": Case(
        "8B×8 bf16 compile, selective AC (op)",
        *LLAMA_8B,
        (*COMPILE[0], "activation_checkpoint=selective"),
        (*COMPILE[1], *SELECTIVE),
        goal=1.12,
    ),
    "8b_float8_tensorwise": Case("8B×8 float8 tensorwise, compile", *LLAMA_8B, *float8("tensorwise"), goal=1.18),
    "8b_float8_rowwise": Case("8B×8 float8 rowwise, compile", *LLAMA_8B, *float8("rowwise"), goal=1.20),
    "1b_bf16_compile": Case("1B bf16 compile", *LLAMA_1B, *COMPILE, goal=1.20),
    "1b_bf16_graphs": Case(
        "1B bf16 compile, ours replayed as CUDA graphs",
        *LLAMA_1B,
        (*COMPILE[0], "compile.cuda_graphs=true"),
        COMPILE[1],
    ),
    "qwen3_30b_a3b": Case("Qwen3-30B-A3B ×8 layers, compile", goal=1.4, missing=NO_EXPERTS),
    "deepseek_v2_lite": Case("DeepSeek-V2-Lite-16B ×6 layers, compile", goal=1.4, missing=NO_EXPERTS),
}
SMOKE = {
    "smoke": Case("tiny, fp32, CPU", ("model=llama_debug", "model.layers=2"), ours=("training.mixed_precision=fp32",)),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Task of one fresh process."""

    case: str
    """Key of the case."""
    smoke: bool
    """True to run on a CPU at a tiny size."""
    warmup: int
    """Steps before timing."""
    timed: int
    """Timed steps."""
    weights: str | None
    """Hugging Face folder of the initial weights; None initializes from the seed."""
    tokenizer: str
    """`data.tokenizer` of both sides."""

    @property
    def steps(self) -> int:
        """Warm-up and timed steps."""
        return self.warmup + self.timed

    @property
    def what(self) -> Case:
        """Case of the task."""
        return (SMOKE if self.smoke else CASES)[self.case]

    def overrides(self) -> list[str]:
        """Our full configuration."""
        size = ["training.seq_len=32", "training.global_batch_size=4", "cluster.device=cpu"]
        if not self.smoke:
            size = ["training.seq_len=8192", "training.global_batch_size=2", "training.mixed_precision=bf16"]
        return [
            *self.what.model,
            *size,
            *(f"training.steps={self.steps}", "training.evaluate_every=0", "parallelism.dp_shard=1"),
            *(f"optimizer.lr={LR}", "optimizer.decay_vectors=true", "lr_schedule=constant"),
            *("lr_schedule.warmup_steps=0", f"data.tokenizer={self.tokenizer}", "checkpoint=none"),
            # Only the last row synchronizes, after the last timed step.
            f"tracking.log_every={self.steps}",
            *([] if self.weights is None else [f"checkpoint.initial={self.weights}"]),
            *self.what.ours,
        ]

    def experiment(self) -> Any:
        """Resolved and checked experiment."""
        from titan_exp.config.hydra.compose import compose
        from titan_exp.config.layout.resolved_layout import resolve_layout
        from titan_exp.config.schema.typed_config import to_experiment
        from titan_exp.rules import check

        return check(resolve_layout(to_experiment(compose(self.overrides())), 1))


class Clock:
    """Records the ends of steps without synchronizing, and keeps losses on the device."""

    def __init__(self, warmup: int) -> None:
        self._cuda, self._warmup = torch.cuda.is_available(), warmup
        self._marks: list[Any] = []
        self._losses: list[Any] = []

    def step(self, loss: Any) -> None:
        """Record that a step was queued."""
        self._losses.append(loss.detach().clone())
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def result(self, tokens: int) -> dict[str, Any]:
        """Rate and memory of the timed steps of `tokens` tokens, and the first losses."""
        marks = self._marks[self._warmup - 1 :]
        if self._cuda:
            torch.cuda.synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
            memory = torch.cuda.max_memory_reserved() / 2**30
        else:
            seconds, memory = [end - begin for begin, end in pairwise(marks)], None
        return {
            "tokens_per_second": tokens / statistics.median(seconds),
            "memory": memory,
            "losses": [float(loss) for loss in self._losses[:LOSSES]],
        }


def ours(job: Job) -> dict[str, Any]:
    """Our trainer, with a recorder after each training step."""
    from titan_exp.config.schema.typed_config import to_yaml
    from titan_exp.tracking.run_folder.run_folder import RunFolder
    from titan_exp.trainer import trainer as trainer_module
    from titan_exp.trainer.distributed import joined

    run, clock = job.experiment(), Clock(job.warmup)
    train_step = trainer_module.train_step

    def marked(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        clock.step(result.metrics["loss"])
        return result

    trainer_module.train_step = marked
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(run))
        folder.add_attempt(world_size=1, hosts=["localhost"])
        with joined(run.cluster) as device:
            trainer = trainer_module.Trainer(run, folder, device)
            trainer.restore()
            trainer.run()
            found = clock.result(run.training.global_batch_size * run.training.seq_len)
            trainer.report.close("done")
    return found


def batches(job: Job) -> Iterator[Any]:
    """Batches of our run, for both trainers."""
    from titan_exp.data.train_loader import TrainLoader

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


def stand_in(job: Job) -> dict[str, Any]:
    """Minimal loop around our model, in torchtitan's place for the smoke run."""
    from titan_exp.models.build import build_model, init_specs
    from titan_exp.parallel.meta_init import init_weights, materialize_parameters

    run, clock = job.experiment(), Clock(job.warmup)
    with torch.device("meta"):
        model = build_model(run.model, seq_len=run.training.seq_len, attention_backend="flash")
    materialize_parameters(model, torch.device("cpu"))
    table = init_specs(model)
    assert table is not None
    init_weights(model, table, run.experiment.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _, batch in zip(range(job.steps), batches(job), strict=False):
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)
    return clock.result(run.training.global_batch_size * run.training.seq_len)


def peer_options(job: Job, dump: str) -> list[str]:
    """torchtitan's command line for a case."""
    return [
        *("--model.name=versus", "--model.flavor=versus", f"--job.dump_folder={dump}"),
        *("--training.seq_len=8192", "--training.local_batch_size=2", "--training.max_norm=1.0"),
        *(f"--training.steps={job.steps}", "--metrics.log_freq=1000000"),
        *("--optimizer.name=AdamW", f"--optimizer.lr={LR}", "--optimizer.weight_decay=0.1"),
        *("--optimizer.beta1=0.9", "--optimizer.beta2=0.95", "--optimizer.eps=1e-8"),
        # Constant learning rate: no warm-up, and a decay to 100 %.
        *("--lr_scheduler.warmup_steps=0", "--lr_scheduler.min_lr_factor=1.0"),
        *("--checkpoint.enable", "--checkpoint.load_only", f"--checkpoint.initial_load_path={job.weights}"),
        *("--checkpoint.initial_load_in_hf", f"--model.hf_assets_path={job.weights}"),
        *(() if "--activation_checkpoint.mode=selective" in job.what.peer else ("--activation_checkpoint.mode=none",)),
        *job.what.peer,
    ]


def peer(job: Job) -> dict[str, Any]:
    """torchtitan's trainer with a model of the case's shape, our batches, and a recorder after each step."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(_free_port())
    from torchtitan.config import ConfigManager  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # type: ignore[import-not-found]
    from torchtitan.protocols.train_spec import register_train_spec  # type: ignore[import-not-found]
    from torchtitan.train import Trainer  # type: ignore[import-not-found]

    clock = Clock(job.warmup)
    vocabulary = job.experiment().model.vocab_size
    shape = TransformerModelArgs(**job.what.peer_model, rope_theta=500000, vocab_size=vocabulary)

    class Loader:
        """Our batches in torchtitan's format; its state is never saved."""

        def __iter__(self) -> Iterator[Any]:
            return (({"input": batch.tokens}, batch.labels) for batch in batches(job))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Timed(Trainer):
        """torchtitan's trainer with a recorder."""

        def forward_backward_step(self, **arguments: Any) -> Any:
            self.last_loss = super().forward_backward_step(**arguments)
            return self.last_loss

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            clock.step(self.last_loss)

    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"versus": shape},
        build_dataloader_fn=lambda **_: Loader(),
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )
    register_train_spec("versus", spec)
    with tempfile.TemporaryDirectory() as dump:
        trainer = Timed(ConfigManager().parse_args(peer_options(job, dump)))
        trainer.train()
        found = clock.result(2 * 8192)
        trainer.close()
        torch.distributed.destroy_process_group()
    return found


ROLES = {"ours": ours, "peer": peer, "stand-in": stand_in}


def export_weights(job: Job, folder: Path) -> str:
    """Export our initial weights of a case as a Hugging Face folder for both sides."""
    runs, target = folder / "runs", folder / "weights"
    seed = [*job.overrides(), "checkpoint=sync", "training.steps=0", f"paths.runs={runs}", "experiment.name=seed"]
    kept = [word for word in seed if not word.startswith(("tracking.", "training.steps=", "lr_schedule"))]
    titan_exp = [sys.executable, "-m", "titan_exp"]
    subprocess.run([*titan_exp, "train", *kept, "training.steps=0"], check=True, stdout=sys.stderr)
    (run,) = [path for path in (runs / "seed").iterdir() if (path / "config.yaml").is_file()]
    subprocess.run([*titan_exp, "convert", str(run), str(target), "format=huggingface"], check=True, stdout=sys.stderr)
    shutil.rmtree(runs)
    return str(target)


def what_is_missing() -> list[str]:
    """Missing requirements of the comparison."""
    missing = []
    if importlib.util.find_spec("torchtitan") is None:
        missing.append(
            f"torchtitan is not importable: pip install torchtitan=={PEER}, in an environment with its torch"
        )
    elif (version := importlib.metadata.version("torchtitan")) != PEER:
        missing.append(f"torchtitan is {version}; the goals are about {PEER}, and so are the option names used here")
    if not torch.cuda.is_available():
        missing.append("torch finds no CUDA GPU here")
    return missing


def run_in_turn(job: Job, sides: tuple[str, str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run both sides alternating (A B B A), each in a fresh process."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            words = [sys.executable, str(Path(__file__).resolve()), "--role", side]
            # As our launcher sets for its ranks; torchtitan's launcher does not.
            extra = {"OMP_WAIT_POLICY": "PASSIVE"} if side == "ours" else {}
            print(f"{job.what.title}: {side}, round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            done = subprocess.run(
                [*words, "--job", json.dumps(dataclasses.asdict(job))],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, **extra},
            )
            if done.returncode:
                raise SystemExit(f"{side} failed in {job.what.title}:\n{done.stderr[-4000:]}")
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def row(case: Case, found: dict[str, list[dict[str, Any]]], sides: tuple[str, str]) -> str:
    """Row of the table."""
    them, us = (statistics.median(run["tokens_per_second"] for run in found[side]) for side in sides)
    sizes = [max(run["memory"] or 0.0 for run in found[side]) for side in sides]
    memory = "| – | – | – " if not all(sizes) else f"| {sizes[0]:.1f} | {sizes[1]:.1f} | {sizes[1] / sizes[0]:.2f} "
    pairs = zip(*(found[side][0]["losses"] for side in sides), strict=True)
    apart = max(abs(mine - theirs) for theirs, mine in pairs)
    goal = "–" if case.goal is None else f"≥ {case.goal:.2f}"
    return f"| {case.title} | {them:,.0f} | {us:,.0f} | {us / them:.3f} | {goal} {memory}| {apart:.1e} |"


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("localhost", 0))
        return it.getsockname()[1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny case on the CPU, against a stand-in")
    parser.add_argument("--case", action="append", choices=[*CASES], help="a row of the table; all of them without")
    parser.add_argument("--rounds", type=int, help="turns of each side, 2 without (A B B A)")
    parser.add_argument("--warmup", type=int, default=WARMUP, help=f"steps before timing, at least {WARMUP}")
    parser.add_argument("--steps", type=int, default=TIMED, help=f"timed steps, at least {TIMED}")
    parser.add_argument("--tokenizer", default="bytes", help="data.tokenizer of both sides: bytes, or a file")
    parser.add_argument("--role", choices=[*ROLES], help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = _options()
    if options.role:
        print(json.dumps(ROLES[options.role](Job(**json.loads(options.job)))))
        return 0
    if not options.smoke and (missing := what_is_missing()):
        print("This cannot be compared here:", *(f"  {line}" for line in missing), sep="\n", file=sys.stderr)
        print("--smoke runs a tiny case on the CPU, against a stand-in.", file=sys.stderr)
        return 2
    if not options.smoke and (options.warmup < WARMUP or options.steps < TIMED):
        print(f"--warmup is at least {WARMUP} and --steps at least {TIMED}.", file=sys.stderr)
        return 2
    sides = ("stand-in", "ours") if options.smoke else ("peer", "ours")
    them = "stand-in" if options.smoke else f"torchtitan {PEER}"
    device = (platform.processor() or platform.machine()) if options.smoke else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}")
    if options.smoke:
        print("The stand-in is a plain PyTorch loop around our model, not torchtitan; these rates mean nothing.")
    print(f"\n| case | {them} tokens/s | ours | ratio | goal | {them} GiB | ours | ratio | largest loss difference |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name in SMOKE if options.smoke else options.case or CASES:
        job = Job(name, options.smoke, options.warmup, options.steps, None, options.tokenizer)
        if options.smoke:
            job = dataclasses.replace(job, warmup=2, timed=4)
        if job.what.missing:
            print(f"| {job.what.title} | not run: {job.what.missing} | | | | | | | |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if not options.smoke:
                job = dataclasses.replace(job, weights=export_weights(job, Path(folder)))
            found = run_in_turn(job, sides, options.rounds or (1 if options.smoke else 2))
        print(row(job.what, found, sides), flush=True)
    print(f"\nLosses: of the first {LOSSES} steps. Memory: reserved, at most.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
