"""Rows of the comparison: cases of both sides, torchtitan's measured values, options of ours, a process's job."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench import resolved

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment

PEER = "0.2.2"
"""Reference version of torchtitan."""
SEQ_LEN, SEQUENCES = 8192, 2
"""Tokens of a sequence, and sequences of a step."""
TINY_SEQ_LEN = 64
"""Tokens of a sequence of a tiny run."""
LR = 1e-4
"""Constant learning rate of both sides."""
SIDES = ("peer", "ours")
"""Both sides of a row, in the order of its first round."""
MEMORY_GOAL = 0.85
"""Maximum ratio of our reserved memory to torchtitan's."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Row of the table, for both sides."""

    title: str
    """Label in the table."""
    model: tuple[str, ...]
    """Our model overrides."""
    peer_model: dict[str, Any]
    """Equivalent torchtitan model arguments, less the vocabulary; `moe_args` are those of experts."""
    ours: tuple[str, ...] = ()
    """Our other overrides."""
    peer: tuple[str, ...] = ()
    """torchtitan options."""
    goal: float | None = None
    """Minimum ratio of our tokens/s to torchtitan's."""
    peer_speed: float | None = None
    """torchtitan's tokens/s on one H200 with torch 2.11.0+cu130 (2026-11-20)."""
    peer_memory: float | None = None
    """torchtitan's reserved GiB in that run."""
    peer_family: str = "llama3"
    """Module of `torchtitan.models` whose model it is."""


ROPE = {"rope_theta": 500000}
# torchtitan always applies Llama 3.1 RoPE scaling and never ties the LM head to the embedding.
LLAMA_8B = (
    ("model=llama3_1_8b", "model.layers=8"),
    {"dim": 4096, "n_layers": 8, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024} | ROPE,
)
LLAMA_1B = (
    ("model=llama3_2_1b", "model.tied_embeddings=false", "model.rope.factor=8"),
    {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5, "multiple_of": 256} | ROPE,
)
EXPERTS = {
    "num_experts": 128,
    "num_shared_experts": 0,
    "top_k": 8,
    "score_func": "softmax",
    "route_norm": True,
    "score_before_experts": False,
    "load_balance_coeff": None,
}
# Layers that leave room for fp32 weights, gradients and optimizer state on one GPU. Neither side balances load, since
# torchtitan has no balance loss.
UNBALANCED = ("model.moe.balance.coefficient=0", "model.moe.balance.z_loss=0")
QWEN3_MOE = (
    ("model=qwen3_30b_a3b", "model.layers=6", "model.moe.balance.loss=none", *UNBALANCED),
    {"dim": 2048, "n_layers": 6, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128, "rope_theta": 1000000}
    | {"moe_enabled": True, "moe_inter_dim": 768, "moe_args": EXPERTS},
)
COMPILE = (("compile=all",), ("--compile.enable",))
SELECTIVE = (
    ("activation_checkpoint=selective",),
    ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
)


