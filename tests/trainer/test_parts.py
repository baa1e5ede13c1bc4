"""Parts of training: their order, what they may ask for, what they keep, and that they leave the curve alone."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.journeys.command import REPOSITORY
from tests.parity.runs import LINES, Curve, train
from tests.parity.test_weight_average import averages
from tests.ranks import run_ranks
from tests.trainer import own_parts
from tests.trainer.test_trainer import experiment, run
from titan_exp.checkpoint.load_state import read_progress
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_plan import run_id
from titan_exp.plan.check_user_code import check_user_code
from titan_exp.rules import check
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.commit import Commit, Flags
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.part import Part, Parts, Run
from titan_exp.trainer.train_step import StepRefused
from titan_exp.trainer.trainer import Trainer

CPU = torch.device("cpu")
OWN, EXAMPLES = "tests.trainer.own_parts", "my_package.parts"
SHORT = ["training.steps=4", "training.seq_len=32", "training.global_batch_size=4", "evaluation.every=0"]


@pytest.fixture(autouse=True)
def example_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the guide can be imported, by ranks too."""
    folder = str(REPOSITORY / "docs/examples/my_package")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])))


def part(label: str, name: str, **options: object) -> str:
    """Override that adds a part."""
    path = name if "." in name else f"{OWN}.{name}"
    words = ",".join(f"{key}:{json.dumps(value)}" for key, value in options.items())
    return f"+training.parts.{label}={{name:{path},options:{{{words}}}}}"


def use_examples() -> None:
    """On each rank of a layout."""
    import sys

    sys.path.insert(0, str(REPOSITORY / "docs/examples/my_package"))


def same_bits(found: Curve, expected: Curve) -> bool:
    return (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm) and all(
        torch.equal(found.weights[name], weight) for name, weight in expected.weights.items()
    )


def test_calls_come_by_phase_whatever_the_order_of_the_keys(tmp_path: Path):
    own_parts.CALLS.clear()
    words = [part(kind.lower(), kind) for kind in ("Reports", "Saves", "Decides", "Recorder", "Acts")]
    run(tmp_path, *SHORT, "training.steps=1", "checkpoint=sync", *words)
    order = ["acts", "recorder", "decides", "saves", "reports"]
    assert [
        *(f"{name} begin" for name in order),
        *(f"{name} {at} 1" for at in ("before", "batches", "gradients", "update") for name in order),
        *(f"{name} after 1 no row" for name in order[:2]),
        *(f"{name} after 1 row" for name in order[2:]),
        *(f"{name} finish 1" for name in order),
        *(f"{name} close" for name in reversed(order)),
    ] == own_parts.CALLS
    (row,) = read_metrics(RunFolder(tmp_path).metrics)
    assert [row[f"{name}/seen"] for name in order[:3]] == [1, 1, 1]


def test_numbers_wait_for_a_row(tmp_path: Path):
    _, folder = run(tmp_path, *SHORT, "tracking.log_every=3", part("mine", "Recorder"), part("late", "Reports"))
    rows = read_metrics(folder.metrics)
    assert [(row["step"], row["mine/seen"], row.get("late/seen")) for row in rows] == [(3, 3, 2), (4, 4, 3)]


def test_a_careless_part_leaves_the_curve_alone(tmp_path: Path):
    expected = train(tmp_path / "without", *SHORT)
    assert same_bits(train(tmp_path / "with", *SHORT, part("careless", "Careless")), expected)


class Spoils(own_parts.Careless):
    """Without the isolation."""

    isolated = False


@pytest.mark.parametrize(("kind", "kept"), [(own_parts.Careless, True), (Spoils, False)])
def test_generators_and_modes_are_restored(kind: type[own_parts.Careless], kept: bool):
    model = nn.Linear(2, 2)
    spoiler = kind()
    spoiler.models = [model]
    parts = Parts([spoiler])
    parts._modules = [model]
    before = torch.get_rng_state()
    try:
        parts.before(1)
        assert torch.is_grad_enabled() == model.training == kept
        assert torch.equal(torch.get_rng_state(), before) == kept
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.dp_shard=2 training.micro_batch_size=1"])
def test_the_probe_of_the_guide_sees_the_same_in_every_layout(tmp_path: Path, layout: str):
    words = [*SHORT, "tracking.log_every=4", part("probe", f"{EXAMPLES}.LogitProbe", steps=[2, 3])]
    found = {}
    for name, more in (("one", ""), ("many", layout)):
        rows = train(tmp_path / name, *words, *more.split(), mutate=use_examples).rows
        assert [row["step"] for row in rows] == [2, 3, 4]
        found[name] = [row["probe/max_logit"] for row in rows[:2]]
        assert "probe/max_logit" not in rows[2]
    assert found["many"] == pytest.approx(found["one"], rel=1e-5)
    assert min(found["one"]) > 0


