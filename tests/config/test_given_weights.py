"""Weights that a run begins with: what of their description the run may change, for every field of every family."""

import dataclasses
import json
import shlex
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.composing import experiment
from tests.models.shapes import TINY
from titan_exp.config.data_files import byte_words
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import MAY_BE_MEANT, NO_CHANGE, Change, ModelConfig
from titan_exp.config.schema.schema import choices_of, hints
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import to_huggingface
from titan_exp.models.llama import Config as Llama
from titan_exp.rules import violations
from titan_exp.rules.weights import GivenWeights, model_changes, model_misfits, noted_changes

PRESETS = ("llama_debug", "qwen3_moe_debug", "deepseek_debug", "gpt_oss_debug", "llama4_debug")
NOTHING = {
    *("model.name", "model.init_std", "model.attention_backend", "model.mtp.weight"),
    *(f"model.moe.balance.{key}" for key in ("loss", "coefficient", "z_loss", "bias_rate", "centered_bias")),
}
MEANT = {"model.context", "model.moe.fp32_router"}


def fields_of(config: Any, prefix: str = "model.") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, value and type of every field, less the family."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{one.name}.")
        elif one.name != "architecture":
            yield f"{prefix}{one.name}", value, hints(type(config))[one.name]


def another(value: Any, annotation: Any) -> Any:
    """Another value of the same type."""
    inner = typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
    if choices := choices_of(inner):
        return next(choice for choice in choices if choice != value)
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 or type(value)(1)
        case None:
            return 64
        case tuple():
            return (value[0] + 2, value[1] - 2, *value[2:])
    return f"{value}x"


def changed(config: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    return replace(config, **{first: changed(getattr(config, first), rest, value) if rest else value})


def expected(model: ModelConfig, key: str) -> Change:
    scaling = getattr(getattr(model, "rope", None), "scaling", "none")
    stretches = key.startswith("model.rope.") and key != "model.rope.theta" and scaling != "none"
    return Change.NOTHING if key in NOTHING else Change.MEANT if key in MEANT or stretches else Change.FUNCTION


@pytest.mark.parametrize("preset", PRESETS)
def test_every_field_is_compared_unless_it_says_otherwise(preset: str):
    theirs = experiment(f"model={preset}").model
    given, plain = GivenWeights("RUN", theirs), GivenWeights("RUN", dataclasses.asdict(theirs))
    for key, value, annotation in fields_of(theirs):
        ours = changed(theirs, key.removeprefix("model."), another(value, annotation))
        found, noted, effect = list(model_misfits(ours, given)), noted_changes(ours, given), expected(ours, key)
        if key.startswith("model.rope.") and effective(ours) == effective(theirs):
            effect = Change.NOTHING
        assert (key in [one.field for one in found]) == (effect is Change.FUNCTION), key
        assert (f"{key}=" in noted) == (effect is Change.MEANT), key
        assert found or effect is not Change.FUNCTION, key
        assert list(model_misfits(ours, plain)) == found, key


def effective(model: Any) -> Any:
    return model.rope.effective(model.context)


def outputs(model: ModelConfig, weights: Mapping[str, torch.Tensor] = {}) -> tuple[Any, dict[str, torch.Tensor]]:
    """Logits of 32 tokens, with given weights or drawn ones."""
    built = build_model(model, seq_len=32, attention_backend="math").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.3, generator=generator)
        built.reset_buffers()  # type: ignore[operator]  # the decoder's own
        built.load_state_dict(weights, strict=False)
        return built(torch.arange(32)[None] * 7 % 256), built.state_dict()


@pytest.mark.parametrize("preset", PRESETS)
def test_what_changes_nothing_changes_no_logit(preset: str):
    model = experiment(f"model={preset}").model
    before, weights = outputs(model)
    for key, value, annotation in fields_of(model):
        if key in NOTHING and key != "model.attention_backend":
            after, _ = outputs(changed(model, key.removeprefix("model."), another(value, annotation)), weights)
            assert torch.equal(before, after), key


def test_of_a_switch_the_weights_tell():
    """What this issue began with: 4 heads of 16 features with 2 key-value heads, or 8 of 8 with 4."""
    theirs = replace(TINY, heads=4, kv_heads=2, head_dim=16)
    ours = replace(TINY, heads=8, kv_heads=4, head_dim=8)
    found = list(model_misfits(ours, GivenWeights("RUN", theirs)))
    assert [violation.field for violation in found] == ["model.heads", "model.kv_heads", "model.head_dim"]
    accepting = [violation.remedy.partition("accept_changes='[")[2].partition("]'")[0] for violation in found]
    assert len({*accepting}) == 1
    assert list(model_misfits(ours, GivenWeights("RUN", theirs), accepted=accepting[0].split(","))) == []