def _float8(recipe: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Our and torchtitan's settings of a recipe, compiled; both exclude the LM head."""
    converter = ("--model.converters=quantize.linear.float8", f"--quantize.linear.float8.recipe_name={recipe}")
    named = (*converter, "--quantize.linear.float8.filter_fqns=output")
    return (*COMPILE[0], f"quantization=float8_{recipe}"), (*COMPILE[1], *named)


CASES = {
    "8b_bf16_compile": Case("8B×8 bf16 compile", *LLAMA_8B, *COMPILE, goal=1.10, peer_speed=35600, peer_memory=62.1),
    "8b_float8_tensorwise": Case(
        "8B×8 float8 tensorwise, compile",
        *LLAMA_8B,
        *_float8("tensorwise"),
        goal=1.18,
        peer_speed=45000,
        peer_memory=54.3,
    ),
    # The mode for debugging: no goal of speed.
    "8b_bf16_eager": Case("8B×8 bf16 eager", *LLAMA_8B, ("compile=none",), peer_speed=32140, peer_memory=89.2),
    "8b_float8_rowwise": Case(
        "8B×8 float8 rowwise, compile", *LLAMA_8B, *_float8("rowwise"), goal=1.20, peer_speed=40950, peer_memory=53.9
    ),
    "8b_bf16_selective": Case(
        "8B×8 bf16 compile, selective AC (op)",
        *LLAMA_8B,
        (*COMPILE[0], *SELECTIVE[0]),
        (*COMPILE[1], *SELECTIVE[1]),
        goal=1.12,
        peer_speed=32850,
        peer_memory=49.6,
    ),
    "1b_bf16_compile": Case("1B bf16 compile", *LLAMA_1B, *COMPILE, goal=1.20, peer_speed=52400, peer_memory=46.8),
    "30b_a3b_bf16_compile": Case("30B-A3B×6 bf16 compile", *QWEN3_MOE, *COMPILE, goal=1.40, peer_family="qwen3"),
}
"""Rows by name, the most important first; the last has experts and was never measured."""

OPTIONS = (
    "8b_bf16_compile+compile.cuda_graphs=true",
    "1b_bf16_compile+compile.cuda_graphs=true",
    "8b_bf16_compile+optimizer.implementation=fused",
    "8b_bf16_compile+optimizer.implementation=triton",
    "8b_bf16_compile+training.loss_chunk_tokens=2048",
    "8b_bf16_compile+activation_checkpoint=full",
    "8b_float8_tensorwise+quantization.fused_casts=true",
    "8b_float8_tensorwise+quantization.precomputed_scales=true",
    "8b_float8_rowwise+quantization.fused_casts=true",
    "8b_float8_rowwise+quantization.recipe=float8_rowwise_gw_hp",
)
"""Rows of single options of ours, as a case and overrides; torchtitan's side is the case's."""


def case_of(row: str) -> Case:
    """Case of a row, `CASE` or `CASE+OVERRIDE+...`, with the overrides on our side.

    Raises ValueError about an unknown case.
    """
    name, *overrides = row.split("+")
    if name not in CASES:
        raise ValueError(f"--rows {row}: unknown row. Rows are all, options, {', '.join(CASES)}, or CASE+OVERRIDE")
    case = CASES[name]
    return dataclasses.replace(
        case,
        title=", ".join([case.title, *overrides]),
        ours=(*case.ours, *overrides),
        goal=None if overrides else case.goal,
    )


def rows_named(words: str) -> list[str]:
    """Rows of a comma-separated list, in which `all` is every case and `options` are those of `OPTIONS`.

    Raises ValueError about an unknown row.
    """
    groups = {"all": list(CASES), "options": list(OPTIONS)}
    rows = [row for word in words.split(",") for row in groups.get(word, [word])]
    for row in rows:
        case_of(row)
    return list(dict.fromkeys(rows))


TINY = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 512}
"""Our sizes of every tiny case."""