def test_the_masks_of_the_guide_are_the_same_in_every_layout(tmp_path: Path):
    words = [*SHORT, part("late", f"{EXAMPLES}.LateTokensFirst", steps=3)]
    expected = train(tmp_path / "one", *words, mutate=use_examples)
    assert [row["tokens"] for row in expected.rows] == [4 * 22, 4 * (22 + 27), 4 * (22 + 27 + 32), 4 * (22 + 27 + 64)]
    found = train(tmp_path / "many", *words, "parallelism.cp=2", "parallelism.dp_shard=1", mutate=use_examples)
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    assert [row["tokens"] for row in found.rows] == [row["tokens"] for row in expected.rows]


def test_the_early_stop_of_the_guide_ends_a_run_for_good(tmp_path: Path):
    words = ["training.steps=12", "evaluation.every=1", "optimizer.lr=5", *LINES[:3], "checkpoint=sync"]
    words += ["data.validation_fraction=0.1", "data.validation_documents=20", "training.stop_on_nonfinite=false"]
    stop = part("stop", f"{EXAMPLES}.EarlyStop", patience=2)
    finished, folder = run(tmp_path / "run", *SHORT[1:3], *words, stop)
    rows = read_metrics(folder.metrics)
    assert finished
    assert rows[-1]["stop/evaluations_without_gain"] == 2
    assert rows[-1]["step"] < 12
    assert run(tmp_path / "run", *SHORT[1:3], *words, stop)[0], "started again, it is over"
    assert len(read_metrics(folder.metrics)) == len(rows)
    # Another run that continues it is not.
    more = [*SHORT[1:3], *words, f"checkpoint.continue_from={tmp_path / 'run'}", "evaluation.every=0"]
    _, child = run(tmp_path / "child", *more)
    assert read_metrics(child.metrics)[-1]["step"] == 12


def test_the_wish_of_one_rank_ends_all(tmp_path: Path):
    curve = train(tmp_path, *SHORT, "parallelism.dp_shard=2", part("stops", "Stops", at=2, rank=1))
    assert len(curve.loss) == 2


