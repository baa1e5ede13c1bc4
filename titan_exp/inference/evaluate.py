"""Evaluation: loss of a checkpoint on any data, in any layout."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from torch import nn

from titan_exp.checkpoint.checkpoint_cache import local_copy
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.command_line.options import take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.command_line.verb_options import EvaluateOptions
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, in_quotes, listed
from titan_exp.config.extension import extensions, load, provided, shipped_options
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.axes import ONE_DEVICE
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import objective_names
from titan_exp.config.schema.schema import value_keys
from titan_exp.config.schema.typed_config import read_values, to_dict, to_experiment
from titan_exp.data.batch import Batch
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.inference import USAGE
from titan_exp.models.spec.lookup import family_violations, has_experts, model_spec
from titan_exp.models.spec.rope import ROPE, exceeds_context, longest_sequence
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.context_parallel.load_balance import sequence_cuts
from titan_exp.parallel.fsdp import uses_fsdp
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.meta_init import computes_loss
from titan_exp.parallel.tensor_parallel.styles import vocab_shard
from titan_exp.rules.data import DATA_RULES
from titan_exp.rules.mesh import CONTEXT_RULES, DEGREE_RULES, TENSOR_RULES
from titan_exp.rules.pipeline_parallel import PIPELINE_RULES
from titan_exp.rules.rule import find_violations
from titan_exp.tracking.run_folder.run import Run
from titan_exp.trainer.distributed import RunOnRanks, joined_process_group, serve
from titan_exp.trainer.forward_backward import EagerModel, Model, PipelineModel
from titan_exp.trainer.objective import LanguageModeling, build_objective
from titan_exp.trainer.restore import Rows, describe, load_pipeline, load_source
from titan_exp.trainer.updates import ValidationResult, evaluate_sources, evaluate_split

TAKEN = ("data.", "training.", "model.attention", "model.context", f"{ROPE}.", "parallelism.")
"""Keys that an evaluation accepts."""
_REFUSED = "We cannot evaluate this."
DEFAULT_BATCH = 8  # sequences per batch if `training.micro_batch_size` is not given


def evaluate_command(
    arguments: Sequence[str],
    run_on_ranks: RunOnRanks | None = None,
    run_path: Callable[[str, str], str] = lambda name, _: name,
) -> int:
    """Run `titan-exp evaluate`; returns the exit code. `run_path` maps the name of a run, in a folder of runs, to its
    folder. Raises UserError about invalid overrides, weights or data."""
    flags = [f"--{name}" for name in provided("observations")]
    options, rest = take_options(EvaluateOptions, arguments, others=flags)
    asked = [flag[2:] for flag in flags if flag in rest or f"{flag[2:]}=true" in rest]
    rest = [word for word in rest if f"--{word.removeprefix('--').partition('=')[0]}" not in flags]
    # A study's run has an = in its label.
    paths = [word for word in rest if "=" not in word or "/" in word.partition("=")[0]]
    overrides = [word for word in rest if word not in paths]
    if len(paths) != 1:
        raise UserError(USAGE)
    path = local_copy(run_path(paths[0], options.runs), step=options.step)
    source = open_checkpoint(path, options.step, trust=options.trust, averaged=options.averaged)
    all_documents = options.split == "all"
    experiment = evaluation_experiment(path, source, overrides, all_documents, options.trust)
    observed = observations(asked)
    for observation in observed.values():
        observation.require(experiment)
    if ResolvedLayout.of(experiment).world_size == 1:
        with joined_process_group(device := own_device()):
            mesh = mesh_of(experiment, device)
            evaluation = evaluate_source(source, experiment, mesh, all_documents, observed)
    else:
        assert run_on_ranks is not None, "given by the command line"
        request = {"path": str(source.path), "all_documents": all_documents, "trust": options.trust}
        request |= {"observed": asked, "averaged": options.averaged}
        evaluation = Evaluation.from_json(run_on_ranks(f"{__name__}.rank_main", experiment, request))
    found = evaluation.result
    numbers: dict[str, Any] = {"weights": str(source.path), "data": experiment.data.source, "split": options.split}
    numbers |= {"tokens": found.tokens, "loss": found.loss}
    numbers |= evaluation.parts or {"perplexity": found.perplexity}
    if options.json:
        answer(numbers | evaluation.observed)
        return 0
    cells = {"weights": describe(path, source), "data": experiment.data.source, "tokens": f"{found.tokens:,}"}
    if evaluation.parts:
        cells |= {"loss": f"{found.loss:.4f}"} | {name: f"{value:.4f}" for name, value in evaluation.parts.items()}
    else:
        cells |= {"loss (nats)": f"{found.loss:.4f}", "perplexity": f"{found.perplexity:.4g}"}
    table = Table(*cells)
    table.add_row(*cells.values())
    Terminal().print(table)
    for name, values in evaluation.observed.items():
        for line in observed[name].lines(values, found.tokens) if values else ():
            print(line)
    return 0


class Observation(Protocol):
    """Observation of an evaluation, beside the loss: it looks at tokens of a language model. A flag requests it."""

    def require(self, experiment: Experiment) -> None:
        """Raise UserError if the model or the layout cannot be observed."""

    def begin(
        self, model: nn.Module, source: OpenCheckpoint, objective: LanguageModeling, mesh: Mesh
    ) -> LanguageModeling:
        """Prepare for a model; returns the objective that computes its loss."""
        ...

    def watch(self, batches: Mapping[str, Iterable[Batch]]) -> AbstractContextManager[Mapping[str, Iterable[Batch]]]:
        """Wrap the batches of each source, while the model runs on them."""
        ...

    def values(self, mesh: Mesh) -> list[dict[str, Any]]:
        """Values of all ranks, as JSON values."""
        ...

    def lines(self, values: list[dict[str, Any]], tokens: int) -> Iterator[str]:
        """Text of the values, for this many tokens."""
        ...


def observations(names: Iterable[str]) -> dict[str, Observation]:
    """New observations, by the names of their flags."""
    return {name: load(provided("observations")[name])() for name in names}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    result: ValidationResult
    observed: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)  # values of each observation
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # of a model that reads no tokens

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Evaluation":
        """Read the dictionary of `dataclasses.asdict`."""
        return Evaluation(ValidationResult(**values["result"]), values["observed"], values["parts"])


def evaluate_source(
    source: OpenCheckpoint,
    experiment: Experiment,
    mesh: Mesh,
    all_documents: bool = False,
    observed: Mapping[str, Observation] = {},
) -> Evaluation:
    """Compute the loss over the validation split of the experiment's data, or over all documents. All ranks of the mesh
    must call it; each reads its shard of the weights."""
    source = dataclasses.replace(source, model=experiment.model)
    loader = ValidationLoader(
        experiment.data,
        experiment.training.seq_len,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dp_degree,
        micro_batch_size=ResolvedLayout.of(experiment).micro_batch_size,
        all_documents=all_documents,
    )
    model, spec = load_model(source, experiment, mesh), model_spec(source.model)
    if spec is not None and spec.inputs is not None:
        model.objective = build_objective(experiment.training, experiment.compile, None, spec=spec)
        row = evaluate_split(model, loader, mesh)
        result = ValidationResult(row.pop("validation_loss"), int(row.pop("validation_tokens")))
        return Evaluation(result, parts={re.sub("validation_(loss[/_])?", "", name): row[name] for name in row})
    vocab = vocab_shard(mesh, source.model.vocab_size) if experiment.parallelism.loss_parallel else None
    computes = experiment.training.has_given_chunks or computes_loss(model.parts[-1], spec)
    chunk = ResolvedLayout.of(experiment).loss_chunk_tokens if computes else None
    objective, batches = LanguageModeling(chunk, vocab_shard=vocab), loader.sources
    with ExitStack() as watched:
        for observation in observed.values():
            objective = observation.begin(model.parts[0], source, objective, mesh)
            batches = watched.enter_context(observation.watch(batches))
        model.objective = objective
        row = evaluate_sources(model, batches, mesh)
    result = ValidationResult(row["validation_loss"], int(row["validation_tokens"]))
    return Evaluation(result, {name: observation.values(mesh) for name, observation in observed.items()})


def load_model(source: OpenCheckpoint, experiment: Experiment, mesh: Mesh) -> Model:
    """Model of a checkpoint, divided as the experiment says; each rank of the mesh reads its shard."""
    source, layout = dataclasses.replace(source, model=experiment.model), ResolvedLayout.of(experiment)
    training, parallelism, documents = layout.training, layout.parallelism, experiment.data.document_mask
    parts = parallelism.cp > 1 and parallelism.cp_method != "ulysses"

    def shard(model: nn.Module) -> Rows:
        parallelize(model, mesh, layout, experiment.activation_checkpoint, experiment.compile)
        return {}

    def weights(*modules: nn.Module) -> ComputeWeights:
        copied = training.mixed_precision == "bf16" and not uses_fsdp(mesh, cpu_offload=False)
        return ComputeWeights(modules, torch.bfloat16 if copied else None, fp32_modules=training.fp32_modules)

    if mesh.pp_group is not None:
        pipeline = load_pipeline(source, layout, mesh, documents=documents, divide=shard, parts=parts)
        stages = weights(*(stage.module for stage in pipeline.stages))
        return PipelineModel(pipeline, LanguageModeling(), mesh, stages)
    divide, length = shard if mesh.world.size() > 1 else None, training.seq_len
    module = load_source(source, mesh.device, seq_len=length, documents=documents, divide=divide, parts=parts)
    return EagerModel(module, LanguageModeling(), mesh, weights(module))


def require_whole_sequences(experiment: Experiment, flag: str, *axes: str) -> None:
    """Raise UserError if ranks of a pipeline or of these axes would share the work on a token, or on a sequence."""
    for key in ("pp", *axes):
        if (degree := getattr(experiment.parallelism, key)) > 1:
            reason = f"with {flag} each rank needs whole sequences" + (" in all layers" if key == "pp" else "")
            remedy = f"use parallelism.{key}=1 parallelism.dp_shard={degree}"
            raise UserError(_REFUSED, [Violation(f"parallelism.{key}", degree, reason, remedy)])


def rank_main(run: Run) -> None:
    """Entry point of one rank."""

    def evaluate(experiment: Experiment, request: Any, device: torch.device) -> dict[str, Any]:
        source = open_checkpoint(Path(request["path"]), trust=request["trust"], averaged=request["averaged"])
        mesh = mesh_of(experiment, device)
        found = evaluate_source(source, experiment, mesh, request["all_documents"], observations(request["observed"]))
        return dataclasses.asdict(found)

    serve(run, evaluate)


def mesh_of(experiment: Experiment, device: torch.device) -> Mesh:
    """Mesh of an evaluation's layout."""
    cuts = sequence_cuts(model_spec(experiment.model), experiment.parallelism, experiment.training.seq_len)
    return build_mesh(experiment.parallelism, device, experts=has_experts(experiment.model), cuts=cuts)


