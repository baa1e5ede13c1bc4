"""Identity of the data: recorded per attempt, checked against checkpoints and the last attempt."""

from pathlib import Path

import pytest

from tests.trainer.committed import committed
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import CONTENT
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.rank_main import main


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {number} of the corpus\n" for number in range(300)))
    return path


def folder_of(corpus: Path, *overrides: str) -> RunFolder:
    data = ["data=text", f"data.paths=[{corpus}]", "data.document=line"]
    words = ["+experiment=smoke", *data, "training.steps=2", "evaluation.every=0", "parallelism.dp_shard=1"]
    return committed(corpus.parent / "runs" / "smoke" / "a", [*words, *overrides])


def test_recorded_and_compared_with_the_last_attempt(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(corpus, "checkpoint=none")
    for _ in range(2):
        folder.add_attempt(world_size=1, hosts=[])
        main(str(folder.path))
        assert "changed since the last attempt" not in capfd.readouterr().out
    corpus.write_text(corpus.read_text().replace("line", "LINE"))
    folder.add_attempt(world_size=1, hosts=[])
    main(str(folder.path))
    first, second, third = [row.data for row in folder.read_attempts() if row.data is not None]
    assert first == second
    assert first | {CONTENT: third[CONTENT]} == third != first
    out = capfd.readouterr().out
    assert f"data.content changed since the last attempt, from {first[CONTENT]} to {third[CONTENT]}" in out


def test_a_checkpoint_does_not_continue_on_an_edited_corpus(corpus: Path) -> None:
    folder = folder_of(corpus, "checkpoint.every=1")
    main(str(folder.path))
    corpus.write_text(corpus.read_text().replace("line 7 ", "line 8 "))
    folder.config.write_text(folder.config.read_text().replace("steps: 2\n", "steps: 3\n"))
    with pytest.raises(UserError, match=r"cannot continue on other data[\s\S]*data\.content="):
        main(str(folder.path))