def test_a_part_may_ask_for_a_checkpoint(tmp_path: Path):
    _, folder = run(tmp_path, *SHORT, "checkpoint=sync", "checkpoint.every=null", part("saver", "Saver", at=3))
    assert sorted(path.name for path in folder.checkpoints.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_state_is_kept_over_a_kill_and_into_another_layout(tmp_path: Path):
    words = [*SHORT, "checkpoint=sync", "checkpoint.every=2", part("counter", "Counter")]
    train(tmp_path / "whole" / "a", *words)
    path = tmp_path / "resumed" / "a"
    train(path, *words)
    (path / "checkpoints/step-00000004").rename(tmp_path / "gone")
    rows = train(path, *words, "parallelism.dp_shard=2").rows
    assert [row["counter/steps"] for row in rows] == [1, 2, 3, 4], "counted on"
    found, expected = (sums_of(RunFolder(folder), 4) for folder in (path, tmp_path / "whole" / "a"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def test_thresholds_of_clipping_are_kept_over_a_kill(tmp_path: Path):
    """Bitwise, also where their warm-up began with a parent's step."""
    clipped = [*SHORT, "grad_clip=adagc", "grad_clip.warmup_steps=1", "grad_clip.relative=1.01", "checkpoint=sync"]
    words = [*clipped, "training.steps=6", "training.max_grad_norm=null", "checkpoint.every=2", "checkpoint.keep=9"]
    run(tmp_path / "runs/parent", *words, "grad_clip=norm", "training.stop_after=2")
    words += [f"checkpoint.continue_from={tmp_path / 'runs/parent'}"]
    _, whole = run(tmp_path / "runs/whole", *words)
    _, folder = run(tmp_path / "runs/killed", *words)
    (folder.checkpoints / "step-00000006").rename(tmp_path / "gone")
    run(folder.path, *words)
    found, expected = (
        [(row["loss"], row["grad_norm"], row["clip/factor"], row["clip/share"]) for row in read_metrics(each.metrics)]
        for each in (folder, whole)
    )
    assert found[-2:] == expected[-2:]
    assert expected[0][3] == 0, "the warm-up"
    assert expected[-1][3] > 0


def sums_of(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    """Tensors that `Counter` keeps, of a checkpoint."""
    path = CheckpointFolder(folder.checkpoints).path_of(step)
    tensors = {key: torch.zeros(size) for key, size in tensor_shapes(path).items() if key.endswith(".weight_sum")}
    load_into(path, tensors)
    assert len(tensors) > 10
    return tensors


def test_a_tail_is_the_mean_of_the_weights_after_its_steps(tmp_path: Path):
    own_parts.SEEN.clear()
    tail = ["weight_average=tail", "weight_average.steps=2", "checkpoint=sync"]
    _, folder = run(tmp_path / "runs/a", *SHORT, *tail, part("weights", "Weights"))
    for name, value in averages(folder.path, 4).items():
        mean = (own_parts.SEEN[2][name] + own_parts.SEEN[3][name]) / 2
        torch.testing.assert_close(value, mean, atol=1e-7, rtol=1e-6)


def test_compute_weights_are_at_the_gradient_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In bf16 on one data rank, where they are copies of the weights that an optimizer moves before the passes."""
    passes = EagerModel.forward_backward

    def checked(model: EagerModel, *given: Any) -> Any:
        assert model.weights.copies
        assert all(torch.equal(copy, weight.bfloat16()) for weight, copy in model.weights.copies.items())
        return passes(model, *given)

    monkeypatch.setattr(EagerModel, "forward_backward", checked)
    assert run(tmp_path, *SHORT, "optimizer=schedule_free_adamw", "training.mixed_precision=bf16")[0]


def test_parts_that_come_or_go_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    words = [*SHORT, "checkpoint=sync", "checkpoint.every=2"]
    run(tmp_path / "a", *words, "training.stop_after=2", part("counter", "Counter"))
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "b", *words, f"checkpoint.continue_from={tmp_path / 'a'}", part("other", "Counter"))
    assert "the checkpoint has a state of training.parts.counter, which is not a part of this run" in caplog.text
    assert "the checkpoint has no state of training.parts.other, which begins after step 2" in caplog.text


def test_an_error_ends_the_run_and_closes_every_part(tmp_path: Path):
    own_parts.CALLS.clear()
    with pytest.raises(ValueError, match="on purpose"):
        run(tmp_path, *SHORT, part("first", "Recorder"), part("fails", "Fails"), part("last", "Reports"))
    assert own_parts.CALLS[-2:] == ["last close", "first close"]


def test_an_error_before_the_first_step_closes_every_part(tmp_path: Path):
    own_parts.CALLS.clear()
    with joined_process_group(CPU):
        trainer = Trainer(experiment(*SHORT, part("first", "Recorder")), RunFolder(tmp_path), CPU)
        trainer.state.built.init_weights = None  # type: ignore[method-assign]
        with pytest.raises(TypeError):
            trainer.restore()
    assert own_parts.CALLS == ["first close"]


def test_a_report_may_fail_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        assert run(tmp_path, *SHORT, part("aloud", "FailsAloud"))[0]
    assert "the part training.parts.aloud failed, and training continues" in caplog.text
    assert "on purpose" in caplog.text


class RefusesOnce(Commit):
    """Refuses the third step once, as if a group had died in it."""

    refused = False

    def divide(self, step: int, batches: Any, flags: Flags) -> Any:
        self.step = step
        return super().divide(step, batches, flags)

    def reduce(self, parameters: Any, metrics: Any) -> Any:
        if self.step == 3 and not self.refused:
            self.refused = True
            raise StepRefused
        return super().reduce(parameters, metrics)


def test_a_step_that_is_repeated_leaves_no_trace(tmp_path: Path):
    """Neither in averages, nor in experts' counts, thresholds of clipping, or the order of data."""
    words = [*SHORT, "model=qwen3_moe_debug", "weight_average=ema", "weight_average.decay=0.5", "grad_clip=adagc"]
    words += ["grad_clip.warmup_steps=1", "model.moe.router_bias=true", "model.moe.score=sigmoid", "checkpoint=sync"]
    rows, tensors = [], []
    for kind in (Commit, RefusesOnce):
        folder = RunFolder(tmp_path / "runs" / kind.__name__)
        folder.path.mkdir(parents=True)
        with joined_process_group(CPU):
            trainer = Trainer(experiment(*words), folder, CPU, kind)
            trainer.restore()
            assert trainer.run()
            trainer.report.close("done")
            assert getattr(trainer.commit, "refused", True)
        keys = ("step", "loss", "grad_norm", "experts/balance_loss", "experts/bias_range", "clip/share", "clip/factor")
        rows.append([[row[key] for key in keys] for row in read_metrics(folder.metrics)])
        tensors.append(averages(folder.path, 4))
    assert rows[1] == rows[0]
    assert all(torch.equal(tensors[1][name], value) for name, value in tensors[0].items())


def test_ranks_with_other_parts_do_not_start():
    with pytest.raises(Exception, match="Ranks have different parts of training"):
        run_ranks(2, _with_a_part_of_its_own, limit=60)


def _with_a_part_of_its_own() -> None:
    with joined_process_group(CPU):
        mine = own_parts.Acts() if os.environ["RANK"] == "0" else own_parts.Recorder()
        Parts([mine], ranks=torch.distributed.group.WORLD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+training.parts.a={name:probe}"], "training.parts.a.name=probe: this is not an import path"),
        (["+training.parts.a-b={name:my.Probe}"], "+training.parts.a_b.name=my.Probe"),
        ([part("a", "Prob")], "has no Prob"),
        ([part("a", "NoPart")], "does not extend Part"),
        ([part("a", "Stops", att=2)], "takes no argument att"),
        ([part("a", "Stops")], "+training.parts.a.options.at=VALUE"),
        ([part("a", "FailsSilently")], "after the error of a part of phase REPORT"),
        ([part("a", "Counter"), "+training.parts.b={nam:x.Y}"], "training.parts.b.name"),
    ],
)
def test_what_cannot_be_a_part_is_refused_before_the_launch(words: list[str], said: str):
    with pytest.raises(UserError) as refused:
        check_user_code(check(experiment(*SHORT, *words)))
    assert said in str(refused.value)


def test_a_name_of_ours_may_be_yours(tmp_path: Path):
    words = [*SHORT, "weight_average=ema", part("weight_average", "Counter"), part("roofline", "Counter")]
    _, folder = run(tmp_path / "runs/a", *words, "checkpoint=sync")
    assert read_metrics(folder.metrics)[-1]["roofline/steps"] == 4
    assert read_progress(CheckpointFolder(folder.checkpoints).path_of(4))["parts"] == {
        "weight_average": {"mode": "ema", "steps": 4},
        "training.parts.weight_average": {"steps": 4},
        "training.parts.roofline": {"steps": 4},
    }


def test_a_number_may_be_a_tensor_of_one(tmp_path: Path):
    _, folder = run(tmp_path / "one", *SHORT, part("mine", "Tensors", elements=1))
    assert read_metrics(folder.metrics)[-1]["mine/norm"] == 2
    with pytest.raises(UserError, match="mine/norm: after\\(\\) returns a Tensor, and a row has numbers"):
        run(tmp_path / "two", *SHORT, part("mine", "Tensors", elements=2))


@pytest.mark.parametrize("kind", ["Recorder", "Decides"])
def test_a_number_of_a_part_replaces_none_of_ours(tmp_path: Path, kind: str):
    words = ["optimizer.name=tests.trainer.own_parts.Reporting", "optimizer.eps=1e-4"]
    with pytest.raises(UserError, match=r"training\.parts\.optimizer: rows already have optimizer/seen"):
        run(tmp_path, *SHORT, "tracking.log_every=1", *words, part("optimizer", kind))


def test_a_state_that_is_no_json_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"training\.parts\.mine: state\(\) returns what JSON cannot hold"):
        run(tmp_path, *SHORT, "checkpoint=sync", part("mine", "KeepsTensors"))


def test_an_attribute_that_hides_a_member_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"training\.parts\.mine sets self\.before, which hides its member before\(\)"):
        run(tmp_path, *SHORT, part("mine", "Hides"))


def test_parts_are_part_of_the_run_id():
    without = experiment(*SHORT)
    assert run_id(without) != run_id(experiment(*SHORT, part("a", "Counter")))
    assert run_id(without) == run_id(experiment(*SHORT, "training.parts={}"))


def test_examples_are_short():
    lines = (REPOSITORY / "docs/examples/my_package/my_package/parts.py").read_text().split("\n\n\nclass ")[1:]
    assert len(lines) == 3
    assert max(len([line for line in example.splitlines() if line.strip()]) for example in lines) <= 30


def test_a_loop_by_hand_has_the_bits_of_the_trainer(tmp_path: Path):
    words = [*SHORT, "parallelism.tp=2", "training.mixed_precision=fp32"]
    expected = train(tmp_path, *words)
    settings = ["model=llama_debug", "optimizer.eps=1e-4", "optimizer.lr=2e-3", "cluster.device=cpu", *words]
    for losses in run_ranks(2, _by_hand, settings, limit=60):
        assert losses == expected.loss


def _by_hand(words: list[str]) -> list[float]:
    import runpy

    return runpy.run_path(str(REPOSITORY / "docs/examples/train_by_hand.py"))["main"](words)


class Unused(Part):
    """Overrides nothing."""


def test_members_that_nobody_overrides_cost_nothing():
    parts = Parts([Unused()])
    parts.begin(Run(None, None, type("State", (), {"model": type("Model", (), {"parts": []})})(), None, 0))  # type: ignore[arg-type]
    parts.before(1)
    assert parts._having("before") == []
