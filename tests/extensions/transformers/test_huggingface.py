"""Classes of transformers as models of ours, against the classes themselves: the same weights, the same numbers."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extensions.transformers.hf_folders import write_config
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint, open_huggingface
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.extensions.transformers import huggingface
from titan_exp.extensions.transformers.huggingface import token_mixing
from titan_exp.extensions.transformers.repository import UNLIMITED, class_config
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.build import build_model, init_specs
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.rules import check

transformers = pytest.importorskip("transformers")
CLASSES = ("gemma", "gpt_neox", "olmo2", "phi3", "mistral", "qwen3_moe", "deepseek_v3")


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
    assert {name for name in missing if not name.endswith("e_score_correction_bias")} <= {"lm_head.weight"}
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
        ("lfm2", {}, "parallelism.cp=2", r"parallelism\.cp=2: Lfm2ShortConv mixes tokens"),
        ("lfm2", {}, "parallelism.pp=2", r"parallelism\.pp=2: Lfm2ForCausalLM: it brings no pipeline plan"),
        ("gemma", {}, "parallelism.ep=2", r"has no experts"),
        ("qwen3_moe", {}, "parallelism.tp=2 parallelism.etp=2", r"etp=2: .*halves no rank may cut"),
        ("gemma", {}, "parallelism.tp=4", r"4 query heads with 2 key and value heads"),
        ("gpt2", {}, "training.seq_len=64", r"config_overrides\.resid_pdrop=0\.0"),
        (
            "qwen3_moe",
            {"model_type": "mixtral", "router_jitter_noise": 0.1},
            "training.seq_len=64",
            r"adds noise before its routers.*config_overrides\.router_jitter_noise=0\.0",
        ),
        ("gemma", {"model_type": "gema"}, "training.seq_len=64", r"did you mean gemma"),
        ("gemma", {"model_type": "own", "auto_map": {}}, "training.seq_len=64", r"never execute"),
        ("t5", {}, "training.seq_len=64", r"encoder-decoder"),
        ("olmo_hybrid", {}, "parallelism.tp=2", r"sequence_parallel=true: OlmoHybridGatedDeltaNet .* only the tokens"),
        ("olmo_hybrid", {}, "data.document_mask=true", r"document_mask=true: OlmoHybridGatedDeltaNet .* each other"),
        ("lfm2", {}, "data.document_mask=true", r"document_mask=true: Lfm2ShortConv"),
        ("bamba", {}, "data.document_mask=true", r"document_mask=true: BambaMixer"),
    ],
)
def test_what_a_class_cannot_have_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], overrides: str, message: str
):
    folder = write_config(tmp_path, name, **changes)
    words = ["model=huggingface", f"model.repository={folder}", "cluster.device=cpu", *overrides.split()]
    with pytest.raises(UserError, match=rf"(?s){message}"):
        check(resolve_layout(to_experiment(compose(words)), 1))


@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_mix_tokens_by_attention_alone_are_accepted(tmp_path: Path, name: str):
    assert token_mixing(config_of(write_config(tmp_path, name))) is None


@pytest.mark.parametrize(
    "overrides", ["parallelism.dp_shard=2", "parallelism.tp=2 parallelism.sequence_parallel=false"]
)
@pytest.mark.parametrize("name", ["olmo_hybrid", "qwen3_5_text"])
def test_a_hybrid_class_is_accepted_where_every_rank_sees_all_tokens(tmp_path: Path, name: str, overrides: str):
    folder = write_config(tmp_path, name)
    words = ["model=huggingface", f"model.repository={folder}", "cluster.device=cpu", *overrides.split()]
    check(resolve_layout(to_experiment(compose(words)), 1))


@pytest.mark.parametrize(
    ("module", "mixed"),
    [
        ("mlp", lambda hidden: hidden.cumsum(1)),
        ("mlp", lambda hidden: hidden.mean(1, keepdim=True).expand_as(hidden)),
        ("input_layernorm", lambda hidden: torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)),
        ("mlp", lambda hidden: hidden * 2),
    ],
    ids=["sum of earlier tokens", "mean of all tokens", "shift", "none"],
)
def test_token_mixers_are_found_by_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, mixed: Callable[[torch.Tensor], torch.Tensor]
):
    """Planted in the second layer, also where weights multiply it by zero."""
    modeling = pytest.importorskip("transformers.models.mistral.modeling_mistral")
    kind = {"mlp": modeling.MistralMLP, "input_layernorm": modeling.MistralRMSNorm}[module]
    plain, calls = kind.forward, list[int]()

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        out = plain(self, hidden)
        return out + 0 * mixed(hidden) if len(calls) % 2 == 0 else out

    monkeypatch.setattr(kind, "forward", forward)
    found = token_mixing.__wrapped__(config_of(write_config(tmp_path, "mistral")))
    expected = None if mixed(torch.ones(1, 2, 1)).eq(2).all() else f"{kind.__name__} mixes tokens outside attention"
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"model_type": "gemma4_text", "num_hidden_layers": 12, "num_key_value_heads": 2}, 6),
        ({"model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": {
            "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4}}, 2),
        ({"model_type": "laguna", "num_hidden_layers": 4, "num_attention_heads_per_layer": [4, 2, 4, 2]}, 2),
        ({"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"}, 3),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)  # fmt: skip
def test_lists_by_layer_are_cut_whatever_their_names(tmp_path: Path, changes: dict[str, Any], layers: int):
    config = config_of(write_config(tmp_path, "gemma", **changes))
    whole, cut = (class_config(given) for given in (config, dataclasses.replace(config, layers=layers)))
    assert cut.num_hidden_layers == layers
    assert cut.layer_types[: layers - 1] == whole.layer_types[: layers - 1]
    assert len(cut.layer_types) == layers


def test_every_class_is_composed_and_cut():
    """All but those that are refused for another reason than a size."""
    kept = {
        # Numbers of kinds of layers that add up to all; blocks of three models; a decoder of another one's cache.
        *("dory", "blt", "gemma4_assistant"),
        # Two layers of it have no attention, which the class refuses.
        "olmo_hybrid",
    }
    refused = set[str]()
    for name in {kind.model_type for kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}:
        try:
            values = json.loads(json.dumps(transformers.CONFIG_MAPPING[name]().to_dict(), default=str))
            config = huggingface._from_config_json(values, name)
            class_config(dataclasses.replace(config, layers=2))
        except Exception as error:
            if not any(word in str(error) for word in ("encoder-decoder", "images or sound")):
                refused.add(name)
    assert refused <= kept


def test_a_class_without_a_limit_has_none_and_one_with_its_own_is_named(tmp_path: Path):
    values = {"vocab_size": 320, "n_embd": 64, "hidden_size": 64, "n_layer": 2, "num_hidden_layers": 2, "n_head": 4}
    values |= {"num_heads": 8, "head_dim": 16}
    for name in ("gpt2", "mamba2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**values, "model_type": name}))
    mamba, gpt = (config_of(tmp_path / name) for name in ("mamba2", "gpt2"))
    assert (mamba.context, class_config(mamba).num_hidden_layers) == (UNLIMITED, 2)
    with pytest.raises(UserError, match=r"model\.context=1024"):
        class_config(gpt)
    assert class_config(dataclasses.replace(gpt, context=512)).n_positions == 512


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
