"""Registered questions by an executor that pretends to train: pairs, looks, verdicts, drops, death, changes."""

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.launch.launching import LIMIT, ranks_of, start, wait_until
from titan_exp.cli.main import main
from titan_exp.launch.evidence import losing
from titan_exp.launch.executor import JobStatus, Submission, SubmitOptions
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.provenance import read_provenance
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.launch.sweep.looks import drawn_seeds
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

QUESTION = """\
question: Is a rate of 3e-3 better than one of 1e-3?
held_fixed:
  - model=llama_debug
  - cluster.device=cpu
  - plan.gate=off
  - training.steps=18
  - evaluation.every=9
  - checkpoint=none
axes:
  - list: {low: [optimizer.lr=1e-3], high: [optimizer.lr=3e-3]}
baseline: low
metrics: {validation_loss: min}
pairs: {looks: [3, 5, 8]}
"""
BASELINE, CANDIDATE = 1e-3, 3e-3
provenance = cache(read_provenance)
"""Read once: it takes longer than all else here."""


def no_gain(pair: int) -> float:
    return 0.0


class Pretended(LocalExecutor):
    """Trains in no time: seeds differ by much, the two runs of a pair by a little noise and the gain of that pair."""

    trained: ClassVar[list[tuple[float, int]]] = []
    """Rate and seed of each training, in its order."""
    gain: ClassVar[Callable[[int], float]] = staticmethod(no_gain)
    """Gain of the candidate by number of the pair, from 0."""
    limit = 1_000
    """Trainings before Ctrl-C."""
    noise = 0.01
    waits = True

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        return [
            Submission(plan, "not started", exit_code=130) if options.stop_requested() else self.train(plan)
            for plan in plans
        ]

    @classmethod
    def train(cls, plan: RunPlan, until: int = 18) -> Submission:
        """Train a run, or only up to a step, in which state it stays."""
        state = plan.folder.read_state() if plan.folder.path.exists() else None
        if state is not None and state.state in ("done", "failed"):
            return Submission(plan, state.state)  # type: ignore[arg-type]
        if len(cls.trained) == cls.limit:
            raise KeyboardInterrupt
        create_run_folder(plan, provenance())
        rate, seed = plan.experiment.optimizer.lr, plan.experiment.experiment.seed
        if (rate, seed) not in cls.trained:
            cls.trained.append((rate, seed))
        gain = cls.gain(seeds().index(seed)) if rate == CANDIDATE else 0.0
        loss = 3 + random.Random(seed).gauss(0, 1) + cls.noise * random.Random(f"{seed} {rate}").gauss(0, 1) - gain
        rows = [{"step": step, "tokens": 1000 * step, "loss": loss, "validation_loss": loss} for step in (9, 18)]
        lines = [json.dumps({**row, "attempt": 1}) + "\n" for row in rows if row["step"] <= until]
        plan.folder.metrics.write_text("".join(lines).replace("Infinity", '"Infinity"'))
        if gain == -float("inf"):
            plan.folder.write_state(RunState("failed", 1, time.time(), 1, "rank 0: Diverged: step 1: loss nan"))
            return Submission(plan, "failed", reason="Diverged", exit_code=1)
        if until < 18:
            plan.folder.write_state(RunState("running", until, time.time(), 1, None))
            return Submission(plan, "running")
        plan.folder.write_state(RunState("done", 18, time.time(), 1, None))
        return Submission(plan, "done")


@cache
def seeds() -> tuple[int, ...]:
    return drawn_seeds("mine", "high", "low", 100)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, Pretended)
    monkeypatch.setattr("titan_exp.launch.run_plan._nondefault", lambda *_: "[]\n")  # half a second a run
    for name, value in {"trained": [], "limit": 1_000, "gain": staticmethod(no_gain), "noise": 0.01}.items():
        monkeypatch.setattr(Pretended, name, value)
    (tmp_path / "sweeps").mkdir()
    write(QUESTION)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, executor: type[LocalExecutor]) -> None:
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.executor_for", executor)
    monkeypatch.setattr("titan_exp.launch.sweep.sweep_table.executor_for", executor)
    monkeypatch.setattr("titan_exp.launch.sweep.shipped_study.executor_for", executor)


def write(text: str) -> None:
    Path("sweeps/mine.yaml").write_text(text)


def sweep(*words: str) -> int:
    """Exit code of `titan-exp sweep mine`."""
    try:
        return main(["sweep", "mine", *words])
    except SystemExit as end:
        return int(end.code or 0)