def evaluation_experiment(
    path: Path, source: OpenCheckpoint, overrides: Sequence[str], all_documents: bool = False, trust: bool = False
) -> Experiment:
    """Apply overrides to the run's configuration, or to the defaults for weights without a run. The tokenizer defaults
    to the checkpoint's. `all_documents` needs no validation split. Raises UserError about an unknown key, or a value
    that cannot be evaluated."""
    groups = [override for override in overrides if "." not in override.partition("=")[0]]
    values = [override for override in overrides if override not in groups]
    wrong = [override for override in groups if not override.startswith("data=")]
    keys = [key for key in value_keys() if key.startswith(TAKEN)]
    names = [override.partition("=")[0].lstrip("+") for override in values]
    unknown = [name for name in names if name not in keys and not name.startswith("data.options.")]
    if wrong or unknown:
        raise UserError(_REFUSED, [_unknown_key(override, keys) for override in [*wrong, *unknown]])
    imports = ["model.architecture"] if groups else ["model.architecture", "data.source"]
    base = _on_one_device(_base_config(path, source, imports, trust))
    if groups:
        base = OmegaConf.merge(base, {"data": _compose_groups(groups).data})
        assert isinstance(base, DictConfig)
        base.data.tokenizer = source.tokenizer
    for override in values:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(base, key, _parse_value(override, value), force_add=key.startswith("data.options."))
    experiment = to_experiment(base)
    # A size of batches, and as many of them in a pass as a pipeline has ranks.
    training, parallelism = experiment.training, experiment.parallelism
    size = training.micro_batch_size or DEFAULT_BATCH
    whole = size * parallelism.dp_replicate * parallelism.dp_shard * parallelism.pp
    training = dataclasses.replace(training, micro_batch_size=size, global_batch_size=whole, batch_ramp=[])
    experiment = dataclasses.replace(experiment, training=training)
    every = 0 if all_documents else experiment.evaluation.every
    checked = dataclasses.replace(experiment, evaluation=dataclasses.replace(experiment.evaluation, every=every))
    modules = [load(one.rules) for one in extensions().values() if one.rules]
    added = [rule for module in modules for rule in getattr(module, "EVALUATION_RULES", ())]
    divided = (*TENSOR_RULES, *CONTEXT_RULES, *PIPELINE_RULES, *DEGREE_RULES)
    violations = find_violations((*DATA_RULES, *added, *divided), checked)
    violations += family_violations(experiment.model)
    violations += exceeds_context(experiment.model, experiment.training.seq_len)
    if violations:
        raise UserError(_REFUSED, violations)
    return experiment


