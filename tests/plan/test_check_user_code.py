"""User code is imported, bound, built and traced before a launch; its failures are told from the planner's limits."""

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.check_user_code import check_user_code, failing_user_code
from titan_exp.plan.predict import predict

FAULTY = "model.architecture=tests.models.own_faults.Faulty"
OWN, STATES = "tests.models.own_faults", "tests.optim.own_states"


def resolved(*overrides: str) -> Experiment:
    words = ["model=llama_debug", "cluster.device=cpu", "training.seq_len=64", "parallelism.dp_shard=1", *overrides]
    return resolve_layout(to_experiment(compose(words)), 1)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        check_user_code(resolved(*overrides))
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([FAULTY, "+model.options={fualt:key}"], ["model.options.fualt=key", "did you mean fault?"]),
        ([FAULTY, "+model.options={fault:tensor}"], ["frequencies is a tensor", 'register_buffer("frequencies"']),
        ([FAULTY, "+model.options={fault:constructor}"], ["own_faults.py:", "torch.zeros(3).view(2)", "RuntimeError"]),
        ([FAULTY, "+model.options={blocks:false}", "activation_checkpoint=full"], ["activation_checkpoint.mode=full"]),
        ([FAULTY, "+model.options={blocks:false}", "compile=blocks"], ["compile.components", "ModuleDict"]),
        ([FAULTY, "quantization=float8_rowwise"], ["quantization.recipe", "linear.Linear"]),
        (
            [FAULTY, "+model.options={fault:tied across groups}", "parallelism.dp_shard=2"],
            [
                "blocks.0.weight and blocks.1.weight share a parameter across blocks.0 and blocks.1, which FSDP "
                "gathers apart"
            ],
        ),
        (
            [
                FAULTY,
                "+model.options={fault:tied across groups}",
                "training.mixed_precision=bf16",
                "training.fp32_modules=[blocks.1]",
            ],
            ["the rest and blocks.1 (training.fp32_modules)", "one of which is in fp32"],
        ),
        (
            [FAULTY, "training.mixed_precision=bf16", "training.fp32_modules=[hed]"],
            ["training.fp32_modules=hed", "did you mean head?"],
        ),
        ([f"model.architecture={OWN}.TokensOnly"], ["(tokens, positions, documents)", "def forward("]),
        ([f"optimizer.name={OWN}.Optimizer"], ["needs rho", "+optimizer.options.rho=VALUE"]),
        ([f"optimizer.name={OWN}.Optimizer", "+optimizer.options.roh=1"], ["takes no argument roh", "it takes rho"]),
        (["optimizer.name=torch.optim.Adam", "+optimizer.options.lr=1"], ["we pass it already"]),
        (["optimizer.name=torch.optim.Muon"], ["Muon", "2D"]),
        (
            [f"optimizer.name={OWN}.DuckTypedOptimizer", "quantization=float8_rowwise"],
            [
                "DuckTypedOptimizer, which is not a torch.optim.Optimizer",
                "class DuckTypedOptimizer(torch.optim.Optimizer)",
            ],
        ),
        (["optimizer.name=torch.optim.LBFGS"], ["doesn't support per-parameter options"]),
        (["optimizer.name=torch.optim.SparseAdam"], ["does not support dense gradients"]),
        (
            ["optimizer.name=torch.optim.Rprop", "parallelism.dp_shard=2"],
            ["parallelism.dp_shard=2", "torch cannot shard", "parallelism.dp_shard=1"],
        ),
        ([f"optimizer.name={STATES}.Norms", "parallelism.tp=2"], ["norm is a DTensor placed", "checkpoint=none"]),
        ([f"optimizer.name={STATES}.Closing"], ["step() needs closure", "optimizer=adamw"]),
        ([f"optimizer.name={STATES}.Hidden"], ["keeps self.count outside", "self.state[parameter]", "checkpoint=none"]),
        ([f"optimizer.name={STATES}.Rebuilding"], ["keeps self.count outside"]),
        ([f"optimizer.name={STATES}.Generating"], ["generator is a torch", "Generator", "checkpoint=none"]),
        ([f"optimizer.name={STATES}.Failing"], ["own_states.py:", "no gradient like that"]),
        ([f"data.source={OWN}.Corpus"], ["__len__ and no __getitem__"]),
        ([f"data.source={OWN}.Corpus", "+data.options.foldre=x"], ["data.options.foldre", "did you mean folder?"]),
        (["data.source=tests.data.corpora.OwnStream"], ["data.validation_documents=1024 to evaluate"]),
        (["data.source=tests.data.corpora.own_stream"], ["data.validation_documents=1024 to evaluate"]),
        ([f"lr_schedule.decay={OWN}.without_progress"], ["without_progress(progress, **options)"]),
        (
            [f"lr_schedule.decay={OWN}.too_large", "lr_schedule.decay_steps=10"],
            ["return a factor in [0, 1]", "lr_schedule.decay"],
        ),
        ([f"training.objective={OWN}.Corpus"], ["defines no build"]),
        (
            ["model.architecture=tests.models.own_head_norm", "+model.gathers=gone", "parallelism.tp=2"],
            ["blocks.0.attention.gone, and Decoder has no such module", "Rowwise(gathers=...)"],
        ),
        (
            ["model.architecture=tests.models.own_style", "+model.handled=false", "parallelism.tp=2"],
            ["blocks.0.attention.whole has the style AllHeads", "write MODULES[AllHeads] = your_handler"],
        ),
        ([f"{FAULTY}", f"optimizer.name={OWN}.Optimizer", "quantization=mxfp8"], ["quantization.recipe", "needs rho"]),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else None,
)
def test_what_would_fail_is_refused(overrides: list[str], parts: list[str]):
    said = refusal(*overrides)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    "overrides",
    [
        [FAULTY, "activation_checkpoint=full", "compile=blocks"],
        [FAULTY, "training.mixed_precision=bf16"],
        [f"optimizer.name={OWN}.Optimizer", "+optimizer.options.rho=1"],
        ["optimizer.name=torch.optim.NAdam", "lr_schedule.decay=math.cos"],
        *[
            [f"optimizer.name=torch.optim.{name}"]
            for name in ("Adagrad", "Rprop", "ASGD", "RAdam", "Adamax", "Adadelta")
        ],
        *[
            [f"optimizer.name={STATES}.{name}", "parallelism.dp_shard=2"]
            for name in ("Counting", "OnShards", "Reducing")
        ],
        ["optimizer.name=torch.optim.RAdam", "parallelism.dp_shard=2"],
        [f"optimizer.name={STATES}.Hidden", "checkpoint=none"],
        ["model.architecture=tests.models.own_model.Bigram", "+model.options={scale:2.0}"],
        ["data.source=tests.data.corpora.OwnStream", "data.validation_documents=1024"],
        ["data.source=tests.data.corpora.OwnStream", "evaluation.every=0"],
        ["data.source=tests.data.corpora.OwnTable", "data.validation_fraction=0.1"],
        ["model.architecture=tests.models.own_experts.Mixture", "quantization=mxfp8"],
    ],
)
def test_what_works_passes(overrides: list[str]):
    check_user_code(resolved(*overrides))