def gains(value: float, monkeypatch: pytest.MonkeyPatch, *diverged: int) -> None:
    """Let the candidate gain that much in each pair, and diverge in those given."""
    found = staticmethod(lambda pair: -float("inf") if pair in diverged else value)
    monkeypatch.setattr(Pretended, "gain", found)


def record() -> dict[str, Any]:
    return json.loads(Path("runs/mine/study.json").read_text())


def answer(capsys: pytest.CaptureFixture[str]) -> str:
    """Last line printed: the verdict, which `compare` repeats."""
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert main(["compare", "mine", "--html=none"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert said.partition("; ")[0] in table, table
    return said


def test_a_better_candidate_is_told_after_the_first_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gains(0.5, monkeypatch)
    assert sweep("--dry-run") == 0
    out = capsys.readouterr().out
    assert "6 to start." in out
    assert "looks after 3, 5 and 8 pairs, with an error rate of 5 % over all" in out
    assert "This is look 1 of at most 3, and the last unless high is ahead." in out
    assert "This look has 6 runs. All 8 pairs together have 16 runs.\n" in out
    assert "The two models differ" not in out
    assert not Path("runs/mine").exists()
    assert sweep() == 0
    said = answer(capsys)
    size = r"0\.\d+ \[0\.\d+, 0\.\d+\] \(95 %, at every look\)"
    assert re.match(rf"high is better than low after 3 pairs, by {size} in validation_loss", said)
    assert "The chance of a wrong verdict is at most 5 %" in said
    assert re.search(r"At [\d.]+k parameters and [\d.]+k tokens; 6 runs", said)
    assert "18% of what all 8 pairs take" in said
    assert Pretended.trained == [(rate, seed) for seed in seeds()[:3] for rate in (BASELINE, CANDIDATE)]
    assert sweep() == 0
    assert (answer(capsys), len(Pretended.trained)) == (said, 6), "nothing is trained again"
    assert sweep("--dry-run") == 0
    assert said in capsys.readouterr().out
    assert sweep("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["conclusion"], found["registered"]["outcome"], len(found["runs"])) == (said, "better", 6)
    assert found["registered"]["verdict"]["pairs"] == 3
    assert main(["compare", "mine", "--latex", "--html=none"]) == 0
    assert r"\textbf{" in capsys.readouterr().out, "the value of a better row"


def test_pairs_share_their_seed_and_nothing_else():
    """Seeds depend on the question, not on the rule by which it ends."""
    assert sweep() == 0
    pairs = [seed for _, seed in Pretended.trained]
    assert pairs[::2] == pairs[1::2]
    assert len(set(seeds())) == 100
    assert not set(seeds()) & {*drawn_seeds("other", "high", "low", 100), *drawn_seeds("mine", "low", "high", 100)}
    assert [point["seed"] for point in record()["points"]] == pairs


def test_another_name_of_the_runs_has_other_pairs(capsys: pytest.CaptureFixture[str]):
    assert sweep("experiment.name=again", "--dry-run") == 0
    found = set(map(int, re.findall(r"seed=(\d+)", capsys.readouterr().out)))
    assert found == set(drawn_seeds("again", "high", "low", 3))


def test_a_small_gain_takes_more_looks_and_a_null_one_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Pretended, "noise", 0.2)
    gains(0.2, monkeypatch)
    assert sweep() == 0
    assert len(Pretended.trained) > 6
    out = capsys.readouterr().out
    assert "look 1 of 3: 3 pairs complete" in out
    assert [point["round"] for point in record()["points"]] == sorted(point["round"] for point in record()["points"])
    assert not Path("runs/mine/history").exists(), "later looks are not another version of the study"
    gains(-0.5, monkeypatch)
    write(
        QUESTION.replace("question: Is", "question: Once more, is").replace(
            "steps=18", "steps=18\n  - training.seq_len=64"
        )
    )
    assert sweep("--change-question") == 0
    assert "not ahead" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0, 6, *(pytest.param(one, marks=pytest.mark.night) for one in (1, 4, 7))])
def test_a_killed_question_goes_on_where_it_was(
    limit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Pretended, "noise", 0.2)
    gains(0.2, monkeypatch)
    monkeypatch.setattr(Pretended, "limit", limit)
    assert sweep() == 130
    registered = record()["registered"]
    monkeypatch.setattr(Pretended, "limit", 1_000)
    assert sweep() == 0
    said, trained = answer(capsys), list(Pretended.trained)
    assert len(trained) == len(set(trained)) == 2 * len({seed for _, seed in trained})
    assert record()["registered"] == registered, "registered once, before the first run"
    monkeypatch.setattr(Pretended, "trained", [])
    assert sweep("paths.runs=elsewhere") == 0
    again = capsys.readouterr().out.strip().splitlines()[-1]
    assert (again, Pretended.trained) == (said, trained), "as if it had not been killed"