@dataclass(frozen=True)
class Own(Llama):
    """A family of the user's with fields that nobody here knows."""

    gain: float = 1.0
    label: str = field(default="a", metadata=NO_CHANGE)
    length: int = field(default=1, metadata=MAY_BE_MEANT)


def test_a_field_of_a_family_of_ones_own_is_compared():
    theirs = Own(**vars(TINY))
    given = GivenWeights("RUN", theirs)
    assert [
        (one.key, one.change) for one in model_changes(replace(theirs, gain=2.0, label="b", length=2), theirs, "RUN")
    ] == [
        ("model.gain", Change.FUNCTION),
        ("model.length", Change.MEANT),
    ]
    assert [one.field for one in model_misfits(replace(theirs, gain=2.0), given)] == ["model.gain"]


def test_an_older_configuration_has_the_defaults_of_newer_keys():
    values = dataclasses.asdict(TINY)
    del values["rope"]["scaling"], values["init_std"]
    assert list(model_misfits(TINY, GivenWeights("RUN", values))) == []
    yarn = replace(TINY, rope=replace(TINY.rope, theta=1.001 * TINY.rope.theta))
    assert [one.field for one in model_misfits(yarn, GivenWeights("RUN", values))] == ["model.rope.theta"]


def test_new_rows_and_blocks_may_have_other_shapes():
    theirs = replace(TINY, vocab_size=96, layers=TINY.layers + 1)
    (rows, blocks) = model_misfits(TINY, GivenWeights("RUN", theirs))
    assert {rows.field, blocks.field} == {"model.vocab_size", "model.layers"}
    (exclude,) = {one.remedy.partition("initial_exclude='[")[2].removesuffix("]'") for one in (rows, blocks)}
    assert list(model_misfits(TINY, GivenWeights("RUN", theirs), exclude=exclude.split(","))) == []
    # What the excluded weights have to do with cannot be accepted otherwise.
    assert list(model_misfits(TINY, GivenWeights("RUN", theirs), accepted=["model"])) == [rows, blocks]


def run_folder(path: Path, *overrides: str) -> Path:
    """A run with its configuration and a checkpoint whose content no rule reads."""
    (path / "checkpoints" / "step-00000010").mkdir(parents=True)
    (path / "checkpoints" / "step-00000010" / ".metadata").touch()
    (path / "config.yaml").write_text(to_yaml(experiment("model=llama_debug", *overrides)))
    return path


def misfits(*overrides: str) -> list[Violation]:
    """Violations about weights that a run begins with."""
    found = violations(experiment("model=llama_debug", *overrides))
    return [one for one in found if "checkpoint." in one.remedy or one.field.startswith("checkpoint.")]


@pytest.mark.parametrize("key", ["initial", "continue_from"])
def test_both_ways_to_begin_compare(tmp_path: Path, key: str):
    begin = f"checkpoint.{key}={run_folder(tmp_path / 'parent')}"
    more = ["training.steps=1000", begin]
    assert misfits(*more) == []
    assert [one.field for one in misfits(*more, "model.rope.theta=5e5")] == ["model.rope.theta"]
    assert misfits(*more, "model.rope.theta=5e5", "checkpoint.accept_changes=[model.rope.theta]") == []
    assert misfits(*more, "model.context=256", "model.name=x", "model.init_std=0.5") == []
    assert misfits(*more, "model.rope.scaling=linear", "model.rope.factor=2") == []
    assert "model.norm_eps=1e-05" in misfits(*more, "model.norm_eps=1e-3")[0].remedy


