"""Hugging Face's `config.json`, of transformers or diffusers, and `generation_config.json`, written from a model config
and read back; reports on a repository."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.foreign_file import NotedKeys, count, named_errors, read_object, table
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.types import BLOCKS
from titan_exp.config.schema.component import builtin_components, component, config_class, current_names
from titan_exp.config.schema.foreign_code import require_trust
from titan_exp.config.schema.typed_config import validated
from titan_exp.models.spec.lookup import mtp_depth

MTP_KEY = "num_nextn_predict_layers"  # key of `config.json` with the number of modules of multi-token prediction
DIFFUSERS_CLASS = "_class_name"  # key of `config.json` that names the class in diffusers
ANY_TYPE = "*"  # `model_type` of the family that reads every type that no other family reads


@dataclass(frozen=True)
class HuggingFace:
    """A family's class in `transformers`. `hf_keys.huggingface_class` makes, from a table of keys, the fields that
    write and read its file."""

    model_type: str  # name in `config.json`
    architectures: tuple[str, ...]  # classes in `transformers`
    fixed: Mapping[str, object]  # required values of keys in `config.json`; absent keys are accepted
    to_config: Callable[[Any], dict[str, Any]]  # keys of `config.json` from the family's config
    from_config: Callable[[Mapping[str, Any], str], ModelConfig]  # the family's config from `config.json` and a name
    other_types: tuple[str, ...] = ()
    """Further values of `model_type` that the family reads; it writes one of them by returning it from `to_config`."""
    violations: Callable[[Any], Iterable[Violation]] = lambda config: ()
    """Values of the family's config that `config.json` cannot express."""
    unread: Callable[[Mapping[str, Any]], Iterable[str]] = lambda values: ()
    """Prefixes of tensors that the family does not read, from `config.json`."""
    multimodal_type: str = ""  # `model_type` of a multimodal model whose `text_config` is one of the family's
    multimodal_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of its language model's tensors, each with the one that the family's own names have instead; tensors
    without such a prefix are not read."""
    offer: str = ""
    """For the family that reads any type: a sentence about whose model it takes, and the overrides that train it."""


def to_huggingface(config: ModelConfig, *, dtype: str, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `config.json`; `dtype` is torch's name (`bfloat16`), `special_tokens` the known token ids. Raises
    UserError if the file cannot express the model."""
    family: HuggingFace = component("model", config.architecture).huggingface
    violations = export_violations(config)
    if violations:
        raise UserError(f"A config.json of {family.model_type} cannot express this model.", violations)
    return {
        "architectures": list(family.architectures),
        "model_type": family.model_type,
        **family.to_config(config),
        **special_tokens,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def export_violations(config: ModelConfig) -> list[Violation]:
    """Values of a config that `config.json` cannot express."""
    return list(component("model", config.architecture).huggingface.violations(config))


def from_huggingface(values: Mapping[str, Any], name: str, architecture: str | None = None) -> ModelConfig:
    """Model config from the content of a `config.json`, of any version of `transformers`. `architecture` names the
    family that reads it; None takes the built-in family of its `model_type`. Raises UserError if no family reads it, or
    it has parts that the family does not compute."""
    family, noted = _family(values, architecture), NotedKeys(values)
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but our {family.model_type} has {key}={wanted!r}.")
    for key in ("num_hidden_layers", MTP_KEY):  # lists of this length are built from it
        count(values.get(key) or 0, f"config.json: {key}", BLOCKS)
    try:
        with named_errors(noted, "config.json", f"a {family.model_type}'s"):
            found = family.from_config(noted, name)
        return validated(type(found), asdict(found), "config.json")
    except UserError as error:
        if family.model_type != ANY_TYPE:
            raise
        kinds = listed(map(repr, family_types()), "and")
        message = f"config.json: model_type is {values.get('model_type')!r}. Our families read {kinds}."
        raise UserError(message if error.violations else f"{message} {error}", error.violations) from error


def config_json(folder: Path) -> dict[str, Any]:
    """Content of a folder's `config.json`. Raises UserError if it cannot be read or is not a JSON object."""
    return read_object(folder / "config.json")


def language_model(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Language model's part of a multimodal `config.json`, and the prefixes of its tensors, each with the family's own;
    else the whole file and no prefixes."""
    for _, family in _families().values():
        if values.get("model_type") == family.multimodal_type and isinstance(values.get("text_config"), Mapping):
            return {"model_type": family.model_type, **values["text_config"]}, family.multimodal_prefixes
    return values, {}


def foreign_type(values: Mapping[str, Any], architecture: str) -> str | None:
    """The `model_type` of a `config.json` if the family of `architecture` does not read it; None if it does."""
    family, kind = _family(values, architecture), values.get("model_type")
    known = (None, family.model_type, *family.other_types, family.multimodal_type)
    return None if kind in known or family.model_type == ANY_TYPE else str(kind)


def unread_prefixes(values: Mapping[str, Any], architecture: str | None = None) -> tuple[str, ...]:
    """Prefixes of tensors beside a `config.json` that its family does not read."""
    return tuple(_family(values, architecture).unread(values))


def quantized_weights(values: Mapping[str, Any]) -> tuple[int, int] | Literal["mxfp4"] | None:
    """Weight format in `config.json`: rows and columns of the fp8 blocks that share a scale, or MXFP4; None for plain
    weights. Raises UserError if the weights are quantized otherwise."""
    quantization = table(values.get("quantization_config") or {}, "config.json: quantization_config")
    if not quantization:
        return None
    method, form = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    blocks = quantization.get("weight_block_size")
    if method == "mxfp4":
        return "mxfp4"
    if method != "fp8" or form != "e4m3" or not blocks:
        found = f"quant_method={method!r}, fmt={form!r}, weight_block_size={blocks!r}"
        raise UserError(
            f"config.json: we cannot read weights quantized with {found}. We read fp32, bf16, fp16, fp8 (e4m3) with a "
            "scale per block as in DeepSeek V3, and MXFP4 as in GPT-OSS. Load these weights with transformers, "
            "dequantize them, and write them with save_pretrained."
        )
    if not isinstance(blocks, list) or len(blocks) != 2:
        raise UserError(f"config.json: weight_block_size={blocks!r} is not a pair of rows and columns.")
    rows, columns = (count(size, "config.json: weight_block_size", 2**20) for size in blocks)
    return rows, columns


def generation_config(special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Content of `generation_config.json`: the tokens that end a text. It asks for no sampling, because scores of an
    export are those of greedy text. A token that ends and also begins documents in training is not written as a
    begin-of-text token."""
    end = special_tokens.get("eos_token_id")
    return {key: token for key, token in special_tokens.items() if key != "bos_token_id" or token != end}


def special_tokens_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of the begin- and end-of-text tokens in `config.json`."""
    return {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}


def family_types() -> list[str]:
    """Every `model_type` that a family here reads, except the family's that reads every other type."""
    families = _families()
    kinds = (*families, *(family.multimodal_type for _, family in families.values()))
    return [kind for kind in kinds if kind not in ("", ANY_TYPE)]


def other_family() -> tuple[str, HuggingFace] | None:
    """Name and class of the family that reads every `model_type` of no other family; None if there is none."""
    return _families().get(ANY_TYPE)


def _families() -> dict[str, tuple[str, HuggingFace]]:
    """Name and class of the family that reads each `model_type`."""
    found: dict[str, tuple[str, HuggingFace]] = {}
    for name in builtin_components("model"):
        family: HuggingFace | None = getattr(component("model", name), "huggingface", None)
        if family is None:
            continue
        for kind in (family.model_type, *family.other_types):
            if (other := found.setdefault(kind, (name, family)))[0] != name:
                raise UserError(
                    f"config.json: the families {other[0]} and {name} both read the model_type {kind!r}. "
                    "Give one of them another model_type, or uninstall the extension that brings it."
                )
    return found


def _family(values: Mapping[str, Any], architecture: str | None) -> HuggingFace:
    """Family of an architecture; None takes the built-in family of the `model_type`."""
    if architecture is not None:
        return component("model", architecture).huggingface
    found, kind = _families(), str(values.get("model_type"))
    if (family := found.get(kind, found.get(ANY_TYPE))) is None:
        raise UserError(f"config.json: model_type is {kind!r}. We read {', '.join(map(repr, found))}.")
    return family[1]


TOWERS = {"vision_config": "vision tower", "audio_config": "audio tower"}
"""Parts of a multimodal model beside its language model, by their keys in `config.json`."""


def repository_lines(values: Mapping[str, Any], name: str, weights: ModelConfig | None = None) -> Iterator[str]:
    """Lines on a repository: the preset that fits its `config.json`, then the parts that are not read. `weights` is the
    model as its files hold it; None if only `config.json` is known. Raises UserError if no family reads the
    `model_type`."""
    from titan_exp.config.hydra.nondefault import nearest_preset  # ranks need no overrides and import no Hydra

    text, _ = language_model(values)
    if not has_family(values):
        from_huggingface(text, name)
        yield no_family(values)
        return
    try:
        model = from_huggingface(text, name)
        quantized_weights(text)
    except UserError as error:  # the error says what the family cannot compute
        yield f"cannot be converted: {error}"
        return
    preset, keys = nearest_preset(model)
    yield f"model={preset} fits but for {' '.join(keys)}" if keys else f"fits model={preset}"
    if text is not values:
        yield from (f"not read: {tower} ({key})" for key, tower in TOWERS.items() if key in values)
    depth = int(text.get(MTP_KEY) or 0)
    if depth and weights is not None and mtp_depth(weights) == 0:
        yield f"the files lack the modules of multi-token prediction that config.json names ({MTP_KEY}={depth})"
    elif depth:
        modules = f"{depth} module{'s' * (depth > 1)} of multi-token prediction"
        yield f"it has {modules}; train with model.mtp.depth={depth}"


def has_family(values: Mapping[str, Any]) -> bool:
    """True if a family here reads the `model_type` of a `config.json`."""
    return language_model(values)[0].get("model_type") in family_types()


def no_family(values: Mapping[str, Any]) -> str:
    """Sentences for a `model_type` of no family: its name, the known families, and the one that takes any type."""
    kind, (_, other) = values.get("model_type"), other_family() or ("", None)
    found = f"none of our families reads model_type {kind!r}. They read {listed(family_types(), 'and')}."
    return f"{found} {other.offer}" if other else found


FILE = "model.json"  # file name in the folder of a checkpoint


def to_json(config: ModelConfig, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for JSON, which `from_json` reads."""
    return {"model": asdict(config), "special_tokens": dict(special_tokens)}


def from_json(values: Mapping[str, Any], path: Path, trust: bool = False) -> tuple[ModelConfig, dict[str, Any]]:
    """Model config and special tokens from the content of the file at `path`.

    Raises:
        UserError: the file describes no model, or has another version.
        Untrusted: the model is code, without `trust`.
    """
    model = current_names("model", table(values.get("model"), f"{path}: model"))
    require_trust(path, b"", {"model": model}, trust)
    config = validated(config_class("model", model), model, str(path))
    return config, dict(table(values.get("special_tokens") or {}, f"{path}: special_tokens"))


@dataclass(frozen=True)
class Diffusers:
    """A family's class in diffusers."""

    class_name: str
    fixed: Mapping[str, object]  # required values of keys in `config.json`; absent keys are accepted
    to_config: Callable[[Any], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any], str], ModelConfig]  # the family's config from `config.json` and a name
    violations: Callable[[Any], Iterable[Violation]] = lambda config: ()
    """Values of the family's config that `config.json` cannot express."""


def to_diffusers(config: ModelConfig) -> dict[str, Any]:
    """Content of `config.json`. Raises UserError if the file cannot express the model."""
    family: Diffusers = component("model", config.architecture).diffusers
    violations = diffusers_violations(config)
    if violations:
        raise UserError(f"config.json of {family.class_name} cannot express this model.", violations)
    return {DIFFUSERS_CLASS: family.class_name, **family.to_config(config)}


def diffusers_violations(config: ModelConfig) -> list[Violation]:
    """Values of a config that `config.json` cannot express."""
    return list(component("model", config.architecture).diffusers.violations(config))


def diffusers_class(config: ModelConfig) -> str:
    """Name of the model's class in diffusers."""
    return component("model", config.architecture).diffusers.class_name


def from_diffusers(values: Mapping[str, Any], name: str) -> ModelConfig:
    """Model config from the content of a `config.json`. Raises UserError if no family reads it, or it has parts that
    the family does not compute."""
    found = (getattr(component("model", family), "diffusers", None) for family in builtin_components("model"))
    families: dict[str, Diffusers] = {family.class_name: family for family in found if family is not None}
    if values.get(DIFFUSERS_CLASS) not in families:
        raise UserError(
            f"config.json: {DIFFUSERS_CLASS} is {values.get(DIFFUSERS_CLASS)!r}. We read {listed(families, 'and')}."
        )
    family = families[values[DIFFUSERS_CLASS]]
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but our {family.class_name} has {key}={wanted!r}.")
    return family.from_config(values, name)


def from_bfl(shapes: Mapping[str, tuple[int, ...]], name: str) -> ModelConfig:
    """Model config from the tensor shapes of Black Forest Labs' file, which has no `config.json`. Raises UserError if
    no family reads these tensors."""
    for family in builtin_components("model"):
        read = getattr(component("model", family), "from_bfl_shapes", None)
        if read is not None:
            return read(shapes, name)
    raise UserError(f"{name} comes without a config.json. Give a folder that has one beside the weights.")