def test_a_question_is_not_changed_after_a_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(Pretended, "noise", 0.2)
    gains(0.2, monkeypatch)
    monkeypatch.setattr(Pretended, "limit", 1)
    assert sweep() == 130
    write(QUESTION.replace("[3, 5, 8]", "[3, 5]"))
    assert sweep() == 130, "nobody can have seen a difference"
    assert record()["registered"]["looks"] == [3, 5]
    monkeypatch.setattr(Pretended, "limit", 2)
    assert sweep() == 130
    capsys.readouterr()
    for changed, said in (
        (QUESTION, "looks at pairs: 3, 5 → 3, 5, 8"),
        (QUESTION.replace("[3, 5, 8]", "[3, 5], alpha: 0.2"), "alpha: 0.05 → 0.2"),
        (QUESTION.replace("[3, 5, 8]", "anytime"), "anytime: False → True"),
        (QUESTION.replace("[3, 5, 8]", "[3, 5]").replace("steps=18", "steps=36"), "training.steps: 18 → 36"),
        (
            QUESTION.replace("[3, 5, 8]", "[3, 5]").replace("lr=3e-3", "lr=4e-3"),
            "  high: optimizer.lr: 0.003 → 0.004\n",
        ),
        (QUESTION.partition("pairs:")[0], "pairs: removed"),
    ):
        write(changed)
        assert sweep() == 2
        err = capsys.readouterr().err
        assert said in err
        assert "1 pair of it can be looked at already" in err
        assert len(Pretended.trained) == 2
    assert sweep("--dry-run") == 2
    monkeypatch.setattr(Pretended, "limit", 1_000)
    write(QUESTION.replace("[3, 5, 8]", "[3, 5], alpha: 0.2"))
    assert sweep("--change-question") == 0
    said = answer(capsys)
    assert "It has no error rate, as the question was changed after a look: alpha: 0.05 → 0.2." in said
    assert "chance of a wrong verdict" not in said
    assert sweep() == 0
    assert answer(capsys) == said, "every later answer says so"


def test_the_other_question_of_the_refusal_has_other_pairs(capsys: pytest.CaptureFixture[str]):
    assert sweep() == 0
    write(QUESTION.replace("[3, 5, 8]", "[4]"))
    assert sweep() == 2
    remedy = re.search(r"cp (\S+) (\S+); titan-exp sweep (\S+)\.", capsys.readouterr().err)
    assert remedy is not None
    shutil.copy(remedy[1], remedy[2])
    before = set(Pretended.trained)
    Pretended.trained.clear()
    assert main(["sweep", remedy[3], "--dry-run"]) == 0
    seeds_there = set(map(int, re.findall(r"seed=(\d+)", capsys.readouterr().out)))
    assert len(seeds_there) == 4
    assert not seeds_there & {seed for _, seed in before}


def test_a_question_without_its_record_has_no_error_rate(capsys: pytest.CaptureFixture[str]):
    assert sweep() == 0
    Path("runs/mine/study.json").unlink()
    write(QUESTION.replace("[3, 5, 8]", "[3]"))
    assert sweep() == 0
    assert "changed after a look: registered after 3 pairs had been trained" in answer(capsys)