def test_a_forgotten_scaling_is_refused(tmp_path: Path):
    scaled = ["model.rope.scaling=llama3", "model.rope.factor=8"]
    begin = f"checkpoint.initial={run_folder(tmp_path / 'parent', *scaled)}"
    assert "model.rope.scaling" in [one.field for one in misfits(begin)]
    assert misfits(begin, *scaled) == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("[nonsense]", []),
        ("[model.rope.thetas]", ["model.rope.theta"]),
        ("[heads,model.norm_eps]", ["model.norm_eps", "model.heads"]),
        ("[data.tokeniser]", ["data.tokenizer"]),
        ("[optimizer.lr]", []),
        ("[model.moe.experts]", []),
    ],
)
def test_changes_to_accept_are_keys_that_there_are(typed: str, meant: list[str]):
    (found,) = misfits(f"checkpoint.accept_changes={typed}")
    (remedy,) = shlex.split(found.remedy.removeprefix("use ").partition(" (")[0])
    assert remedy == f"checkpoint.accept_changes=[{','.join(meant)}]"
    assert misfits(remedy) == []
    for name in ("model", "model.rope", "model.options" if "moe" in typed else "model.dim", "data.tokenizer"):
        assert (misfits(f"checkpoint.accept_changes=[{name}]") == []) is (name != "model.options")


def words(path: Path, *texts: str) -> Path:
    """A tokenizer.json of these words."""
    path.mkdir()
    vocabulary = {text: number for number, text in enumerate(texts)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}}))
    return path


@pytest.mark.parametrize("key", ["initial", "continue_from"])
def test_a_tokenizer_is_compared_by_its_words(tmp_path: Path, key: str):
    english, german = words(tmp_path / "en", "<eos>", "house", "tree"), words(tmp_path / "de", "<eos>", "Haus", "Baum")
    parent = run_folder(tmp_path / "parent", f"data.tokenizer={english}")
    begin = ["training.steps=1000", f"checkpoint.{key}={parent}", "checkpoint.continue_data=restart"][
        : 2 + (key != "initial")
    ]
    assert misfits(*begin, f"data.tokenizer={english}") == []
    (found,) = misfits(*begin, f"data.tokenizer={german}")
    assert (found.field, found.reason) == (
        "data.tokenizer",
        f"this tokenizer has other ids, or none, for 2 of the 3 words that {parent} knows",
    )
    accept = "checkpoint.accept_changes='[data.tokenizer]' if you mean to change it"
    assert found.remedy == f"use data.tokenizer={english}, or {accept}"
    assert misfits(*begin, f"data.tokenizer={german}", "checkpoint.accept_changes=[data.tokenizer]") == []
    same = words(tmp_path / "same", "<eos>", "house", "tree", "and more")
    assert misfits(*begin, f"data.tokenizer={same}") == []
    if key == "initial":
        assert misfits(*begin, f"data.tokenizer={german}", "checkpoint.initial_exclude=[embedding.*,head.*]") == []
        assert misfits(*begin, f"data.tokenizer={german}", "checkpoint.initial_exclude=[head.*]") != []


def test_a_run_on_the_same_data_takes_no_other_tokenizer(tmp_path: Path):
    english, german = words(tmp_path / "en", "<eos>", "house", "tree"), words(tmp_path / "de", "<eos>", "Haus", "Baum")
    parent = run_folder(tmp_path / "parent", f"data.tokenizer={english}")
    child = ["training.steps=1000", f"checkpoint.continue_from={parent}", f"data.tokenizer={german}"]
    accept = ["checkpoint.accept_changes=[data.tokenizer]", "checkpoint.continue_data=restart"]
    for typed in ([], accept[:1]):
        (found,) = misfits(*child, *typed)
        assert found.remedy == (
            f"use data.tokenizer={english}, or checkpoint.accept_changes='[data.tokenizer]' "
            "checkpoint.continue_data=restart if you mean to change it"
        )
    assert misfits(*child, *accept) == []


def test_bytes_have_the_words_of_their_file(tmp_path: Path):
    begin = f"checkpoint.initial={run_folder(tmp_path / 'parent')}"
    exported = words(tmp_path / "export", *byte_words())
    assert misfits(begin, f"data.tokenizer={exported}") == []
    assert [one.field for one in misfits(begin, f"data.tokenizer={words(tmp_path / 'other', '<eos>', 'a')}")] == [
        "data.tokenizer"
    ]


