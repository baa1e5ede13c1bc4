"""Rules about a text's files: without text, without documents for a split, and too large to tokenize at the start."""

import re
import shlex
from pathlib import Path

import pytest

from tests.config.composing import experiment
from tests.config.test_remedies import typed
from titan_exp.cli.main import main
from titan_exp.config import data_files
from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.source_check import training_subset, validation_subset
from titan_exp.data.sources.base import build_source
from titan_exp.rules import violations
from titan_exp.rules.data import unreadable_source

WORDS = ["model=llama_debug", "evaluation.every=0", "training.seq_len=64"]


def text_words(folder: Path, *words: str) -> list[str]:
    return [*WORDS, "data=text", f"data.paths=['{folder}']", *words]


def found(words: list[str]) -> list[Violation]:
    """Violations of a run that is launched for the first time."""
    return violations(experiment(*words), lambda _: False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty texts of 1,000 bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number:03d} " * 250)
    return tmp_path / "text"


@pytest.mark.parametrize(
    ("name", "content", "word", "reason"),
    [
        ("a.txt", b"", "", "none of these files contains text"),
        ("a.txt", b"a\0b", "", "none of these files contains text"),
        (".hidden", b"text", "", "no files other than hidden ones"),
        ("__pycache__/a.txt", b"text", "", "no files other than hidden ones"),
        ("a.txt", b" \n" * 9000, "data.document=paragraph", "all files of data.paths are blank"),
        ("a.txt", b"\n\n", "data.document=line", "all files of data.paths are blank"),
    ],
)
@pytest.mark.filterwarnings(r"ignore:data\.paths. skipped 1 binary file")
def test_a_text_without_text_is_found_before_the_launch(
    name: str, content: bytes, word: str, reason: str, tmp_path: Path
):
    (tmp_path / "text" / name).parent.mkdir(parents=True)
    (tmp_path / "text" / name).write_bytes(content)
    words = text_words(tmp_path / "text", *filter(None, [word]))
    (violation,) = found(words)
    assert violation.field == ("data.document" if word else "data.paths")
    assert reason in violation.reason
    assert unreadable_source(experiment(*words)) == [violation], "tokenize says the same"
    with pytest.raises(UserError) as at_a_rank:
        build_source(experiment(*words).data)
    if "hidden" not in reason:
        assert violation.reason in str(at_a_rank.value)
    (tmp_path / "text" / "b.txt").write_bytes(b" \n" * 9000 + b"text")
    assert found(words) == []