def test_a_run_that_diverged_is_an_outcome(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A large gain in the other pairs does not make up for it."""
    gains(0.5, monkeypatch, 1)
    assert sweep() == 0, "an answer, though a run failed"
    said = answer(capsys)
    assert said.startswith("Undecided between high and low after 3 pairs")
    assert "diverged: high alone in 1" in said
    assert len(Pretended.trained) == 6
    assert sweep() == 0
    assert len(Pretended.trained) == 6, "it would diverge again"


class Scheduler(Pretended):
    """Queues runs, which the test trains."""

    waits = False
    queue: ClassVar[list[RunPlan]] = []
    cancelled: ClassVar[list[str]] = []
    reasons: ClassVar[list[str]] = []

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        new = [plan for plan in plans if plan.run_id not in {waiting.run_id for waiting in self.queue}]
        for plan in new:
            create_run_folder(plan, provenance())
            plan.folder.add_attempt(world_size=1, hosts=[], job_id="7")
        self.queue.extend(new)
        return [Submission(plan, "submitted" if plan in new else "queued", "7") for plan in plans]

    def status(self, folders: Sequence[RunFolder]) -> dict[Path, JobStatus]:
        return {folder.path: JobStatus("running", "7") for folder in folders}

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> dict[Path, str]:
        self.cancelled.extend(folder.path.name for folder in folders)
        self.reasons.append(reason)
        return {folder.path: "asked to save and stop" for folder in folders}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    monkeypatch.setattr(Scheduler, "queue", [])
    monkeypatch.setattr(Scheduler, "cancelled", [])
    monkeypatch.setattr(Scheduler, "reasons", [])
    use(monkeypatch, Scheduler)
    monkeypatch.setattr("titan_exp.launch.run_status.executor_for", Scheduler)
    return Scheduler


def test_a_scheduler_gets_the_pairs_of_a_look_at_a_time(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Pretended, "noise", 0.2)
    gains(0.2, monkeypatch)
    assert sweep() == 0
    out = capsys.readouterr().out
    assert "6 submitted" in out
    assert sweep("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["conclusion"], found["registered"]["outcome"]) == (None, "continue")
    assert {run["outcome"] for run in found["runs"]} == {"queued"}
    assert "When these runs are done, the same command continues: titan-exp sweep mine" in out
    for plan in scheduler.queue[:5]:
        Pretended.train(plan)
    assert sweep() == 0
    assert len(scheduler.queue) == 6, "a look waits for all of its pairs"
    Pretended.train(scheduler.queue[5])
    assert sweep() == 0
    assert len(scheduler.queue) == 10
    assert scheduler.cancelled == []


@pytest.mark.parametrize("case", [(-0.5, 9, True), (0.5, 9, False), (-0.5, 8, False)])
def test_a_candidate_that_loses_within_its_runs_is_dropped_and_none_crowned(
    case: tuple[float, int, bool],
    scheduler: type[Scheduler],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """At half of the steps; before, a learning rate has hardly decayed."""
    gain, until, drops = case
    gains(gain, monkeypatch)
    assert sweep() == 0
    for plan in scheduler.queue:
        scheduler.train(plan, until)
    capsys.readouterr()
    assert sweep() == 0
    out = capsys.readouterr().out
    assert (len(scheduler.cancelled) == 6) == drops
    assert set(scheduler.reasons) == ({"the question needs no more of it"} if drops else set())
    assert ("No verdict" in out, "better than" in out) == (False, False)
    assert ("It ended before the first look: over 3 pairs its mean is more than a standard error worse" in out) == drops
    assert len(scheduler.queue) == 6
    if drops:
        assert sweep() == 0
        assert "Undecided between high and low" in answer(capsys), "it stays so, and nothing is started"
    write(QUESTION.replace("[3, 5, 8]", "[3, 5, 8], futility: false"))
    monkeypatch.setattr(Scheduler, "cancelled", [])
    assert sweep() == 0
    assert scheduler.cancelled == []


def test_a_run_that_its_question_stopped_is_not_waited_for(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gains(-0.5, monkeypatch)
    assert sweep() == 0
    for plan in scheduler.queue[:4]:
        scheduler.train(plan)
    scheduler.train(scheduler.queue[4], until=9)
    assert sweep() == 0
    assert len(scheduler.cancelled) == 2
    capsys.readouterr()
    assert main(["compare", "mine", "--html=none"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "at 18,000 tokens, where every run ends" in said
    assert "no look has been reached" in said


def test_compare_names_the_command_that_looks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    write(QUESTION.replace("[3, 5, 8]", "[3, 5, 8], futility: false"))
    monkeypatch.setattr(Pretended, "limit", 5)
    assert sweep() == 130
    capsys.readouterr()
    assert main(["compare", "mine", "--html=none"]) == 0
    assert "2 pairs complete: titan-exp sweep mine looks at them" in " ".join(capsys.readouterr().out.split())


def test_a_waiting_executor_is_watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The third pair is never begun: the two before it have lost."""
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.WATCH_INTERVAL", 0.02)

    class Slow(Pretended):
        def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
            found = []
            for number, plan in enumerate(plans):
                deadline = time.monotonic() + 20
                while number == 4 and not options.stop_requested() and time.monotonic() < deadline:
                    time.sleep(0.01)
                found += super().submit([plan], options)
            return found

    use(monkeypatch, Slow)
    gains(-0.5, monkeypatch)
    assert sweep() == 0
    assert len(Pretended.trained) == 4
    said = answer(capsys)
    assert said.startswith("No verdict") is False
    assert "It ended before the first look: over 2 pairs" in said


def test_losing_takes_two_pairs_and_a_standard_error():
    infinite = float("inf")
    assert losing([-1.0]) == losing([-infinite]) == losing([-1.0, 0.9]) == losing([-infinite, infinite]) == ""
    assert "2 pairs" in losing([-1.0, -0.9])
    assert "diverged alone in 1 of 2 pairs" in losing([-infinite, 5.0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("evaluation.every=9", "evaluation.every=0"), "no run logs validation_loss"),
        (("optimizer.lr=3e-3", "optimizer.lr=1e-3"), "are the same run"),
        (("high: [optimizer.lr=3e-3]", "high: [optimizer.lr=3e-3], top: [optimizer.lr=1e-2]"), "has 3 point(s)"),
        (("high: [optimizer.lr=3e-3]", "high: [parallelism.tp=3]"), "cannot run, so that its pair has no difference"),
        (("optimizer.lr=3e-3", "data.validation_documents=3"), "is of two validation sets"),
        (("validation_loss: min", "validation_loss/none: min"), "[low seed="),
        (("baseline: low\n", ""), "pairs test a point against the baseline"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(
    change: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
):
    write(QUESTION.replace(*change))
    assert sweep() == 2
    assert said in capsys.readouterr().err
    assert Pretended.trained == []


@pytest.mark.parametrize(
    ("metric", "said"),
    [("validation_loss", "is of two validation sets"), ("validation_loss/long", "will not log it")],
)
def test_the_remedy_for_two_data_sets_is_one_that_both_evaluate(
    metric: str, said: str, home: Path, capsys: pytest.CaptureFixture[str]
):
    question = QUESTION.replace(
        "  - checkpoint", "  - SET\n  - data=text\n  - data.validation_fraction=0.4\n  - checkpoint"
    )
    for rate, name, documents in (("1e-3", "all", 20), ("3e-3", "long", 10)):
        (home / "corpus" / name).mkdir(parents=True)
        for number in range(documents):
            (home / "corpus" / name / f"{number}.txt").write_text(f"document {number} " * 40)
        question = question.replace(f"[optimizer.lr={rate}]", f'["data.paths=[corpus/{name}]"]')
    write(question.replace("  - SET\n", "").replace("validation_loss: min", f"{metric}: min"))
    assert sweep("--dry-run") == 2
    refusal = capsys.readouterr().err
    assert said in refusal
    (override,) = re.findall(r'held_fixed: \[("\+.*?")\]', refusal)
    write(question.replace("SET", override).replace("loss: min", "loss/common: min"))
    assert sweep("--dry-run") == 0, capsys.readouterr().err
    assert "6 to start" in capsys.readouterr().out


def test_two_tokenizers_are_compared_by_bytes(capsys: pytest.CaptureFixture[str]):
    Tokenizer(WordLevel({"<|end_of_text|>": 0, "a": 1}, unk_token="a")).save("tokenizer.json")
    question = QUESTION.replace("optimizer.lr=3e-3", "data.tokenizer=tokenizer.json")
    write(question)
    assert sweep("--dry-run") == 2
    assert "Ask about validation_bits_per_byte" in capsys.readouterr().err
    write(question.replace("validation_loss", "validation_bits_per_byte"))
    assert sweep("--dry-run") == 0


def test_seeds_are_not_typed(capsys: pytest.CaptureFixture[str]):
    assert sweep("experiment.seed=0,1") == 2
    assert "draw their seeds" in capsys.readouterr().err


@pytest.mark.night
def test_a_launcher_killed_at_any_moment_continues(home: Path):
    """In its own process, with stand-ins for ranks. What is done is not trained again, nor is the question registered
    anew."""
    for done in (0, 1, 3, 4):
        process = start("learn", "sweep", "mine", "--jobs", "2")
        wait_until(lambda least=done: len(finished()) >= least and any(home.glob("runs/mine/*/heartbeat")))
        process.kill()
        process.communicate(timeout=LIMIT)
        wait_until(lambda: ranks_of(home) == [])
    registered = record()["registered"]
    attempts = {path: len(RunFolder(path).read_attempts()) for path in finished()}
    out, _ = (process := start("learn", "sweep", "mine", "--jobs", "2")).communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert out.strip().splitlines()[-1].startswith("high is better than low after 3 pairs")
    assert record()["registered"] == registered
    assert {path: len(RunFolder(path).read_attempts()) for path in attempts} == attempts
    assert len(finished()) == 6


def finished() -> list[Path]:
    return [path.parent for path in Path("runs/mine").glob("*/state.json") if '"done"' in path.read_text()]
