"""Ladders of sizes: shapes and counts, published rules, trunks and branches, refusals, and what a dry run says."""

import json
import re
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from titan_exp.cli.main import main
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.config.study import ladder as rules
from titan_exp.launch.executor import Submission, SubmitOptions
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.provenance import read_provenance
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.models.build import build_model
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

STUDY = """\
question: How does the loss fall with size?
held_fixed:
  - model=llama_debug
  - model.heads=6
  - model.kv_heads=6
  - model.dim=96
  - model.ffn_dim=192
  - training.seq_len=64
  - cluster.device=cpu
  - plan.gate=off
  - lr_schedule=wsd
ladder:
  multiples: [1/3, 1/2, 1]
  tokens_per_parameter: [10, 20, 40]
"""
BRANCHED = STUDY + "  branches: true\n"
TWO_ARMS = "axes: [{list: {slow: [optimizer.lr=1e-3], fast: [optimizer.lr=3e-3]}}]\nbaseline: slow\n"
provenance = cache(read_provenance)
"""Read once: it takes longer than all else here."""


class Pretended(LocalExecutor):
    """Trains in no time, and saves when it is asked to."""

    trained: ClassVar[list[RunPlan]] = []
    diverges = ""
    waits = True

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        return [self.train(plan) for plan in plans]

    @classmethod
    def train(cls, plan: RunPlan) -> Submission:
        state = plan.folder.read_state() if plan.folder.path.exists() else None
        if state is not None and state.state == "done":
            return Submission(plan, "done")
        create_run_folder(plan, provenance())
        cls.trained.append(plan)
        training, checkpoint = plan.experiment.training, plan.experiment.checkpoint
        if checkpoint.continue_from is not None:
            parent = plan.folder.path.parents[1] / checkpoint.continue_from
            step = checkpoint.continue_step or 0
            Lineage(str(parent), step, step * training.global_batch_size * training.seq_len).write(plan.folder.path)
        if cls.diverges and f"tokens={cls.diverges}" in options_label(plan):
            plan.folder.write_state(RunState("failed", 1, time.time(), 1, "rank 0: Diverged: step 1: loss nan"))
            return Submission(plan, "failed", reason="Diverged", exit_code=1)
        tokens = training.steps * training.global_batch_size * training.seq_len
        row = {"step": training.steps, "tokens": tokens, "loss": 2.0, "validation_loss": 2.0, "attempt": 1}
        plan.folder.metrics.write_text(json.dumps(row) + "\n")
        saved = range(
            checkpoint.keep_every or training.steps, training.steps + 1, checkpoint.keep_every or training.steps
        )
        for step in saved:
            path = plan.folder.checkpoints / f"step-{step:08d}"
            path.mkdir(parents=True)
            (path / ".metadata").touch()
        plan.folder.write_state(RunState("done", training.steps, time.time(), 1, None))
        return Submission(plan, "done")


def options_label(plan: RunPlan) -> str:
    points = json.loads((plan.folder.path.parent / "study.json").read_text())["points"]
    return next(point["label"] for point in points if point["run_id"] == plan.run_id)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.executor_for", Pretended)
    monkeypatch.setattr("titan_exp.launch.run_plan._nondefault", lambda *_: "[]\n")  # half a second a run
    monkeypatch.setattr(Pretended, "trained", [])
    monkeypatch.setattr(Pretended, "diverges", "")
    (tmp_path / "sweeps").mkdir()
    return tmp_path


def sweep(text: str, *words: str) -> int:
    """Exit code of `titan-exp sweep mine`."""
    Path("sweeps/mine.yaml").write_text(text)
    try:
        return main(["sweep", "mine", *words])
    except SystemExit as end:
        return int(end.code or 0)


def points() -> list[dict[str, Any]]:
    return json.loads(Path("runs/mine/study.json").read_text())["points"]