def folder(path: Path, **keys: Any) -> Path:
    """A Hugging Face folder of the model, whose weights no rule reads."""
    path.mkdir()
    model = experiment("model=llama_debug").model
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    values = {**to_huggingface(model, dtype="float32", special_tokens={}), **keys}
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("keys", "field_name"),
    [
        ({"rope_theta": 123.0}, "model.rope.theta"),
        ({"rms_norm_eps": 0.125}, "model.norm_eps"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}, "model.heads"),
        ({"tie_word_embeddings": True}, "model.tied_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "model.rope.scaling"),
        ({"hidden_act": "gelu"}, "checkpoint.initial"),
        ({"model_type": "mistral", "sliding_window": 32}, "model.architecture"),
    ],
)
def test_a_hugging_face_folder_is_compared_by_its_config(tmp_path: Path, keys: dict[str, Any], field_name: str):
    assert misfits(f"checkpoint.initial={folder(tmp_path / 'same')}") == []
    other = f"checkpoint.initial={folder(tmp_path / 'other', **keys)}"
    found = misfits(other)
    assert field_name in [one.field for one in found]
    if field_name.startswith("model."):
        accepting = (
            "".join(found[0].remedy.partition("checkpoint.accept_changes=")[1:]).partition("' ")[0].replace("'", "")
        )
        assert not accepting or misfits(other, accepting) == []


def test_a_description_that_cannot_be_read_is_named(tmp_path: Path):
    broken = folder(tmp_path / "broken")
    (broken / "config.json").write_text("[" * 100_000)
    (found,) = misfits(f"checkpoint.initial={broken}")
    assert "nested" in found.reason
    parent = run_folder(tmp_path / "parent")
    (parent / "config.yaml").write_text("model: {architecture: llama, heads: many}\n")
    (found,) = misfits(f"checkpoint.initial={parent}")
    assert found.field == "checkpoint.initial"
    assert "heads: Input should be a valid integer" in found.reason
    (parent / "config.yaml").write_text("data: {tokenizer: bytes}\n")
    (found,) = misfits(f"checkpoint.initial={parent}")
    assert "does not describe a model" in found.reason


def checkpoint(path: Path, step: int, data: bytes = b"weights") -> Path:
    """A checkpoint by its lists, of a run whose configuration is there."""
    folder = path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files = {".metadata": b"metadata", "__0_0.distcp": data}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    listed = {name: {"size": len(content), "crc32": "00000000"} for name, content in files.items()}
    (folder / "checksums.json").write_text(json.dumps({"files": listed}))
    (path / "config.yaml").write_text(to_yaml(experiment("model=llama_debug")))
    return folder


@pytest.mark.parametrize("key", ["initial", "continue_from"])
def test_an_incomplete_checkpoint_is_found_before_the_launch(tmp_path: Path, key: str):
    first, last = checkpoint(tmp_path / "run", 10), checkpoint(tmp_path / "run", 20)
    begin = ["training.steps=1000", f"checkpoint.{key}={tmp_path / 'run'}"]
    earlier = f"checkpoint.initial={first}" if key == "initial" else "checkpoint.continue_step=10"
    assert misfits(*begin) == []
    (last / "__0_0.distcp").write_bytes(b"wei")
    (found,) = misfits(*begin)
    assert found.reason == "step-00000020 is not complete: __0_0.distcp has 3 bytes instead of 7"
    assert found.remedy == f"use {earlier}"
    assert misfits(*begin, earlier) == []
    (last / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in misfits(*begin)[0].reason
    (last / "checksums.json").write_text('{"files": [1]}')
    assert "files is a list instead of keys and values" in misfits(*begin)[0].reason
    (first / ".metadata").write_bytes(b"")
    assert "another copy" in misfits(*begin)[0].remedy


def test_an_incomplete_folder_is_found_before_the_launch(tmp_path: Path):
    from tests.checkpoint.tools import exported, kind
    from titan_exp.config.hydra.nondefault import model_overrides

    whole = exported("llama3", "huggingface", tmp_path / "export", file_bytes=1e5)
    words = [*model_overrides(kind("llama3")), "data.tokenizer=bytes", f"checkpoint.initial={whole}"]
    begin = [*words, "checkpoint.accept_changes=[data.tokenizer]"]

    def reasons() -> list[str]:
        return [one.reason for one in violations(experiment(*begin)) if one.field == "checkpoint.initial"]

    assert reasons() == []
    _, second, *_ = sorted(whole.glob("*.safetensors"))
    content = second.read_bytes()
    second.write_bytes(content[:-4])
    assert reasons() == [
        f"export is not complete: {second.name} has {len(content) - 4:,} bytes instead of {len(content):,}"
    ]
    second.write_bytes(content[:5])
    assert "no header" in reasons()[0]
    second.unlink()
    assert reasons() == [f"export is not complete: {second.name} is missing"]
    (whole / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    assert "weight_map is a list instead of keys and values" in reasons()[0]
