"""Initial state of a run: its newest checkpoint, another run's checkpoint, given weights, or initialized weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_exp.checkpoint.checkpoint_cache import local_copy
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, load_hf_sharded
from titan_exp.checkpoint.load_state import (
    WEIGHTS_ONLY_KEY,
    RestoredState,
    is_training_state,
    load_state,
    read_progress,
)
from titan_exp.config import checkpoint_files
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.identity_keys import differences
from titan_exp.config.schema.typed_config import load_group, to_dict
from titan_exp.config.torch_features import HEAD_SIZES, MERGING, ON_CPU
from titan_exp.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from titan_exp.models.build import build_model, choose_attention_backend
from titan_exp.models.spec.lookup import model_spec, with_key, with_mtp_depth
from titan_exp.models.spec.rope import longest_sequence
from titan_exp.ops.attention.sdpa import runs_here
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import buffer_places, init_buffers, local_shard, materialize_parameters
from titan_exp.parallel.pipeline_runtime import Pipeline, build_pipeline
from titan_exp.rules.checkpoint import model_misfits_of, state_misfits
from titan_exp.rules.weights import from_config, given_weights, noted_changes, require_fit, tokenizer_misfit
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.run import Lineage, ancestors, for_shell, read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.commit import Commit, Training
from titan_exp.trainer.profiling.step_times import cache_of


def log_head(folder: RunFolder) -> None:
    """Log what differs from the defaults, and the lineage of a run that began earlier; called by rank 0."""
    overrides = read_overrides(folder.nondefault)
    if overrides is not None:
        # No command: options of the user's own also need their folder.
        get_logger().info("values that differ from the defaults: %s", " ".join(map(for_shell, overrides)) or "none")
    _log_lineage(folder)


def _log_lineage(folder: RunFolder) -> None:
    for ancestor in ancestors(folder.path):
        get_logger().info("continued from %s", ancestor.lineage)


def _load_parent_state(trainer: Training, lineage: Lineage | None) -> tuple[RestoredState, Lineage]:
    """Load the checkpoint of `checkpoint.continue_from` into the model and the optimizer. `lineage` is an earlier
    start's, whose step is loaded again. Raises UserError if there is no whole checkpoint that fits."""
    experiment, checkpointer, config = trainer.experiment, trainer.checkpointer, trainer.experiment.checkpoint
    assert config.continue_from is not None, "the caller checks"
    runs = Path(experiment.paths.runs).expanduser().absolute()
    cache = cache_of(trainer.folder, experiment.experiment.name)
    location = checkpoint_files.parent_location(config.continue_from, runs)
    # All ranks take rank 0's step: a parent that is still training may save or delete checkpoints meanwhile.
    lineage = checkpointer.from_leader(lineage)
    step = config.continue_step if lineage is None else lineage.step
    if checkpoint_files.is_url(location) and checkpoint_files.step_of(Path(location)) is not None:
        step = None  # the URL points to the checkpoint itself
    local = str(local_copy(location, cache=cache / "remote", step=step or 0))
    path = checkpointer.from_leader(checkpoint_files.parent_checkpoint(local, step))
    given = f"checkpoint.continue_from={config.continue_from}"
    if path is None:
        of_step = "" if step is None else f" of step {step}"
        raise UserError(f"{given}: this run has no complete checkpoint{of_step}")
    progress = checkpointer.read_parent(path)
    saved = progress.get("config") or {}
    found = [*model_misfits_of(saved, config, experiment.model, experiment.data)]
    found += state_misfits(saved, config, experiment.paths, experiment.optimizer, experiment.experiment)
    if found:
        raise UserError("This run cannot continue.", found)
    if progress.get(WEIGHTS_ONLY_KEY):
        raise UserError(
            f"{given}: its checkpoint of step {progress['step']} holds weights only (checkpoint.last=weights). Start a "
            f"new run from them: checkpoint.continue_from=null checkpoint.initial={location}"
        )
    restored = load_state(path, trainer.model.parts, trainer.optimizer, trainer.parts.keeps)
    return restored, Lineage(location, progress["step"], progress["tokens"])


def require_same_function(experiment: Experiment, path: str) -> None:
    """Compare the model and the tokenizer with those of `checkpoint.initial`, and log differences that may be intended.
    `path` is where they are on this machine. Raises UserError if the same weights would compute something else."""
    config, folder = experiment.checkpoint, checkpoint_files.initial_folder(path)
    assert config.initial is not None, "the caller checks"
    if folder is None:
        return  # the load reports it
    given = given_weights(config.initial, folder, experiment.model)
    if given is None:
        with suppress(KeyError):  # a checkpoint of another tool
            given = from_config(config.initial, read_progress(folder)["config"])
    if given is None:
        reason = "nothing beside the weights describes their model, so we compare only names and shapes"
        get_logger().warning("checkpoint.initial: %s", reason)
        return
    exclude, accepted = config.initial_exclude, config.accept_changes
    require_fit(experiment.model, given, exclude, accepted)
    if found := list(tokenizer_misfit(experiment.data, experiment.model, given, exclude=exclude, accepted=accepted)):
        raise UserError("The weights belong to another tokenizer.", found)
    if changes := noted_changes(experiment.model, given, accepted):
        get_logger().info("checkpoint.initial: this run gives the weights another model: %s", changes)


