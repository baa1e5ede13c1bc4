"""Loss by position against the loss of each token alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.inference.test_evaluate import SETTINGS, evaluated
from tests.ranks import run_ranks
from tests.trainer.test_trainer import experiment, run
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.data.batch import Batch
from titan_exp.extensions.analysis import loss_by_position
from titan_exp.extensions.analysis.loss_by_position import LossByPosition, lines, octave, positions
from titan_exp.inference.evaluate import evaluate_command, evaluate_source, evaluation_experiment, observations
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group

VOCAB, DIM = 11, 6


class Head(nn.Module):
    """Embedding and head; computes the loss where it is given one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, DIM, generator=generator))
        self.head = nn.Parameter(torch.randn(VOCAB, DIM, generator=generator))

    def forward(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, loss=None):
        hidden = F.embedding(tokens, self.table)
        return hidden @ self.head.T if loss is None else loss(hidden, self.head)


def batch_of(*, documents: bool, restart: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCAB, (2, 9), generator=generator) for _ in range(2))
    labels[0, 3] = labels[1, 5] = IGNORE_INDEX
    index = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]])
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0, 1, 2]])
    return Batch(tokens, labels, place if restart else None, index if documents else None)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize(("documents", "restart"), [(False, False), (True, False), (False, True), (True, True)])
def test_octaves_have_the_mean_loss_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int | None, documents: bool, restart: bool
):
    monkeypatch.setattr(loss_by_position, "CHUNK", 4)
    model, batch = Head(), batch_of(documents=documents, restart=restart)
    objective = LossByPosition(chunk_tokens)
    with torch.no_grad(), joined_process_group(torch.device("cpu")):
        total = sum(objective(model, batch).metrics["loss"] for _ in range(2))
        found = objective.octaves(build_mesh(experiment().parallelism, torch.device("cpu")))
        losses = F.cross_entropy(
            model(batch.tokens, None, None).flatten(0, 1), batch.labels.flatten(), reduction="none"
        )
    place = batch_of(documents=True, restart=True).positions if documents or restart else torch.arange(9).repeat(2, 1)
    assert place is not None
    expected = {}
    for position, loss, label in zip(place.flatten().tolist(), losses.tolist(), batch.labels.flatten(), strict=True):
        if label != IGNORE_INDEX:
            expected.setdefault(position.bit_length(), []).append(loss)
    spans = {0: (0, 0), 1: (1, 1), 2: (2, 3), 3: (4, 7), 4: (8, 15)}
    assert [(each.first, each.last) for each in found] == [spans[index] for index in sorted(expected)]
    for each, (_, members) in zip(found, sorted(expected.items()), strict=True):
        assert each.tokens == 2 * len(members)
        assert each.loss == pytest.approx(sum(members) / len(members), rel=1e-6)
    assert float(total) == pytest.approx(2 * sum(sum(members) for members in expected.values()), rel=1e-6)
    assert f"0  {found[0].loss:.4f}  of {found[0].tokens} tokens" in list(lines(found))[1]


def test_a_document_begins_at_position_0():
    expected = batch_of(documents=True, restart=True).positions
    assert expected is not None
    assert torch.equal(positions(batch_of(documents=True, restart=False)), expected)
    assert octave(torch.tensor([0, 1, 2, 3, 4, 7, 8, 131072])).tolist() == [0, 1, 2, 2, 3, 3, 4, 18]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    run(path, *SETTINGS)
    (path / "config.yaml").write_text(to_yaml(experiment(*SETTINGS)))
    return path


def test_every_layout_has_the_same_loss_by_position(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(200)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    expected = evaluated(capsys, trained, *words, "--positions")
    layout = ["parallelism.tp=2", "parallelism.dp_shard=2"]
    found = run_ranks(4, evaluate_on_rank, str(trained), [*words, *layout])[0]
    octaves = expected["positions"]
    assert [octave["first"] for octave in octaves] == [0, 1, 2, 4, 8, 16, 32]
    assert sum(octave["tokens"] for octave in octaves) == expected["tokens"]
    total = sum(octave["tokens"] * octave["loss"] for octave in octaves)
    assert total / expected["tokens"] == pytest.approx(expected["loss"], rel=1e-6)
    for shared, alone in zip(found, octaves, strict=True):
        assert shared == {**alone, "loss": pytest.approx(alone["loss"], rel=1e-5)}


def evaluate_on_rank(path: str, words: list[str]) -> list[dict[str, Any]]:
    source, device = open_checkpoint(Path(path)), torch.device("cpu")
    asked = evaluation_experiment(Path(path), source, words)
    with joined_process_group(device):
        mesh = build_mesh(asked.parallelism, device)
        return evaluate_source(source, asked, mesh, observed=observations(["positions"])).observed["positions"]


def test_ranks_that_share_sequences_are_refused(trained: Path):
    with pytest.raises(UserError, match=r"parallelism\.dp_shard=2"):
        evaluate_command([str(trained), "--positions", "parallelism.cp=2"])


def test_the_flag_may_be_a_value(trained: Path, capsys: pytest.CaptureFixture[str]):
    assert "positions" in evaluated(capsys, trained, "positions=true")
    assert "positions" not in evaluated(capsys, trained, "positions=false")