@pytest.mark.parametrize("degree", ["tp", "pp", "cp"])
def test_a_family_needs_the_modules_of_a_layout(degree: str):
    model = ["model.architecture=tests.models.own_bare_family", f"parallelism.{degree}=2", "training.seq_len=64"]
    assert f"parallelism.{degree}=2" in refusal(*model)


@pytest.mark.parametrize(("fault", "line"), [("shape", "x = x @ torch.zeros(7, 3)"), ("key", '{}["gone"]')])
def test_a_failing_step_is_shown_by_its_frames(fault: str, line: str):
    experiment = resolved(FAULTY, f"+model.options={{fault:{fault}}}")
    with pytest.raises(UserError) as error, failing_user_code(experiment, "It fails:"):
        predict(experiment, None)
    first, *_, frame, code, reason = str(error.value).splitlines()
    assert first == "It fails:"
    assert "own_faults.py:" in frame
    assert "in forward" in frame
    assert code.strip().startswith(line)
    assert ("same reduction dim" if fault == "shape" else "KeyError: 'gone'") in reason


@pytest.mark.parametrize("fault", ["value", "numpy"])
def test_limits_of_fake_tensors_are_not_the_users_errors(fault: str):
    experiment = resolved(FAULTY, f"+model.options={{fault:{fault}}}")
    check_user_code(experiment)
    with pytest.raises(Exception, match=r"_local_scalar_dense|numpy") as error, failing_user_code(experiment, ""):
        predict(experiment, None)
    assert not isinstance(error.value, UserError)


def test_errors_of_the_planner_pass_unchanged(monkeypatch: pytest.MonkeyPatch):
    from titan_exp.plan.trace.memory_tracker import MemoryTracker

    # Called below the user's forward pass, so that the user's frames are in the traceback.
    code = compile("def track(self, *args, **kwargs):\n    raise KeyError('planner')", "tracker.py", "exec")
    scope = {"__name__": "titan_exp.plan.trace.memory_tracker"}
    exec(code, scope)
    monkeypatch.setattr(MemoryTracker, "track", scope["track"])
    experiment = resolved(FAULTY)
    with pytest.raises(KeyError, match="planner"), failing_user_code(experiment, ""):
        predict(experiment, None)
