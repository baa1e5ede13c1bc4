"""Specialization of experts: classes of tokens, and what experts are counted to have."""

import json
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from tests.parity.runs import PARAGRAPHS
from tests.ranks import run_ranks
from tests.trainer.test_trainer import experiment, run
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.data.batch import Batch
from titan_exp.data.tokenizers import ByteTokenizer
from titan_exp.extensions.analysis.experts import CLASSES, ExpertClasses, TokenClassifier, learned_experts, lines
from titan_exp.inference.evaluate import Evaluation, evaluate_command
from titan_exp.models.blocks.feed_forward import Router
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig, RouterSpec
from titan_exp.ops.cross_entropy import IGNORE_INDEX
from titan_exp.parallel.mesh import Mesh

CODE = "def f_1(x):\n    return [x, 'É'] + 20\n"
SETTINGS = (
    *("model=qwen3_moe_debug", "checkpoint.mode=sync", "training.steps=2", *PARAGRAPHS),
    *("data.validation_fraction=0.1", "data.validation_documents=40"),
)
ALONE = cast(Mesh, SimpleNamespace(world=SimpleNamespace(size=lambda: 1)))


def classes_of(text: str) -> list[tuple[str, str]]:
    """Neighbouring bytes of one class, joined."""
    tokens = ByteTokenizer().encode(text).tolist()
    found: list[tuple[str, str]] = []
    for token, place in zip(tokens, TokenClassifier(ByteTokenizer()).classify(tokens), strict=True):
        letter, name = ByteTokenizer().decode([token]), CLASSES[place]
        if found and found[-1][1] == name:
            found[-1] = found[-1][0] + letter, name
        else:
            found.append((letter, name))
    return found


def test_bytes_of_code_have_classes():
    assert classes_of(CODE) == [
        *(("def", "keywords"), (" ", "spaces"), ("f", "word starts"), ("_", "underscores"), ("1", "digits")),
        *(("(", "brackets"), ("x", "word starts"), (")", "brackets"), (":", "punctuation"), ("\n", "line breaks")),
        *(("    ", "indentation"), ("return", "keywords"), (" ", "spaces"), ("[", "brackets"), ("x", "word starts")),
        *((",", "punctuation"), (" ", "spaces"), ("'", "quotes"), ("\ufffd\ufffd", "other characters")),
        *(("'", "quotes"), ("]", "brackets"), (" ", "spaces"), ("+", "operators"), (" ", "spaces")),
        *(("20", "digits"), ("\n", "line breaks")),
    ]


def test_english_has_no_keywords():
    assert classes_of("If is") == [
        *(("I", "capital letters"), ("f", "letters inside words"), (" ", "spaces")),
        *(("i", "word starts"), ("s", "letters inside words")),
    ]


def test_a_token_of_several_characters_has_the_class_of_its_first():
    words = {0: "def", 1: " run", 2: "ning", 3: "():\n", 4: "    ", 5: " ", 6: "", 7: "    1"}
    tokenizer = SimpleNamespace(vocab_size=8, end_of_text=6, decode=lambda ids: words[ids[0]])
    classifier = TokenClassifier(tokenizer)  # type: ignore[arg-type]  # what it needs of one
    names = [CLASSES[place] for place in classifier.classify([0, 1, 2, 3, 4, 1, 5, 6, 7])]
    assert names == [
        *("keywords", "word starts", "letters inside words", "brackets", "indentation", "word starts"),
        *("spaces", "ends of text", "digits"),
    ]
    assert [CLASSES[place] for place in classifier.classify([6, 6])] == ["ends of text"] * 2


def made_router() -> Router:
    """Router of four experts that reads the expert from the input, which is one-hot."""
    balance = BalanceConfig("none", 0.0, 0.0, 0.0, True)
    moe = MoEConfig(4, 1, 32, 0, "softmax", True, False, True, 1.0, 1, 1, "max", balance)
    router = Router(RouterSpec("router", 4, 0.02, moe))
    with torch.no_grad():
        router.weight.copy_(10 * torch.eye(4))
    return router


