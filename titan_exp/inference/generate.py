"""Text generation from a checkpoint: the verb, the model on its ranks, and sampling token by token."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.checkpoint_cache import local_copy
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, averaged_where_saved, open_checkpoint
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.checkpoint_files import step_of
from titan_exp.config.command_line.options import parse_options
from titan_exp.config.command_line.verb_options import TEXT_OPTIONS, GenerateOptions
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.extension import load, provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.decoder import Decoder
from titan_exp.models.spec.lookup import has_experts, model_spec
from titan_exp.ops.attention.kv_cache import CachedAttention, LatentCache, RecurrentCache
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.apply import apply_context_parallel
from titan_exp.parallel.expert_parallel import apply_expert_parallel
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.tensor_parallel.styles import apply_tensor_parallel, drop_unused_rows
from titan_exp.rules.mesh import CONTEXT_RULES, DEGREE_RULES, TENSOR_RULES
from titan_exp.rules.rule import find_violations
from titan_exp.tracking.run_folder.run import Run
from titan_exp.trainer.distributed import RunOnRanks, serve
from titan_exp.trainer.restore import Rows, describe, load_source, tokenizer_of, training_length


class DecodeSession:
    """Decoding state of one text; `cache` enables the KV cache. A full window of `window` tokens drops its first half
    and is recomputed, because positions are relative to its start. User-defined models are decoded without a KV
    cache."""

    def __init__(self, model: nn.Module, window: int, *, cache: bool) -> None:
        self._model, self._window = model, window
        self._device = next(model.parameters()).device
        self._caches: list[CachedAttention | LatentCache | RecurrentCache] = []
        if cache and isinstance(model, Decoder):
            self._caches = [_enable_cache(block.get_submodule("attention"), window) for block in model.blocks.values()]
        self._begin = 0

    def reset(self) -> None:
        """Start a new text."""
        self._begin = 0
        for cache in self._caches:
            cache.reset()

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Next-token logits in fp32 [vocab]; `ids` must extend the ids of the previous call."""
        begin = window_start(len(ids), self._window)
        if begin != self._begin:
            self.reset()
            self._begin = begin
        cached = self._caches[0].filled if self._caches else 0
        tokens = torch.tensor([ids[begin + cached :]], device=self._device)
        positions = torch.arange(cached, len(ids) - begin, device=self._device)[None] if cached else None
        logits = self._model(tokens) if positions is None else self._model(tokens, positions)
        return logits[0, -1].float()


def _enable_cache(attention: nn.Module, window: int) -> CachedAttention | LatentCache | RecurrentCache:
    """Cache of an attention module: its own of latents or of a state, or a KV cache around its core."""
    if hasattr(attention, "enable_cache"):
        return attention.enable_cache(window)  # type: ignore[operator]  # a method, not a submodule
    core = attention.get_submodule("core")
    assert isinstance(core, CausalAttention), "no context parallelism in generation"
    attention.core = CachedAttention(core, window)
    return attention.core