def counted(overrides: Sequence[str]) -> int:
    """Parameters of the built model that are in no embedding and no head; of experts, those that a token uses."""
    config = to_experiment(compose(list(overrides))).model
    with torch.device("meta"):
        model = build_model(config, seq_len=64, attention_backend="math")
    routed = (
        getattr(getattr(config, "moe", None), "active_experts", 1),
        getattr(getattr(config, "moe", None), "experts", 1),
    )
    total = 0
    for name, weight in model.named_parameters():
        if name not in ("embedding.weight", "head.weight"):
            total += weight.numel() * routed[0] // routed[1] if ".experts." in name else weight.numel()
    return total


@pytest.mark.parametrize("model", ["llama_debug", "olmo2_debug", "qwen3_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_parameters_are_those_of_the_built_model(model: str):
    text = STUDY.partition("  - model.heads")[0].replace("llama_debug", model) + "  - cluster.device=cpu\n"
    text += "  - model.moe.ffn_dim=64\n" * (model == "deepseek_debug")
    text += "  - plan.gate=off\nladder: {multiples: [1/2, 1, 2], tokens_per_parameter: [1]}\n"
    assert sweep(text) == 0
    found = points()
    assert [point["label"] for point in found] == [f"multiple={size} tokens=1N" for size in ("1/2", "1", "2")]
    for point in found:
        assert point["rung"]["parameters"] == counted(point["overrides"]), point["label"]
    base, twice = found[1]["overrides"], found[2]["overrides"]
    dim = to_experiment(compose(list(base))).model.dim  # type: ignore[attr-defined]
    assert {f"model.dim={2 * dim}", "model.layers=8", "model.heads=8"} <= set(twice)


def test_tied_embeddings_are_no_parameters_of_a_ladder():
    text = STUDY.replace("  - lr_schedule=wsd\n", "  - model.tied_embeddings=true\n")
    assert sweep(text) == 0
    assert [point["rung"]["parameters"] for point in points()[::3]] == [
        counted(point["overrides"]) for point in points()[::3]
    ]


def test_parameters_give_the_nearest_shape_that_is_most_like_the_model():
    text = STUDY.replace("multiples: [1/3, 1/2, 1]", "parameters: [50e3, 200e3, 1.5e6]")
    assert sweep(text) == 0
    longest = points()[::3]
    assert [point["label"] for point in longest] == [f"parameters={n} tokens=40N" for n in ("50k", "200k", "1.5M")]
    for point, wanted in zip(longest, (50e3, 200e3, 1.5e6), strict=True):
        model = to_experiment(compose(point["overrides"])).model
        assert point["rung"]["parameters"] == counted(point["overrides"])
        assert point["rung"]["parameters"] == pytest.approx(wanted, rel=0.1)
        assert 0.5 < (model.dim / model.layers) / (96 / 4) < 2, "as wide for its depth as the model"  # type: ignore[attr-defined]


def test_published_rules():
    """OLMo-core at its reference and at eight times as many parameters; nanochat at d12, and at 16 times its tokens."""
    assert (rules.olmo_batch(108e6), rules.olmo_rate(108e6)) == (327_680, 0.00235)
    assert (rules.olmo_batch(864e6), rules.olmo_rate(864e6)) == (pytest.approx(1_310_720), pytest.approx(0.001175))
    d12 = 12 * (12 * 12 * 768**2 + 32768 * 768)
    assert rules.nanochat_batch(d12) == 2**19
    assert rules.nanochat_factors(2**19, d12) == (1, 1)
    assert rules.nanochat_batch(16 * d12) == pytest.approx(2**19 * 2.892, rel=1e-3)
    assert rules.nanochat_factors(2**21, 16 * d12) == (2, 2 / 16)
    assert [rules.batch_sequences(tokens, 64) for tokens in (1, 6476, 12 * 64, 327_680)] == [8, 104, 16, 5120]


def test_rules_set_the_keys_of_every_rung():
    assert sweep(STUDY + "  rule: olmo\n") == 0
    for point in points():
        experiment, parameters = to_experiment(compose(point["overrides"])), point["rung"]["parameters"]
        training = experiment.training
        assert experiment.optimizer.lr == pytest.approx(rules.olmo_rate(parameters), rel=1e-3)
        assert training.global_batch_size == rules.batch_sequences(rules.olmo_batch(parameters), 64)
        batch = training.global_batch_size * 64
        assert experiment.lr_schedule.warmup_steps == round(parameters / batch)
        assert training.steps * batch == point["rung"]["tokens"]
        assert training.steps * batch == pytest.approx(int(point["rung"]["per_parameter"]) * parameters, abs=batch)
    assert sweep(STUDY + "  rule: nanochat\n") == 0
    for point in points():
        experiment, parameters = to_experiment(compose(point["overrides"])), point["rung"]["parameters"]
        wanted = int(point["rung"]["per_parameter"]) * parameters
        batch = experiment.training.global_batch_size * 64
        rate, decay = rules.nanochat_factors(batch, wanted)
        assert batch == 64 * rules.batch_sequences(rules.nanochat_batch(wanted), 64)
        plain = to_experiment(compose([])).optimizer
        assert experiment.optimizer.lr == pytest.approx(plain.lr * rate, rel=1e-3)
        assert experiment.optimizer.weight_decay == pytest.approx(plain.weight_decay * decay, rel=1e-3)


@pytest.mark.parametrize("per", [(10, 20, 40), (10, 15, 40), (Fraction(5, 2), 4)])
def test_branches_begin_at_checkpoints_of_the_trunk(per: tuple[Fraction | int, ...]):
    found = rules.lengths(100_000, [Fraction(each) for each in per], 1024, 0.1)
    shares = [steps / found.steps[-1] for steps in found.steps]
    assert shares == pytest.approx([float(each / per[-1]) for each in per])
    assert found.steps[-1] == pytest.approx(float(per[-1]) * 100_000 / 1024, rel=0.02)
    pairs = zip(found.steps, found.decays, strict=True)
    assert found.branches == tuple(steps - decay for steps, decay in pairs)[:-1]
    assert all(
        decay == pytest.approx(0.1 * steps, rel=0.05) for steps, decay in zip(found.steps, found.decays, strict=True)
    )
    assert found.interval == gcd(*found.branches)
    assert found.steps[-1] / found.interval < 20, "few checkpoints"


def test_trunks_are_trained_first_and_branches_continue_them(capsys: pytest.CaptureFixture[str]):
    assert sweep(BRANCHED + TWO_ARMS + "seeds: 2\n") == 0
    assert len(Pretended.trained) == 3 * 3 * 2 * 2
    trunks = {plan.run_id: plan.experiment for plan in Pretended.trained[:12]}
    assert all(one.checkpoint.continue_from is None for one in trunks.values())
    for plan in Pretended.trained[12:]:
        branch, parent = plan.experiment, trunks[(plan.experiment.checkpoint.continue_from or "").rpartition("/")[2]]
        assert (branch.model, branch.optimizer, branch.experiment.seed) == (
            *(parent.model, parent.optimizer),
            parent.experiment.seed,
        )
        assert branch.training.global_batch_size == parent.training.global_batch_size
        assert branch.lr_schedule.warmup_steps == parent.lr_schedule.warmup_steps
        step = branch.checkpoint.continue_step or 0
        assert step == branch.training.steps - branch.lr_schedule.decay_steps
        assert step <= parent.training.steps - parent.lr_schedule.decay_steps, "the rate is stable up to there"
        assert parent.checkpoint.every == parent.checkpoint.keep_every
        assert step % (parent.checkpoint.keep_every or 0) == 0
        assert branch.training.steps in (parent.training.steps // 2, parent.training.steps // 4)
    assert sweep(BRANCHED + TWO_ARMS + "seeds: 2\n") == 0
    assert len(Pretended.trained) == 36, "nothing is trained again"
    assert not Path("runs/mine/history").exists(), "branches are no other version of the study"
    record = json.loads(Path("runs/mine/study.json").read_text())
    assert record["ladder"] == {"metric": "validation_loss", "better": "min", "baseline": "slow", "runs": 36}
    assert record["baseline"] == "multiple=1 tokens=40N slow"
    capsys.readouterr()
    assert sweep(BRANCHED + TWO_ARMS, "experiment.seed=0", "--dry-run") == 0
    assert sweep(BRANCHED + TWO_ARMS + "seeds: 2\n", "experiment.seed=0") == 0
    assert len(Pretended.trained) == 36
    others = json.loads(Path("runs/mine/study.json").read_text())
    assert (len(others["others"]), others["removed"]) == (18, []), "the file still has the other seed's branches"


def test_a_diverged_trunk_has_no_branches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pretended, "diverges", "40N")
    assert sweep(BRANCHED) == 1
    assert len(Pretended.trained) == 3


REFUSED = [
    ("[1/3, 1/2, 1]", "[1/4, 1/2, 1]", "1/4 of this model: model.heads=6 gives 1.5"),
    ("[1/3, 1/2, 1]", "[1/2]", "a scaling law takes 3 sizes or more"),
    ("  - model.ffn_dim=192", "  - model.ffn_dim=288", "this must be a multiple of 32"),
    ("lr_schedule=wsd", "lr_schedule=cosine", "a rate that is stable before one decay"),
    ("  - plan.gate=off", "  - plan.gate=off\n  - checkpoint=none", "the longest runs save nothing to branch off"),
    ("  - plan.gate=off", "  - plan.gate=off\n  - training.steps=100", "the ladder sets training.steps at every rung"),
    ("branches: true", "branches: true\n  rule: nanochat", "runs of one size share no trunk"),
    ("[10, 20, 40]", "[20]", "with one length there is no shorter run"),
    ("[10, 20, 40]", "[1/10, 20]", "where the shortest run branches off"),
    ("  - plan.gate=off", "  - plan.gate=off\n  - training.batch_ramp=[[2,4]]", "changes the tokens of a step"),
    ("branches: true", "rule: olmo\nseeds: 1\n# held: parametrization=mup", "both scale the learning rate"),
    ("branches: true", "width: [dim, tallness]", "model.tallness is not a whole number of this model"),
]


def repaired(text: str, remedy: str) -> str:
    """Study after what a refusal said to type."""
    content = yaml.safe_load(text)
    if found := re.search(
        r"(?:Use|^) *((?:multiples|parameters|branches|rule|width): (?:\[[^\]]*\]|\w+))", remedy, re.MULTILINE
    ):
        content["ladder"] |= yaml.safe_load(found[1])
    elif found := re.search(r"Leave ([\w.]+) out", remedy):
        content["held_fixed"] = [text for text in content["held_fixed"] if not text.startswith(f"{found[1]}=")]
    else:
        found = re.search(r"Use ([\w.]+=\S+)", remedy)
        assert found is not None, remedy
        key = found[1].partition("=")[0]
        content["held_fixed"] = [text for text in content["held_fixed"] if not text.startswith(f"{key}=")] + [found[1]]
    return yaml.safe_dump(content)


@pytest.mark.parametrize(("before", "after", "said"), REFUSED, ids=[said[:30] for *_, said in REFUSED])
def test_every_refusal_says_what_to_type(before: str, after: str, said: str, capsys: pytest.CaptureFixture[str]):
    text = BRANCHED.replace(before, after)
    if "parametrization=mup" in after:
        text = text.replace("  - plan.gate=off", "  - plan.gate=off\n  - parametrization=mup")
    assert sweep(text, "--dry-run") == 2
    error = capsys.readouterr().err
    assert said in error
    assert sweep(repaired(text, error), "--dry-run") == 0, error


def test_a_ladder_has_one_candidate_and_a_loss(capsys: pytest.CaptureFixture[str]):
    assert sweep(STUDY + "axes: [{grid: {optimizer.lr: [1e-3, 2e-3, 3e-3]}}]\n", "--dry-run") == 2
    assert "compares a baseline with one candidate, and this study has 3 points" in capsys.readouterr().err
    assert sweep(STUDY + "metrics: {tokens_per_second: max}\n", "--dry-run") == 2
    assert "write metric: validation_loss" in capsys.readouterr().err
    assert sweep(STUDY + "tune: optimizer.lr\n" + TWO_ARMS, "--dry-run") == 2
    assert "leave tune out, or ladder" in capsys.readouterr().err
    assert sweep(STUDY.replace("multiples: [1/3, 1/2, 1]", "parameters: [10, 1e5, 1e6]"), "--dry-run") == 2
    assert "no shape of this model has 10 non-embedding parameters" in capsys.readouterr().err


def test_a_dry_run_prices_the_ladder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert sweep(BRANCHED, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "3 to start" in said
    assert "6 runs branch off these where their decay begins." in said
    row = next(line for line in said.splitlines() if re.match(r"multiple=1 +40N ", line)).split()
    assert row[2:4] == ["1", "369,504"]
    assert row[8:] == ["1", "-"], "one process, and no time"
    assert re.search(r"This ladder is 9 runs, \S+ tokens, \S+ FLOPs\. The planner knows no time", said)

    monkeypatch.setattr("titan_exp.launch.sweep.ladder._step_seconds", lambda planned: dict.fromkeys(planned, 0.5))
    assert sweep(BRANCHED, "--dry-run") == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.match(r"multiple=\S+ +\d+N ", line)]
    assert sweep(BRANCHED) == 0
    trained = [plan.experiment for plan in Pretended.trained]
    steps = sum(one.training.steps - (one.checkpoint.continue_step or 0) for one in trained)
    tokens = sum((one.training.steps - (one.checkpoint.continue_step or 0)) * 8 * 64 for one in trained)
    hours = re.search(r"This ladder costs (\S+) GPU-hours: 9 runs, (\S+)M tokens", said)
    assert hours is not None
    assert float(hours[1]) == pytest.approx(0.5 * steps / 3600, rel=0.01)
    assert float(hours[2]) == pytest.approx(tokens / 1e6, rel=0.001)
    assert len(rows) == 9


def test_a_candidate_keeps_its_own_shape_at_every_size():
    arms = "axes: [{list: {small: [], wide: [model.ffn_dim=384]}}]\nbaseline: small\n"
    assert sweep(STUDY.replace("multiples: [1/3, 1/2, 1]", "parameters: [50e3, 200e3, 1.5e6]") + arms) == 0
    models = [to_experiment(compose(point["overrides"])).model for point in points()]
    widths = {(model.dim, model.layers, model.ffn_dim / model.dim) for model in models}  # type: ignore[attr-defined]
    assert {ratio for *_, ratio in widths} == {2, 4}
    assert len(widths) == 2 * len({shape[:2] for shape in widths})


def test_flops_are_those_of_the_spec_and_of_each_arm():
    arms = "axes: [{list: {small: [], wide: [model.ffn_dim=384]}}]\nbaseline: small\n"
    assert sweep(STUDY + arms) == 0
    by_label = {point["label"]: point for point in points()}
    small, wide = by_label["multiple=1 tokens=40N small"]["rung"], by_label["multiple=1 tokens=40N wide"]["rung"]
    assert (small["parameters"], small["tokens"]) == (wide["parameters"], wide["tokens"]), "a rung is the same for both"
    assert wide["flops_per_token"] - small["flops_per_token"] == 6 * 4 * 3 * 96 * 192
    assert small["flops_per_token"] > 6 * small["parameters"], "head and attention count"


def test_a_branch_continues_in_the_folder_of_its_trunk():
    assert sweep(BRANCHED) == 0
    branch = Pretended.trained[-1]
    parent = RunFolder(Path("runs") / (branch.experiment.checkpoint.continue_from or ""))
    assert parent.path.is_dir()
    assert (parent.checkpoints / f"step-{branch.experiment.checkpoint.continue_step:08d}").is_dir()