def tiny(case: Case) -> Case:
    """Case at tiny shapes in fp32 for a CPU: two layers, and graphs traced but not compiled to kernels."""
    sizes, shape = dict[str, int](TINY), {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    if case.peer_family == "llama3":
        sizes["ffn_dim"], peer_model = 256, {**case.peer_model, **shape, "multiple_of": 64}
    else:
        sizes |= {"moe.experts": 8, "moe.active_experts": 2, "moe.ffn_dim": 64}
        # torch's grouped product takes bf16 only there.
        experts = {**EXPERTS, "num_experts": 8, "top_k": 2, "use_grouped_mm": False}
        peer_model = {**case.peer_model, **shape, "head_dim": 16, "moe_inter_dim": 64, "moe_args": experts}
    kept = [word for word in case.model if not word.startswith("model.layers=")]
    compiled, float8 = "compile=all" in case.ours, any("float8" in word for word in case.ours)
    # torchtitan emulates float8 only without a compiler, and its loop over experts reads their counts on the host.
    plain = float8 or case.peer_family != "llama3"
    peer = [word for word in case.peer if not (plain and word == "--compile.enable")]
    backend = ["--compile.backend=aot_eager"] if "--compile.enable" in peer else []
    emulation = ["--quantize.linear.float8.emulate"] if float8 else []
    return dataclasses.replace(
        case,
        model=(*kept, *(f"model.{key}={value}" for key, value in sizes.items())),
        peer_model=peer_model,
        ours=(*case.ours, "training.mixed_precision=fp32", *(["compile.backend=aot_eager"] if compiled else [])),
        peer=(*peer, *backend, *emulation, "--training.mixed_precision_param=float32"),
        goal=None,
        peer_speed=None,
        peer_memory=None,
    )


def sides_of(row: str) -> tuple[str, ...]:
    """Sides of a row; an option of ours has no side of torchtitan's."""
    return SIDES[1:] if "+" in row else SIDES


@dataclasses.dataclass(frozen=True)
class Job:
    """Task of one fresh process."""

    row: str
    """Row of the table, as in `case_of`."""
    warmup: int
    """Steps before timing."""
    timed: int
    """Timed steps."""
    tiny: bool = False
    """True for tiny shapes on a CPU."""
    layers: int | None = None
    """Number of layers in place of the case's; blocks share a graph, so one layer fills the compile caches."""
    weights: str | None = None
    """Hugging Face folder of the initial weights; None draws them."""
    tokenizer: str = "bytes"
    """`data.tokenizer` of both sides."""

    @property
    def steps(self) -> int:
        """Warm-up and timed steps."""
        return self.warmup + self.timed

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return TINY_SEQ_LEN if self.tiny else SEQ_LEN

    @property
    def case(self) -> Case:
        """Case of the row at this job's size."""
        case = tiny(case_of(self.row)) if self.tiny else case_of(self.row)
        if self.layers is None:
            return case
        return dataclasses.replace(
            case,
            model=(*case.model, f"model.layers={self.layers}"),
            peer_model={**case.peer_model, "n_layers": self.layers},
        )

    def overrides(self) -> list[str]:
        """Our full configuration."""
        return [
            *self.case.model,
            *(["cluster.device=cpu"] if self.tiny else ["training.mixed_precision=bf16"]),
            *(f"training.seq_len={self.seq_len}", f"training.global_batch_size={SEQUENCES}"),
            *(f"training.steps={self.steps}", "evaluation.every=0", "parallelism.dp_shard=1"),
            *(f"optimizer.lr={LR}", "optimizer.decay_vectors=true", "lr_schedule=constant"),
            *("lr_schedule.warmup_steps=0", f"data.tokenizer={self.tokenizer}", "checkpoint=none"),
            # Only the last row synchronizes, after the last timed step.
            f"tracking.log_every={self.steps}",
            *([] if self.weights is None else [f"checkpoint.initial={self.weights}"]),
            *self.case.ours,
        ]

    def experiment(self, *cluster: str) -> "Experiment":
        """Resolved and checked experiment; `cluster` are overrides that come first."""
        return resolved(*cluster, *self.overrides())


def read_planned(path: Path | None) -> dict[str, float]:
    """Planned reserved GiB by row, as `--plan` writes them; empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def too_large(rows: Sequence[str], gib: float, planned: Mapping[str, float]) -> dict[tuple[str, str], str]:
    """Rows and sides that are known to need more than `gib`, with a sentence about each."""
    found = {}
    for row in rows:
        ours, theirs = planned.get(row, 0.0), case_of(row).peer_memory or 0.0
        if ours > gib:
            found[row, "ours"] = f"Not run: {row}, ours: it is planned at {ours:.1f} GiB, of {gib:.1f} here."
        if "peer" in sides_of(row) and theirs > gib:
            text = f"it reserved {theirs:.1f} GiB on an H200, of {gib:.1f} here"
            found[row, "peer"] = f"Not run: {row}, torchtitan: {text}."
    return found