PARTS, ENDED = "parts", "ended"
"""Progress keys: states of parts by name, and the reason for which one has ended training before its last step."""


def restore_state(trainer: Training, commit: Commit) -> None:
    """Load weights, optimizer, data position and progress on all ranks. Raises UserError if that cannot be."""
    step = trainer.checkpointer.latest() if commit.restores else None
    if commit.takes_over():
        trainer.state.built.init_weights()  # they will be replaced by those of a living world
    elif step is not None:
        _continue_own(trainer, step)
    elif trainer.experiment.checkpoint.continue_from is not None:
        _continue_parent(trainer)
    else:
        _load_initial_weights(trainer)


def adopt_progress(trainer: Training, progress: Mapping[str, Any]) -> None:
    """Restore step, tokens and states of parts from a checkpoint or from another world."""
    trainer.step, trainer.tokens = progress["step"], progress["tokens"]
    trainer.ended = progress.get(ENDED)
    # Older checkpoints keep these states beside the step.
    names = {part.name for part in trainer.parts}
    older = {name: state for name, state in progress.items() if name in names}
    trainer.parts.restore(progress.get(PARTS, older), trainer.step)


def _continue_own(trainer: Training, step: int) -> None:
    restored = trainer.checkpointer.load(step, trainer.model.parts, trainer.optimizer, trainer.parts.keeps)
    adopt_progress(trainer, restored.progress)
    if not restored.progress.get(WEIGHTS_ONLY_KEY):
        trainer.loader.load_state_dict(restored.data)
    elif not trainer.is_over:
        raise UserError(
            f"{trainer.checkpointer.folder.path_of(step)} holds weights only (checkpoint.last=weights): training "
            f"cannot continue after step {step}. Start a new run from them: checkpoint.initial={trainer.folder.path}"
        )
    get_logger().info("continuing after step %d", trainer.step)
    _log_changes(trainer, restored.progress.get("config"))


def _continue_parent(trainer: Training) -> None:
    """Begin with the whole state of the run named by `checkpoint.continue_from`."""
    experiment, folder = trainer.experiment, trainer.folder
    restored, lineage = _load_parent_state(trainer, lineage=Lineage.read(folder.path))
    progress = {key: value for key, value in restored.progress.items() if key != ENDED}
    adopt_progress(trainer, {**progress, "step": lineage.step, "tokens": lineage.tokens})
    if trainer.is_over:
        raise UserError(
            f"checkpoint.continue_from={experiment.checkpoint.continue_from}: its checkpoint is of step "
            f"{trainer.step}, and this run ends at step {experiment.training.last_step}. Give more steps "
            "(training.steps, training.stop_after)."
        )
    if experiment.checkpoint.continue_data == "same":
        trainer.loader.load_state_dict(restored.data)
    if torch.distributed.get_rank() == 0:
        lineage.write(folder.path)
        _log_lineage(folder)
    _log_changes(trainer, restored.progress.get("config"))


def _load_initial_weights(trainer: Training) -> None:
    """Load `checkpoint.initial`, if given, and initialize the weights that it lacks."""
    experiment, built = trainer.experiment, trainer.state.built
    config = experiment.checkpoint
    if config.initial is None:
        built.init_weights()
        return
    exclude = config.initial_exclude
    built.init_weights(lambda name: any(fnmatchcase(name, pattern) for pattern in exclude))
    cache = cache_of(trainer.folder, experiment.experiment.name)
    path = str(local_copy(config.initial, cache=cache / "remote"))
    require_same_function(experiment, path)
    folder = checkpoint_files.huggingface_folder(path)
    if folder is None:
        trainer.checkpointer.load_initial_weights(trainer.model.parts, path)
        return
    for part in trainer.model.parts:
        load_hf_sharded(part, experiment.model, folder, exclude, config.accept_changes)
    get_logger().info("weights from %s", folder)


def _log_changes(trainer: Training, saved: Any) -> None:
    if changed := "".join(differences(saved, to_dict(trainer.experiment))):
        get_logger().info("these values have changed since that checkpoint, and the new ones apply:%s", changed)


Rows = Mapping[str, Sequence[slice]]
"""Row ranges that make up a parameter of this rank, by the name of the source parameter."""