def _on_one_device(config: DictConfig) -> DictConfig:
    stages = {"pp_schedule": "GPipe", "pp_microbatches": None, "pp_layers": None, "pp_layers_per_stage": None}
    stages |= {"pp_first_stage_less": 0, "pp_last_stage_less": 0}
    single = {
        "parallelism": {**ONE_DEVICE, **stages, "async_tp": False, "cpu_offload": False},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enabled": False, "cuda_graphs": False},
        "training": {"mixed_precision": "fp32"},
    }
    merged = OmegaConf.merge(config, single)
    assert isinstance(merged, DictConfig)
    return merged


def own_device() -> torch.device:
    """Device of an evaluation in this process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _base_config(path: Path, source: OpenCheckpoint, imports: Sequence[str], trust: bool) -> DictConfig:
    experiment = to_experiment(compose(["training.seq_len=1024"]))
    for folder in (path, path.parent.parent):
        if source.format == "dcp" and (folder / "config.yaml").is_file():
            config = read_values(folder / "config.yaml", imports, trust)
            # Evaluation runs neither the run's optimizer, nor your objective, nor its executor.
            defaults = to_dict(experiment)
            config |= {group: defaults[group] for group in ("optimizer", "lr_schedule")}
            shipped = config.get("training", {}).get("objective") in objective_names()
            for key in ("training.objective", "training.objective_options", "cluster.kind"):
                group, _, name = key.partition(".")
                if isinstance(config.get(group), dict) and not (shipped and group == "training"):  # else reported below
                    config[group] |= {name: defaults[group][name]}
            return _literal(config)
    if not source.model.vocab_size:
        without = "Without its run folder, titan-exp evaluate takes language models only."
        raise UserError(f"{source.path}: {source.model.name} does not read tokens. {without}")
    if source.tokenizer is None:
        raise UserError(f"{source.path} has no tokenizer beside its weights. Put the model's tokenizer.json there.")
    length = min(experiment.training.seq_len, longest_sequence(source.model))
    config = to_dict(dataclasses.replace(experiment, model=source.model))
    config["data"]["tokenizer"], config["training"]["seq_len"] = source.tokenizer, length
    return _literal(config)


def _literal(config: dict[str, Any]) -> DictConfig:
    """Values of a configuration, in which text is not interpolated."""
    literal = OmegaConf.create(_escaped(config))
    assert isinstance(literal, DictConfig)
    return literal


def _escaped(value: Any) -> Any:
    match value:
        case dict():
            return {key: _escaped(part) for key, part in value.items()}
        case list():
            return [_escaped(part) for part in value]
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _compose_groups(groups: list[str]) -> DictConfig:
    options = shipped_options("data")
    for override in groups:
        option = override.partition("=")[2]
        if option not in options:
            remedy = did_you_mean(option, options) or f"use data={listed(options)}"
            raise UserError(_REFUSED, [Violation("data", option, "there is no such option", remedy)])
    return _literal(to_dict(to_experiment(compose(groups))))


def _parse_value(override: str, value: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException as error:
        key = override.partition("=")[0]
        raise UserError(f'{override}: Hydra cannot read this value. Quote it: {key}="{in_quotes(value)}"') from error


def _unknown_key(override: str, keys: list[str]) -> Violation:
    name, _, value = override.partition("=")
    taken = f"use data=GROUP, or keys of data, training, {ROPE} and parallelism, or model.context"
    remedy = did_you_mean(name, ["data", *keys]) or taken
    return Violation(name, value, "evaluate does not take this key", remedy)
