"""Classes of transformers as models of ours, against the classes themselves: the same weights, the same numbers."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.hf_folders import write_config
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint, open_huggingface
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.inference.generation import DecodeSession
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.rules import check

transformers = pytest.importorskip("transformers")
CLASSES = ("gemma", "gpt_neox", "olmo2", "phi3", "mistral")


def config_of(folder: Path) -> Any:
    return to_experiment(compose(["model=huggingface", f"model.repository={folder}"])).model


def real_model(config: Any, noise: bool = True) -> Any:
    """The model on the CPU with weights of its own initialization, and noise on those that start alike."""
    with torch.device("meta"):
        model = build_model(config, seq_len=64, attention_backend="flash")
    specs = init_specs(model)
    assert specs is not None
    assert materialize_parameters(model, torch.device("cpu")) == []
    init_weights(model, specs, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if noise and parameter.dim() < 2:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def own_class(config: Any, model: Any) -> Any:
    """The class itself with the weights of a model of ours."""
    made = transformers.CONFIG_MAPPING[config.config_json["model_type"]].from_dict(dict(config.config_json))
    theirs = transformers.AutoModelForCausalLM.from_config(made, torch_dtype="float32", attn_implementation="eager")
    weights = {model.names[name]: weight for name, weight in model.state_dict().items() if name in model.names}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return theirs


@pytest.mark.proves("huggingface", "logits", "gradients")
@pytest.mark.parametrize("name", CLASSES)
def test_logits_and_gradients_are_those_of_the_class(tmp_path: Path, name: str):
    config = config_of(write_config(tmp_path, name))
    ours = real_model(config)
    theirs = own_class(config, ours)
    ids = torch.randint(0, 320, (2, 48), generator=torch.Generator().manual_seed(1))
    found, expected = ours(ids), theirs(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for logits in (found, expected):
        logits.logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        other, own = gradients[ours.names[key]], parameter.grad
        assert own is not None
        assert (own - other).norm() <= 1e-4 * other.norm(), key


def test_documents_and_restarting_positions_are_those_of_the_class_alone(tmp_path: Path):
    config = config_of(write_config(tmp_path, "mistral"))
    ours = real_model(config)
    ids = torch.randint(0, 320, (1, 48), generator=torch.Generator().manual_seed(1))
    documents = torch.cat([torch.zeros(20, dtype=torch.long), torch.ones(28, dtype=torch.long)])[None]
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    with torch.no_grad():
        packed = ours(ids, positions, documents)
        apart = torch.cat([ours(ids[:, :20]), ours(ids[:, 20:])], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_its_spec_counts_and_starts_as_the_class_says(tmp_path: Path):
    config = config_of(write_config(tmp_path, "gpt_neox"))
    spec = model_spec(config)
    assert spec is not None
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING["gpt_neox"].from_dict(dict(config.config_json))
    )
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert spec.active_parameters == spec.parameters - 320 * 64
    matmuls = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 96) + 64 * 320
    attention = 2 * 3 * 4 * 32.5 * 2 * (16 + 16)
    assert spec.flops_per_token(64) == 6 * matmuls + attention
    ours = real_model(config, noise=False)
    for name, parameter in theirs.named_parameters():
        own = dict(ours.named_parameters())[{theirs: key for key, theirs in ours.names.items()}[name]]
        if parameter.dim() < 2:
            assert torch.equal(own, parameter), name
        else:
            assert float(own.detach().std()) == pytest.approx(float(parameter.detach().std()), rel=0.05), name


@pytest.mark.proves("huggingface", "import", "export")
@pytest.mark.parametrize("name", ["gemma", "gpt_neox"])
def test_export_is_opened_by_transformers_and_read_back_bitwise(tmp_path: Path, name: str):
    config = config_of(write_config(tmp_path, name))
    ours = real_model(config)
    weights = dict(ours.state_dict())
    source = OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(weights))
    export_weights(source, tmp_path / "export", ExportOptions("huggingface"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    assert type(theirs).__name__ == type(own_class(config, ours)).__name__
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=1e-5, rtol=1e-5)
    again = open_huggingface(tmp_path / "export")
    assert again.model.architecture == "huggingface"
    assert all(torch.equal(again.parameters.read(key), weight) for key, weight in weights.items())


@pytest.mark.night
@pytest.mark.proves("huggingface", "generate")
@pytest.mark.parametrize("name", ["gpt_neox", "mistral"])
def test_greedy_text_is_that_of_the_class(tmp_path: Path, name: str):
    config = config_of(write_config(tmp_path, name))
    ours = real_model(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # else one token follows itself
    theirs = own_class(config, ours).eval()
    session, ids = DecodeSession(ours, 64, cache=True), [7, 3, 5]
    for _ in range(40):
        ids.append(int(session.next_logits(ids).argmax()))
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ids == theirs.generate(torch.tensor([ids[:3]]), **settings)[0].tolist()
    assert len(set(ids[3:])) > 5


def test_fewer_layers_and_another_vocabulary_are_keys(tmp_path: Path):
    config = config_of(write_config(tmp_path, "olmo2"))
    spec = model_spec(dataclasses.replace(config, layers=1, vocab_size=400))
    assert spec is not None
    assert len(spec.layers) == 1
    assert spec.shapes["head.weight"] == (400, 64)


@pytest.mark.parametrize(
    ("name", "changes", "overrides", "message"),
    [
        ("gemma", {}, "parallelism.cp=2", r"parallelism\.cp=2.*whole sequences"),
        ("gemma", {}, "parallelism.pp=2", r"parallelism\.pp=2.*no stages"),
        ("gemma", {}, "parallelism.ep=2", r"has no experts"),
        ("gemma", {}, "parallelism.tp=4", r"4 query heads with 2 key and value heads"),
        ("gpt2", {}, "training.seq_len=64", r"config_overrides\.resid_pdrop=0\.0"),
        ("gemma", {"model_type": "gema"}, "training.seq_len=64", r"did you mean gemma"),
        ("gemma", {"model_type": "own", "auto_map": {}}, "training.seq_len=64", r"never executed"),
        ("t5", {}, "training.seq_len=64", r"encoder-decoder"),
    ],
)
def test_what_a_class_cannot_have_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], overrides: str, message: str
):
    folder = write_config(tmp_path, name, **changes)
    words = ["model=huggingface", f"model.repository={folder}", "cluster.device=cpu", *overrides.split()]
    with pytest.raises(UserError, match=rf"(?s){message}"):
        check(resolve_layout(to_experiment(compose(words)), 1))


def test_a_wrong_path_is_answered_when_the_run_is_composed(tmp_path: Path):
    write_config(tmp_path, "gemma")
    (tmp_path / "empty").mkdir()
    answers = {"gema": "no such folder\n.*did you mean .*gemma", "empty": "has no config.json", "x/y": "no such folder"}
    for folder, message in answers.items():
        with pytest.raises(UserError, match=message) as caught:
            config_of(tmp_path / folder)
        assert [violation.field for violation in caught.value.violations] == ["model.repository"]


def test_a_name_is_answered_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=unreachable))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("it would try again for a minute"))
    with pytest.raises(UserError, match="organisation/name") as caught:
        config_of(Path("nobody/nothing"))
    assert "no route to host" in str(caught.value)


def test_an_unknown_role_is_answered_with_the_roles():
    with pytest.raises(UserError, match=r"lr_scales\.experts: unknown choice\n.*did you mean expert\?"):
        to_experiment(compose(["+optimizer.lr_scales.experts=0.5"]))


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(write_config(tmp_path, "gemma", initializer_range=0.03))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'titan_exp\[huggingface\]'"):
        model_spec(config)


def test_the_example_of_the_guide_is_a_model():
    spec = model_spec(config_of(Path("docs/examples/olmo_debug")))
    assert spec is not None
    assert spec.parameters > 0


def test_opening_a_folder_of_an_unknown_type_says_so(tmp_path: Path):
    folder = write_config(tmp_path, "gemma", model_type="unheard")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="unheard"):
        open_checkpoint(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "unheard"