def test_the_favourite_of_an_expert_is_what_was_routed_to_it():
    """Expert 0 gets brackets, 1 digits and half of the spaces, 2 the rest; padding is not counted."""
    router = made_router()
    text = "( 1 a ) 2 b [ 3 c ] 4 d " * 30
    tokens = torch.from_numpy(ByteTokenizer().encode(text).astype(np.int64))[None]
    labels = torch.full_like(tokens, 1)
    labels[:, -12:] = IGNORE_INDEX
    counted = ExpertClasses(
        torch.nn.ModuleDict({"router": router}), TokenClassifier(ByteTokenizer()), torch.device("cpu")
    )
    spaces = 0
    chosen = []
    for letter in text:
        spaces += letter == " "
        chosen.append(0 if letter in "()[]" else 1 if letter in "1234" or (letter == " " and spaces % 2) else 2)
    with counted.observe({"": [Batch(tokens, labels, None, None)]}) as watched:
        for _ in watched[""]:
            router(torch.eye(4)[chosen][None])
    (layer,) = counted.layers(ALONE)
    found = {expert.expert: expert for expert in layer.experts}
    assert (found[0].favourite, found[0].share) == ("brackets", 1.0)
    assert (found[1].favourite, found[2].favourite) == ("digits", "word starts")
    assert found[0].overall == pytest.approx(1 / 6, abs=1e-3)
    assert found[1].share == pytest.approx(0.4, abs=0.01), "digits and half of the spaces"
    assert sum(expert.tokens for expert in layer.experts) == len(text) - 12
    assert sorted(found[0].most_frequent) == ["(", ")", "[", "]"]
    assert layer.unused == 1
    assert 0.5 < layer.information < 1
    assert "expert 0: 100% of its 118 tokens are brackets, 16.7% of all tokens are; most often" in "\n".join(
        lines([layer], 1)
    )
    router(torch.eye(4)[[0]][None])
    assert int(sum(counts[:, : len(CLASSES)].sum() for counts in counted.counts.values())) == len(text) - 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    run(path, *SETTINGS)
    (path / "config.yaml").write_text(to_yaml(experiment(*SETTINGS)))
    return path


def test_evaluate_prints_the_experts(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} (of) a text" for number in range(60)))
    words = ["data=text", f"data.paths=[{tmp_path}/text.txt]", "data.document=line", "data.validation_fraction=0.5"]
    assert evaluate_command([str(trained), *words, "--experts", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in alone["experts"]] == [f"layer_{number}" for number in range(4)]
    for layer in alone["experts"]:
        tokens = sum(expert["tokens"] for expert in layer["experts"])
        assert 3 * alone["tokens"] - 50 * layer["unused"] <= tokens <= 3 * alone["tokens"]
    shared = run_ranks(2, evaluate_on_rank, str(trained), [*words, "parallelism.dp_shard=2", "parallelism.ep=2"])
    for rank in shared:
        assert rank["experts"] == alone["experts"]
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert evaluate_command([str(trained), *words, "--experts"]) == 0
    assert "layer 3: the choice of experts tells" in capsys.readouterr().out


def evaluate_on_rank(path: str, words: list[str]) -> dict:
    import dataclasses

    from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
    from titan_exp.inference.evaluate import evaluate_source, evaluation_experiment, observations
    from titan_exp.parallel.mesh import build_mesh
    from titan_exp.trainer.distributed import joined_process_group

    source, device = open_checkpoint(Path(path)), torch.device("cpu")
    asked = evaluation_experiment(Path(path), source, words)
    with joined_process_group(device):
        mesh = build_mesh(asked.parallelism, device, experts=True)
        found = evaluate_source(source, asked, mesh, observed=observations(["experts"]))
    read = Evaluation.from_json(json.loads(json.dumps(dataclasses.asdict(found))))
    assert read == found
    return {"loss": read.result.loss, **read.observed}


def test_a_run_ends_with_a_summary(trained: Path):
    text = list(learned_experts(trained))
    assert text[0].startswith("experts on ")
    assert sum(line.startswith("  layer ") for line in text) == 4
    named = [line.partition(" are ")[2].partition(",")[0] for line in text if line.startswith("    expert ")]
    assert 4 <= len(named) <= 4 * 4
    for layer in range(4):
        begin = next(place for place, line in enumerate(text) if line.startswith(f"  layer {layer}:"))
        here = [line.partition(" are ")[2].partition(",")[0] for line in text[begin + 1 :]]
        of_layer = list(takewhile(bool, here))
        assert len({*of_layer}) == len(of_layer), "each with another favourite"


def test_show_loads_no_model_for_a_summary(trained: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(trained)]) == 0
    found = capsys.readouterr().out
    assert f"titan-exp evaluate {trained}" in found
    assert "experts on " not in found


def test_without_held_out_text_the_summary_says_so(tmp_path: Path):
    (line,) = learned_experts(tmp_path)
    assert line.startswith("we could not measure what its experts learned: ")


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.cp=2"])
def test_ranks_that_share_sequences_are_refused(trained: Path, layout: str):
    with pytest.raises(UserError, match=r"parallelism\.dp_shard=2"):
        evaluate_command([str(trained), "--experts", layout])


def test_a_dense_model_is_refused(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    words = ("checkpoint.mode=sync", "training.steps=1", *PARAGRAPHS)
    run(path, *words)
    (path / "config.yaml").write_text(to_yaml(experiment(*words)))
    with pytest.raises(UserError, match="has no experts"):
        evaluate_command([str(path), "--experts"])