def load_source(
    source: OpenCheckpoint,
    device: torch.device,
    *,
    seq_len: int,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    divide: Callable[[nn.Module], Rows] | None = None,
    parts: bool = False,
) -> nn.Module:
    """Build the model of a source and read its weights tensor by tensor, or this rank's shards. `divide` shards the
    model and returns the rows of sharded plain parameters. Modules of multi-token prediction are left out."""
    how: dict[str, Any] = {"documents": documents, "dtype": dtype, "divide": divide, "parts": parts}
    build, read = _building(source, device, seq_len=seq_len, **how)
    with torch.device("meta"):
        model = build()
    read(model)
    return model


def load_pipeline(
    source: OpenCheckpoint,
    layout: ResolvedLayout,
    mesh: Mesh,
    *,
    documents: bool,
    divide: Callable[[nn.Module], Rows],
    parts: bool,
) -> Pipeline:
    """As `load_source`, for this rank's pipeline stages in fp32."""
    how: dict[str, Any] = {"documents": documents, "dtype": torch.float32, "divide": divide, "parts": parts}
    build, read = _building(source, mesh.device, seq_len=layout.training.seq_len, **how)
    with torch.device("meta"):
        whole = build()
    return build_pipeline(whole, build, read, layout, mesh)


def _building(
    source: OpenCheckpoint,
    device: torch.device,
    *,
    seq_len: int,
    documents: bool,
    dtype: torch.dtype,
    divide: Callable[[nn.Module], Rows] | None,
    parts: bool,
) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]:
    """Functions that build the model, and that shard it or a stage of it and read its weights."""
    # The kernels used in training may not run here.
    config = with_key(with_mtp_depth(source.model, 0), "linear_attention_backend", "auto")
    spec = model_spec(source.model)
    trained_with = "auto" if spec is None else spec.attention_backend
    backend = choose_attention_backend(
        config,
        device,
        bf16=dtype == torch.bfloat16,
        seq_len=seq_len,
        documents=documents,
        parts=parts,
        auto=not _runs(trained_with, device, dtype, parts=parts),
    )
    build = partial(build_model, config, seq_len=seq_len, attention_backend=backend)

    @torch.no_grad()
    def read(model: nn.Module) -> None:
        for module in model.modules():
            for parameter in () if getattr(module, "keeps_fp32", False) else module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        rows = {} if divide is None else divide(model)
        init_buffers(buffer_places(model), materialize_parameters(model, device), build, seed=0)
        _read_weights(source, model.eval(), rows)

    return build, read


def _read_weights(source: OpenCheckpoint, model: nn.Module, rows: Rows) -> None:
    for name, tensor in model.state_dict().items():
        if name not in source.parameters.shapes:
            if is_training_state(name):
                continue
            raise UserError(f"{source.path} lacks {name}, a parameter of the model {source.model.name}.")
        if name in rows:
            tensor.copy_(torch.cat([source.parameters.read(name, row_range) for row_range in rows[name]]))
            continue
        part = local_shard(tensor)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local_tensor(tensor).copy_(source.parameters.read(name, *window))


def _runs(backend: str, device: torch.device, dtype: torch.dtype, *, parts: bool = False) -> bool:
    """True if an attention kernel runs on this device with weights of this dtype, and for `parts` of a sequence."""
    if parts and backend not in MERGING:
        return False
    if device.type == "cpu":
        return backend in ON_CPU
    # Kernels with limits of the head size compute in low precision only.
    return runs_here(backend, device) and (dtype != torch.float32 or backend not in HEAD_SIZES)


def tokenizer_of(source: OpenCheckpoint) -> Tokenizer:
    """Tokenizer of a source. Raises UserError if the model reads no tokens, or it has no readable tokenizer."""
    if not source.model.vocab_size:
        raise UserError(f"{source.path}: {source.model.name} reads no tokens, so it is not a language model.")
    if source.tokenizer == "bytes":
        return ByteTokenizer()
    if source.tokenizer is None:
        reason = f"{source.path} has no tokenizer beside its weights"
        raise UserError(f"{reason}. Put its tokenizer.json there, or give a run folder.")
    return HuggingFaceTokenizer(source.tokenizer)


def training_length(path: Path, source: OpenCheckpoint) -> int:
    """Sequence length in tokens of the run that trained the weights; the longest of the model if unknown."""
    for folder in (path, path.parent.parent):
        if source.format == "dcp" and (folder / "config.yaml").is_file():
            return load_group(folder / "config.yaml", "training", imports=()).seq_len
    return longest_sequence(source.model)


def describe(path: Path, source: OpenCheckpoint) -> str:
    """One-line description of a source; for a continued run it includes its ancestors."""
    step = checkpoint_files.step_of(source.path)
    if source.format != "dcp" or step is None:
        return str(source.path)
    run = path if path != source.path else path.parent.parent
    parents = "".join(f", continued from {ancestor.lineage}" for ancestor in ancestors(run))
    averaged = ", averaged weights" if source.averaged else ""
    return f"{source.model.name}{averaged} after step {step} of {run}{parents}"