def window_start(length: int, window: int) -> int:
    """First token of the window at the end of a text; it advances by half windows."""
    half = max(1, window // 2)
    return 0 if length <= window else -(-(length - window) // half) * half


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # dtypes of weights and compute by option


def load_sharded(source: OpenCheckpoint, *, seq_len: int, dtype: torch.dtype, mesh: Mesh | None) -> nn.Module:
    """Load a source's model for sequences of `seq_len`; all ranks of a `mesh` must call it, None is one device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if mesh is None else mesh.device

    def shard(model: nn.Module) -> Rows:
        assert mesh is not None
        # Decoding feeds one token at a time, so sequence parallelism does not apply.
        apply_tensor_parallel(model, mesh, sequence_parallel=False, loss_parallel=False)
        apply_expert_parallel(model, mesh, sequence_parallel=False)
        apply_context_parallel(model, mesh, "ring")
        return drop_unused_rows(model)

    parts = mesh is not None and mesh.sequence_shard.degree > 1
    divide = None if mesh is None else shard
    return load_source(source, device, seq_len=seq_len, dtype=dtype, divide=divide, parts=parts)


TEXTS = "texts"  # kind of output of models that read tokens


def generate_command(
    arguments: Sequence[str],
    run_on_ranks: RunOnRanks | None = None,
    run_path: Callable[[str, str], str] = lambda name, _: name,
) -> int:
    """Run `titan-exp generate`; returns the exit code. `run_path` maps the name of a run, in a folder of runs, to its
    folder. Raises UserError about an invalid option or missing weights."""
    options = parse_options(GenerateOptions, arguments, positional=["run"])
    prompts = _prompts(options, arguments)
    if options.run:
        path = local_copy(run_path(options.run, options.runs), step=options.step)
    else:
        path = _latest_run(Path(options.runs or "runs").expanduser())
    source = _open(path, options)
    _require_kind(options, source)
    generator = generator_of(source)
    cp: int = getattr(options, "cp", 1)  # an option of generators that divide sequences
    prompts = generator.prepared(source, options, prompts)  # fails before ranks start
    if options.tp * cp == 1:
        lines = generator.lines(path, source, options, prompts, None)
    else:
        assert run_on_ranks is not None, "several ranks need run_on_ranks"
        request = {"path": str(path), "options": dataclasses.asdict(options), "prompts": prompts}
        lines = run_on_ranks(f"{__name__}.rank_main", sharded_experiment(source, options.tp, cp), request)
    step = step_of(source.path)
    early = source.format == "dcp" and step is not None and step < FEW_STEPS and _makes(source) == TEXTS
    noise = ". After so few steps a model writes noise" if early else ""
    print(*lines, f"— {describe(path, source)}{noise}", sep="\n")
    return 0


FEW_STEPS = 100  # steps before which a language model writes noise, however small it is


class Generator(Protocol):
    """Generation by models of one kind, named after their output."""

    options: frozenset[str]  # options that models of other kinds reject
    averaged: bool  # True if averaged weights are read when the checkpoint has them

    def prepared(self, source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str]) -> Sequence[str]:
        """Return the prompts to begin with, before ranks start. Raises UserError if something is missing."""
        ...

    def lines(
        self, path: Path, source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str], mesh: Mesh | None
    ) -> list[str]:
        """Lines to print. All ranks of a `mesh` call it; None means one device."""
        ...


class Texts:
    """Generator of texts, each followed by an empty line."""

    options = TEXT_OPTIONS
    averaged = False

    def prepared(self, source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str]) -> Sequence[str]:
        """Return the prompts unchanged, after checking that the weights have a tokenizer."""
        tokenizer_of(source)
        return prompts

    def lines(
        self, path: Path, source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str], mesh: Mesh | None
    ) -> list[str]:
        """Prompts with their completions."""
        texts = generate(source, options, prompts, window=training_length(path, source), mesh=mesh)
        return [f"{prompt}{text}\n" for prompt, text in zip(prompts, texts, strict=True)]


def generator_of(source: OpenCheckpoint) -> Generator:
    """Generator of a model. Raises UserError if no extension makes its kind of output."""
    makes, known = _makes(source), _generators()
    if makes not in known:
        raise UserError(f"{source.model.name} makes {makes}, and titan-exp generate only makes {listed(known, 'and')}.")
    return known[makes]


def _makes(source: OpenCheckpoint) -> str:
    spec = model_spec(source.model)
    return TEXTS if spec is None or spec.inputs is None else spec.inputs.makes


def _generators() -> dict[str, Generator]:
    return {TEXTS: Texts(), **{makes: load(path)() for makes, path in provided("generators").items()}}


def generate(
    source: OpenCheckpoint, options: GenerateOptions, prompts: Sequence[str], *, window: int, mesh: Mesh | None = None
) -> list[str]:
    """Complete prompts one at a time; returns the completions without their prompts. `window` is the maximum sequence
    length in tokens. All ranks of a tensor-parallel `mesh` must call it; None is one device. Raises UserError if the
    weights have no tokenizer."""
    tokenizer = tokenizer_of(source)
    # Published models expect BOS. Ours are trained on documents separated by EOS, so EOS starts the prompt.
    bos = source.special_tokens.get("bos_token_id")
    first = bos if isinstance(bos, int) else tokenizer.end_of_text
    encoded = [[first, *(int(token) for token in tokenizer.encode(prompt))] for prompt in prompts]
    window = min(window, max(map(len, encoded)) + options.tokens)
    model = load_sharded(source, seq_len=window, dtype=DTYPES[options.dtype], mesh=mesh)
    device = next(model.parameters()).device
    session = DecodeSession(model, window, cache=options.cache)
    eos = source.special_tokens.get("eos_token_id")  # a published model may define several
    stop_tokens = {tokenizer.end_of_text, *(eos if isinstance(eos, list) else [] if eos is None else [eos])}
    texts = []
    for ids in encoded:
        session.reset()
        random = torch.Generator(device).manual_seed(options.seed)
        start = len(ids)
        for _ in range(options.tokens):
            logits = session.next_logits(ids)[: tokenizer.vocab_size]
            token = sample_token(logits, options.temperature, options.top_k, options.top_p, random)
            if mesh is not None:  # logits may differ in their last bits, but all ranks must append the same token
                shared = torch.tensor(token)
                torch.distributed.broadcast(shared, src=0, group=mesh.cpu_group)
                token = int(shared)
            if token in stop_tokens:
                break
            ids.append(token)
        texts.append(tokenizer.decode(ids[start:]))
    return texts


def rank_main(run: Run) -> None:
    """Entry point of one rank."""

    def answer(experiment: Experiment, request: Any, device: torch.device) -> list[str]:
        path, options = Path(request["path"]), GenerateOptions(**request["options"])
        causal = (spec := model_spec(experiment.model)) is None or spec.is_causal
        mesh = build_mesh(experiment.parallelism, device, experts=has_experts(experiment.model), causal=causal)
        source = _open(path, options)
        return generator_of(source).lines(path, source, options, request["prompts"], mesh)

    serve(run, answer)


def sharded_experiment(source: OpenCheckpoint, degree: int, cp: int = 1) -> Experiment:
    """Experiment that shards a checkpoint's model over `degree` tensor-parallel ranks, and its sequences over `cp`
    context-parallel ranks. Raises UserError if the model cannot be sharded, or there are too few GPUs."""
    spec = model_spec(source.model)
    routers = [] if spec is None else [layer.router for layer in spec.layers if layer.router is not None]
    # As many ranks share the experts as can have equally many.
    ep = math.gcd(degree, *(router.moe.experts for router in routers)) if routers else 1
    # Decoding feeds one token at a time, so sequence parallelism does not apply.
    overrides = [f"parallelism.tp={degree}", "parallelism.dp_shard=1", "parallelism.sequence_parallel=false"]
    overrides += [f"parallelism.ep={ep}", f"parallelism.cp={cp}", "compile=none"]
    experiment = dataclasses.replace(to_experiment(compose(overrides)), model=source.model)
    violations = find_violations((*TENSOR_RULES, *CONTEXT_RULES, *DEGREE_RULES), experiment)
    if violations:
        own = []
        for one in violations:
            option = ("cp", cp) if one.field.startswith("parallelism.cp") else ("tp", degree)
            own.append(Violation(*option, one.reason, one.remedy.replace("parallelism.", "")))
        raise UserError(f"We cannot shard this model with tp={degree}" + (f" and cp={cp}." if cp > 1 else "."), own)
    return experiment


def sample_token(logits: Tensor, temperature: float, top_k: int, top_p: float, random: torch.Generator) -> int:
    """Sample a token id from fp32 logits [vocab]. Temperature 0 is greedy, `top_k` 0 keeps all tokens, and `top_p`
    always keeps the most likely one. `random` is on the logits' device."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    if top_k:
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    cumulative = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(cumulative < top_p, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


def _prompts(options: GenerateOptions, arguments: Sequence[str]) -> list[str]:
    prompts = [argument.partition("=")[2] for argument in arguments if argument.startswith("prompt=")]
    if not options.prompts:
        return prompts or [options.prompt]
    try:
        lines = Path(options.prompts).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        problem = "this file is not UTF-8 text"
        if isinstance(error, OSError):
            problem = f"we cannot read this file ({(error.strerror or str(error)).lower()})"
        raise UserError(f"prompts={options.prompts}: {problem}. Give a text file with a prompt a line.") from error
    prompts += [line for line in lines if line]
    if not prompts:
        raise UserError(f"prompts={options.prompts}: every line of this file is empty. Write a prompt a line.")
    return prompts


def _open(path: Path, options: GenerateOptions) -> OpenCheckpoint:
    """Open weights. If the generator prefers averages, take them where the checkpoint has some."""
    source = open_checkpoint(path, options.step, trust=options.trust, averaged=bool(options.averaged))
    prefers = options.averaged is None and generator_of(source).averaged
    return averaged_where_saved(source) if prefers else source


def _require_kind(options: GenerateOptions, source: OpenCheckpoint) -> None:
    own = _makes(source)
    others = {name: kind for kind, found in _generators().items() if kind != own for name in found.options}
    violations = [
        Violation(name, value, f"it is for {others[name]}, and {source.model.name} makes {own}", f"leave {name}= out")
        for field in dataclasses.fields(options)
        if (name := field.name) in others and (value := getattr(options, name)) != field.default
    ]
    if violations:
        raise UserError("These options belong to another kind of model.", violations)


def _latest_run(runs: Path) -> Path:
    found = [
        (checkpoint.stat().st_mtime, checkpoint.parent.parent)
        for checkpoint in runs.glob("*/*/checkpoints/step-*")
        if CheckpointFolder(checkpoint.parent).complete_steps()
    ]
    if not found:
        remedy = "Train one first (titan-exp train), or name a run folder: titan-exp generate path/to/run"
        raise UserError(f"No run under {runs}/ has a checkpoint. {remedy}")
    return max(found)[1]
