"""Layout gate of every launch: which runs are checked, refusals with ways that work, warnings, and the cache."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from titan_exp.cli.main import main
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.layout.cases import Verdict
from titan_exp.launch import memory_gate
from titan_exp.launch.memory_gate import cache_key, is_checked, layout_refusal, layout_verdicts
from titan_exp.plan.planner_processes import PlannerProcesses

OWN = "model.architecture=tests.models.own_planted"
SMALL = ["model=llama_debug", "cluster.device=cpu", "training.steps=1"]
TWO = "parallelism.dp_shard=2"
SHIFT = [OWN, "+model.planted=token_shift", "parallelism.dp_shard=1", "parallelism.tp=2"]


@pytest.fixture(scope="module")
def worker() -> Iterator[PlannerProcesses]:
    """One process for the checks of this file, since most of a check's time is the import of torch."""
    with PlannerProcesses(1, alone=True) as pool:
        yield pool


@pytest.fixture
def warm(worker: PlannerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks begin in that process, in place of one of their own."""
    monkeypatch.setattr(memory_gate, "PlannerProcesses", lambda *_, **__: nullcontext(worker))


def resolved(*overrides: str) -> Experiment:
    return resolve_layout(to_experiment(compose([*SMALL, *overrides])), 1)


@pytest.mark.parametrize(
    ("overrides", "checked"),
    [
        ([TWO], False),
        ([TWO, "plan.layout_check=on"], True),
        ([OWN, "+model.planted=''"], False),
        ([OWN, "+model.planted=''", TWO], True),
        ([OWN, "+model.planted=''", TWO, "plan.layout_check=off"], False),
        ([OWN, "+model.planted=''", TWO, "plan.gate=off"], False),
        ([OWN, "+model.planted=''", TWO, "plan.gate=off", "plan.layout_check=on"], True),
        ([OWN, "+model.planted=''", "training.micro_batch_size=1"], True),
        ([OWN, "+model.planted=''", "activation_checkpoint=full"], True),
        ([TWO, "training.objective=tests.trainer.own_planted_objective.MeanLoss"], True),
        (["model=huggingface", "model.repository=docs/examples/olmo_debug", TWO], True),
    ],
)
def test_foreign_models_in_several_parts_are_checked(overrides: list[str], checked: bool):
    assert is_checked(resolved(*overrides)) is checked


def test_a_verdict_is_cached_by_code_and_by_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code = "from titan_exp.models.llama import Config, block, spec, violations\n"
    (tmp_path / "own_cached_llama.py").write_text(code)
    words = ["model.architecture=own_cached_llama", "parallelism.dp_shard=2"]
    first = cache_key(resolved(*words))
    assert first is not None
    assert cache_key(resolved(*words, "optimizer.lr=1", "experiment.seed=7", "training.steps=9")) == first
    assert cache_key(resolved(*words[:1], "parallelism.dp_shard=8")) == first
    assert cache_key(resolved(*words, "parallelism.tp=2")) != first
    assert cache_key(resolved(*words, "data.document_mask=true")) != first
    assert cache_key(resolved(*words, "model.layers=3")) != first
    (tmp_path / "own_cached_llama.py").write_text(f"{code}# changed\n")
    assert cache_key(resolved(*words)) != first


def test_a_verdict_is_read_from_the_cache_unless_it_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    verdict, asked, said = (
        Verdict("differs", ("parallelism.tp=1",), ("one",), ("a note",), 1.5),
        list[int](),
        list[str](),
    )

    def check(pending: Mapping[str, Experiment]) -> Iterator[tuple[str, Verdict]]:
        asked.append(len(pending))
        yield from ((key, verdict) for key in pending)

    monkeypatch.setattr(memory_gate, "_in_process", check)
    runs = [resolved(*SHIFT), resolved(*SHIFT, "optimizer.lr=1"), resolved(*SHIFT, "model.layers=3")]
    assert layout_verdicts(runs, tmp_path, said.append) == [verdict] * 3
    assert layout_verdicts(runs, tmp_path, said.append) == [verdict] * 3
    assert asked == [2]
    assert len(said) == 1
    for file in (tmp_path / "plan").glob("layout-*.json"):
        file.write_text("[]")
    for broken in ("", '{"difference": 1}', "{}", "\0"):
        layout_verdicts(runs[:1], tmp_path, said.append)
        for file in (tmp_path / "plan").glob("layout-*.json"):
            file.write_text(broken)
    assert asked == [2, 1, 1, 1, 1]


def test_what_could_not_be_checked_is_not_cached(tmp_path: Path):
    (found,) = layout_verdicts([resolved(*SHIFT, "plan.seconds=0.01")], tmp_path, lambda _: None)
    assert found == Verdict(notes=("We did not check its layouts: it took more than plan.seconds=0.01.",))
    assert not list(tmp_path.rglob("*.json"))
    assert layout_refusal(found) == ""


def test_a_refused_run_starts_as_the_refusal_says(
    warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["train", "--dry-run", *SMALL, *SHIFT, f"paths.runs={tmp_path}"]
    without_plan = ["plan.gate=off", "plan.layout_check=on"]  # a plan of the memory takes longer than the check
    assert main([*words, *without_plan]) == 2
    said = capsys.readouterr().err
    assert "This run would not train like the same run on one device." in said
    assert "blocks.0 is the first module whose output differs" in said
    assert "blocks.0 (PlantedBlock) mixes tokens outside attention" in said
    assert "use parallelism.sequence_parallel=false, or correct the model. plan.layout_check=off starts" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("*/*/config.yaml"))
    for remedy in (
        ["parallelism.sequence_parallel=false", *without_plan],
        ["plan.layout_check=off"],
        ["plan.gate=warn"],
    ):
        assert main([*words, *remedy]) == 0, remedy
        assert ("would not train like" in capsys.readouterr().out) is (remedy == ["plan.gate=warn"])


def test_doctor_checks_any_model(warm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["doctor", "--layout", "model=llama_debug", "cluster.device=cpu", f"paths.runs={tmp_path}"]
    assert main([*words, "parallelism.dp_shard=1"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert main([*words, TWO]) == 0
    assert "agrees with one rank: parallelism.dp_shard=2" in capsys.readouterr().out
