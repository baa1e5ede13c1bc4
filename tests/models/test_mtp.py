"""Multi-token prediction against blocks of `transformers`, joined and scored in plain torch, position by position."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.deepseek_shapes import LITE, V3
from tests.models.test_deepseek import exported, noisy_model, their_gradients
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import load_hf_sharded, open_checkpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.batch import Batch, collate
from titan_exp.models.build import build_model
from titan_exp.models.deepseek import spec, state_dict_map
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.transformer import MTPConfig
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.trainer.objective import (
    LanguageModeling,
    MultiTokenPrediction,
    loss_divisors,
    normalize_by_tokens,
    token_counts,
)
from titan_exp.trainer.restore import load_source

transformers = pytest.importorskip("transformers")

SHAPES = {"v3": replace(V3, mtp=MTPConfig(2, 0.3)), "lite": replace(LITE, mtp=MTPConfig(1, 0.7))}
WINDOWS = np.random.default_rng(0).integers(0, 256, (2, 33))
STARTS = [[5, 6, 20], [31]]
SHARED_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def batch_of(*, documents: bool, depth: int) -> Batch:
    batch = collate(WINDOWS, STARTS if documents else [[], []], document_mask=documents, reset_positions=False)
    return batch.with_further(depth)


def document_of(row: int, place: int, *, documents: bool) -> int:
    return sum(start <= place for start in STARTS[row]) if documents else 0


class Reference(nn.Module):
    """The blocks of `transformers`, one of them for each module, and a module's own weights from the exported files."""

    def __init__(self, folder: Path, layers: int, depth: int) -> None:
        super().__init__()
        config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=layers + depth)
        self.theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).eval()
        tensors = load_file(folder / "model.safetensors")
        self.layers, self.eps, self.own = layers, config.rms_norm_eps, nn.ParameterDict()
        for module in range(layers, layers + depth):
            for name in SHARED_NAMES:
                key = f"model.layers.{module}.{name}.weight"
                self.own[key.replace(".", "/")] = nn.Parameter(tensors[key])

    def norm(self, x: torch.Tensor, key: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.own[key]

    def block(self, number: int, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        rope = self.theirs.model.rotary_emb(x, positions)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None]
        found = self.theirs.model.layers[number](
            x, attention_mask=mask, position_embeddings=rope, position_ids=positions
        )
        return found[0] if isinstance(found, tuple) else found

    def losses(self, depth: int, *, documents: bool) -> tuple[list[torch.Tensor], list[int]]:
        """Mean cross-entropy of the main model and of each module, and the numbers of tokens."""
        length = WINDOWS.shape[1] - 1
        hidden = torch.zeros(2, length, length, dtype=torch.bool)
        for row in range(2):
            for query in range(length):
                for key in range(length):
                    other = document_of(row, query, documents=documents) != document_of(row, key, documents=documents)
                    hidden[row, query, key] = key > query or other
        tokens = torch.from_numpy(WINDOWS)
        x = self.theirs.model.embed_tokens(tokens[:, :-1])
        for number in range(self.layers):
            x = self.block(number, x, hidden)
        x = self.theirs.model.norm(x)
        means, counts = [], []
        for ahead in range(depth + 1):
            if ahead:
                # The last tokens look at no embedding: nothing that is scored reads their outputs.
                embedded = torch.zeros_like(x)
                for place in range(length - ahead):
                    embedded[:, place] = self.theirs.model.embed_tokens(tokens[:, place + ahead])
                key = f"model/layers/{self.layers + ahead - 1}"
                joined = torch.cat((self.norm(embedded, f"{key}/enorm/weight"), self.norm(x, f"{key}/hnorm/weight")), 2)
                joined = joined @ self.own[f"{key}/eh_proj/weight"].T
                x = self.norm(self.block(self.layers + ahead - 1, joined, hidden), f"{key}/shared_head/norm/weight")
            scores = self.theirs.lm_head(x).log_softmax(-1)
            found = []
            for row in range(2):
                for place in range(length):
                    target = place + ahead + 1
                    if target > length or document_of(row, place, documents=documents) != document_of(
                        row, target, documents=documents
                    ):
                        continue
                    found.append(-scores[row, place, tokens[row, target]])
            means.append(torch.stack(found).mean())
            counts.append(len(found))
        return means, counts


@pytest.mark.parametrize(
    ("version", "documents", "chunk"), [("v3", True, None), ("v3", False, 7), ("lite", True, 7), ("lite", False, None)]
)
def test_losses_and_gradients_equal(tmp_path: Path, version: str, documents: bool, chunk: int | None):
    config = SHAPES[version]
    depth, weight = config.mtp.depth, config.mtp.weight
    ours = noisy_model(config)
    reference = Reference(exported(ours, config, tmp_path / "export"), config.layers, depth)
    means, counts = reference.losses(depth, documents=documents)
    (means[0] + weight / depth * sum(means[1:])).backward()

    batch = batch_of(documents=documents, depth=depth)
    objective = MultiTokenPrediction(LanguageModeling(chunk), depth, weight)
    assert token_counts(objective, batch) == counts
    found, metrics = normalize_by_tokens(objective, ours, batch, loss_divisors(counts, torch.device("cpu")))
    found.backward()
    named = ["loss", *(f"mtp_loss_{number}" for number in range(1, depth + 1))]
    assert [*metrics] == named == ["loss", *objective.metrics]
    torch.testing.assert_close(torch.stack([metrics[name] for name in named]), torch.stack(means), atol=1e-5, rtol=1e-5)
    theirs = {name.removeprefix("theirs."): gradient for name, gradient in their_gradients(reference.theirs).items()}
    theirs |= {key.replace("/", "."): weight.grad for key, weight in reference.own.items()}
    reader = ImportReader(TorchFileReader(theirs), state_dict_map(config, "huggingface"))
    for name, parameter in ours.named_parameters():
        wanted = reader.read(name)
        assert parameter.grad is not None
        assert wanted.norm() > 0
        assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm(), name


def test_an_evaluation_runs_no_module():
    config = SHAPES["v3"]
    model, batch = noisy_model(config), batch_of(documents=False, depth=0)
    for number in range(config.layers, config.layers + 2):
        model.get_submodule(f"blocks.{number}").forward = None  # type: ignore[assignment]
    found = MultiTokenPrediction(LanguageModeling(), 2, 0.3)(model, batch)
    without = noisy_model(V3)
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(found.total, LanguageModeling()(without, batch).total)
    assert [*found.metrics] == ["loss"]


@pytest.mark.parametrize("documents", [False, True])
def test_labels_are_those_further_ahead_in_the_document(documents: bool):
    batch = batch_of(documents=documents, depth=3)
    for ahead, part in enumerate(batch.further, 1):
        for row in range(2):
            for place in range(32):
                target = place + ahead + 1
                same = target <= 32 and len({document_of(row, at, documents=documents) for at in (place, target)}) == 1
                assert part.labels[row, place] == (WINDOWS[row, target] if same else IGNORE_INDEX)
                assert part.tokens[row, place] == WINDOWS[row, min(place + ahead, 31)]


def test_a_token_without_a_label_is_not_counted():
    batch = batch_of(documents=False, depth=0)
    batch.labels[0, 10] = IGNORE_INDEX
    (part,) = batch.with_further(1).further
    assert part.labels[0, 9] == IGNORE_INDEX
    assert part.labels[0, 10] == batch.labels[0, 11]


@pytest.mark.parametrize("version", SHAPES)
def test_exported_modules_come_back_byte_for_byte(tmp_path: Path, version: str):
    config = SHAPES[version]
    model = noisy_model(config)
    first = exported(model, config, tmp_path / "first")
    source = open_checkpoint(first)
    assert source.model == replace(config, name="first", mtp=replace(config.mtp, weight=0.3))
    export_weights(source, tmp_path / "second", ExportOptions("huggingface"))
    assert (tmp_path / "second" / "config.json").read_bytes() == (first / "config.json").read_bytes()
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "second", first))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    last = f"model.layers.{config.layers + config.mtp.depth - 1}"
    assert torch.equal(expected[f"{last}.embed_tokens.weight"], expected["model.embed_tokens.weight"])
    assert torch.equal(expected[f"{last}.shared_head.head.weight"], expected["lm_head.weight"])
    loaded = build_model(config, seq_len=32, attention_backend="math")
    load_hf_sharded(loaded, config, first)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_modules_leaves_them_unread(tmp_path: Path):
    config = SHAPES["v3"]
    folder = exported(noisy_model(config), config, tmp_path / "export")
    load_hf_sharded(build_model(V3, seq_len=32, attention_backend="math"), V3, folder)
    assert not any(
        "projection" in name
        for name in load_source(open_checkpoint(folder), torch.device("cpu"), seq_len=9).state_dict()
    )
    tensors = load_file(folder / "model.safetensors")
    dropped = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("model.layers.3.", "model.layers.4."))
    }
    save_file(dropped, folder / "model.safetensors")
    assert open_checkpoint(folder).model == replace(V3, name="export")
    with pytest.raises(UserError, match=r"model.mtp.depth=2: .*/export has 0"):
        load_hf_sharded(build_model(config, seq_len=32, attention_backend="math"), config, folder)


def test_the_published_model_has_its_modules_parameters():
    """11.6 billion more, and 0.7 active, besides embedding and head, which are shared."""
    plain, more = (
        model_spec(to_experiment(compose(["model=deepseek_v3_671b", f"model.mtp.depth={depth}"])).model)
        for depth in (0, 1)
    )
    assert plain is not None
    assert more is not None
    assert plain.parameters == 671_026_404_352
    assert more.parameters - plain.parameters == 11_610_067_968
    assert more.active_parameters - plain.active_parameters == 688_100_352
    module, head = more.blocks[61].flops_per_token(4096), 6 * 129_280 * 7168
    assert more.flops_per_token(4096) - plain.flops_per_token(4096) == pytest.approx(module + head)


def test_the_spec_has_every_parameter():
    config = SHAPES["v3"]
    with torch.device("meta"):
        model = build_model(config, seq_len=16, attention_backend="math")
    assert spec(config).parameters == sum(parameter.numel() for parameter in model.parameters())
    described: Any = spec(config).pipeline
    assert (described.copied, described.shared) == (("embedding",), ())