def test_data_files_without_rows(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    words = [*WORDS, "data=huggingface", "data.dataset=json", f"data.data_files=['{tmp_path}/a.jsonl']"]
    (violation,) = found(words)
    assert (violation.field, violation.reason) == ("data.data_files", "there are no rows")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert found(words) == []


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(data_files, "is_binary", refuse)
    (violation,) = found(text_words(folder))
    assert "txt (permission denied)" in violation.reason


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.1, 0.5, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("evaluates", [True, False])
def test_files_that_cannot_be_divided_are_found_with_the_words_of_a_rank(
    folder: Path, fraction: float, evaluates: bool, monkeypatch: pytest.MonkeyPatch
):
    for path in sorted(folder.iterdir())[3:]:
        path.unlink()
    (folder / "binary.txt").write_bytes(b"\0")
    words = text_words(folder, f"data.validation_fraction={fraction}", f"evaluation.every={int(evaluates)}")
    with pytest.warns(UserWarning, match="binary"):
        source = build_source(experiment(*words).data)
    said = ""
    for split in (training_subset, *[validation_subset] * evaluates):
        try:
            split(source, fraction)  # type: ignore[arg-type]
        except UserError as error:
            said = said or str(error.violations[0])
    assert "\n".join(map(str, found(words))) == said
    enough = re.search(r"data\.validation_fraction=(\S+) holds", said)
    if enough:
        assert found(typed(words, [f"data.validation_fraction={enough[1]}"])) == []


def test_one_file_of_a_folder_is_one_document(tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("text")
    (violation,) = found(text_words(tmp_path / "text", "evaluation.every=5"))
    assert "your one file is one document" in violation.reason
    assert found(text_words(tmp_path / "text", "evaluation.every=5", "data.document=paragraph")) == []


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text that is larger than the lowered limit."""
    monkeypatch.setattr(data_files, "LARGEST_TEXT", 30_000)
    return folder


def test_a_large_text_is_refused_until_a_remedy_is_typed(large: Path, capsys: pytest.CaptureFixture[str]):
    words = text_words(large, "data.document=line", "data.validation_fraction=0.2", "evaluation.every=5")
    (violation,) = found(words)
    assert violation.field == "data.streaming"
    assert "you have 3.73e-05 GiB of text" in violation.reason
    assert "while its GPUs wait, which takes one core at least 1 min" in violation.reason
    assert "64 virtual shards reads all its documents before it repeats one" in violation.remedy
    assert found([*words, "data.streaming=true"]) == []
    command, _, rest = violation.remedy.removeprefix("run ").partition(", then train with ")
    assert main(shlex.split(command)[1:]) == 0
    assert "held out" in capsys.readouterr().out
    overrides, _, replaced = rest.partition(". Or use ")[0].partition(" instead of ")
    gone = re.split(r", | and ", replaced)
    kept = [word for word in words if word not in gone and word.partition("=")[0] not in gone]
    assert found([*kept, *shlex.split(overrides)]) == []
    assert "data=text" in gone
    assert len(kept) == len(words) - 4


def test_a_large_data_set_of_files_is_refused_too(large: Path):
    lines = "".join(f'{{"body": "{number:0100d}"}}\n' for number in range(400))
    (large / "it's.jsonl").write_text(lines)
    words = [*WORDS, "data=huggingface", "data.dataset=json", "data.text_column=body", "evaluation.every=5"]
    words.append(f'data.data_files=["{large}/it\'s.jsonl"]')
    (violation,) = found(words)
    command, _, rest = violation.remedy.removeprefix("run ").partition(", then train with ")
    assert main(shlex.split(command)[1:]) == 0
    streamed = rest.partition(". Or use ")[2].partition(",")[0].split()
    assert streamed == ["data.streaming=true", "data.validation_documents=1024"]
    assert found([*words, *streamed]) == []


def test_binary_files_and_other_sources_have_no_size(large: Path):
    for path in sorted(large.iterdir())[5:]:
        path.write_bytes(b"\0" * 1000)
    assert found(text_words(large)) == []
    assert found(WORDS) == []


def test_a_run_that_has_begun_goes_on_and_a_plan_needs_no_store(large: Path):
    assert len(found(text_words(large))) == 1
    assert violations(experiment(*text_words(large)), lambda _: True) == []
    assert violations(experiment(*text_words(large))) == [], "a plan waits for no store"


@pytest.mark.parametrize(
    ("recorded", "words", "field"),
    [
        ('{"data.virtual_shards": 64}', [], None),
        ("null", [], None),  # of a version that recorded none
        ('{"data.virtual_shards": 64}', ["checkpoint.continue_data=restart"], "data.streaming"),
        ('{"data.streaming": false}', [], "data.streaming"),
        ('{"data.streaming": false}', ["data.streaming=true"], "data.streaming"),
        ('{"data.streaming": false}', ["data.streaming=true", "checkpoint.continue_data=restart"], None),
        ('{"data.virtual_shards": 64}', ["data.streaming=true"], None),
    ],
)
def test_a_parents_order_goes_on(recorded: str, words: list[str], field: str | None, large: Path, tmp_path: Path):
    parent = tmp_path / "runs/first/abc"
    (parent / "checkpoints/step-00000005").mkdir(parents=True)
    (parent / "checkpoints/step-00000005/.metadata").write_bytes(b"x")
    (parent / "config.yaml").write_text("{}")
    (parent / "attempts.jsonl").write_text(f'{{"data": {recorded}}}\n')
    continued = [f"paths.runs={tmp_path}/runs", "checkpoint.continue_from=first/abc", "training.steps=10"]
    assert [one.field for one in found([*text_words(large), *continued, *words])] == [field] * (field is not None)


def test_all_files_are_listed_and_few_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    opened, check = list[Path](), data_files.is_binary
    monkeypatch.setattr(data_files, "is_binary", lambda path: opened.append(path) or check(path))
    assert found(text_words(folder, "data.validation_fraction=0.5", "evaluation.every=5")) == []
    assert len(opened) <= 3, "the first, one to train on, and one to evaluate on"
    assert sum(unit_hash(f"{number}.txt") < 0.5 for number in range(40)) > 5
