"""Faults of overrides, values and rules that do not depend on each other are listed together, and no others."""

import itertools
import shlex
from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.cli.main import main
from titan_exp.config.hydra.compose import compose
from titan_exp.config.hydra.resolve import consequences
from titan_exp.config.schema.typed_config import GapError, readable_part, with_gaps
from titan_exp.rules import violations

FAULTS = {
    "a name": "training.stepsx=3",
    "an option": "lr_schedule=nonsense",
    "a value that cannot be read": "'training.seq_len=(3'",
    "a type": "optimizer.lr=y",
    "a bound": "training.steps=-1",
    "a component": "optimizer.name=adamx",
    "an import path": "parametrization.name=nothing.here",
    "a rule": "data.source=foo",
    "another rule": "checkpoint.accept_changes=[nonsense]",
    "a rule of the layout": "parallelism.tp=3",
}
"""A fault of each stage."""


def said(capsys: pytest.CaptureFixture[str], *faults: str) -> dict[str, str]:
    """Reason and remedy by key and value of a refusal."""
    capsys.readouterr()
    words = [word for fault in faults for word in shlex.split(fault)]
    assert main(["train", "model=llama_debug", *words, "--dry-run"]) == 2
    lines = [*capsys.readouterr().err.splitlines()[1:], ""]
    return {
        line.strip().partition(": ")[0]: f"{line} {remedy}"
        for line, remedy in itertools.pairwise(lines)
        if line.startswith("  ") and not line.startswith("   ")
    }


def key_of(fault: str) -> str:
    return shlex.split(fault)[0]


PAIRS = [
    (first, second)
    for first, second in itertools.combinations(FAULTS, 2)
    if FAULTS[first].strip("'").partition(".")[0] != FAULTS[second].strip("'").partition(".")[0]
]


# By day each fifth pair, in which every fault occurs; all of them by night.
@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, marks=[] if number % 5 == 0 else pytest.mark.night) for number, pair in enumerate(PAIRS)],
)
def test_two_faults_are_listed_together(first: str, second: str, capsys: pytest.CaptureFixture[str]):
    """Unless the second may be a consequence of the first: a layout is not judged whose sequence length is unknown."""
    alone = said(capsys, FAULTS[first]) | said(capsys, FAULTS[second])
    together = said(capsys, FAULTS[first], FAULTS[second])
    assert key_of(FAULTS[first]) in together
    depends = "a rule of the layout" in (first, second) and {"a name", "a value that cannot be read"} & {first, second}
    assert (key_of(FAULTS[second]) in together) is not bool(depends)
    assert together.items() <= alone.items(), "nothing is listed that is not a fault alone"


def test_what_is_computed_from_a_wrong_value_is_no_fault(capsys: pytest.CaptureFixture[str]):
    assert list(said(capsys, "training.steps=-1")) == ["training.steps=-1"]
    cfg = compose(["model=llama_debug"])
    assert {"lr_schedule.warmup_steps", "lr_schedule.decay_steps"} <= consequences(cfg, {"training.steps"})
    assert consequences(cfg, {"tracking.log_every"}) == set()


@pytest.mark.parametrize("line", ["modle=x", "+experiment=smokee", "llama_debug", "learning_rate=1"])
def test_an_override_of_no_known_group_may_have_meant_any(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", line, "optimizer.lr=y", "data.source=foo"]) == 2
    err = capsys.readouterr().err
    assert "optimizer.lr=y: must" not in err
    assert "data.source" not in err


def test_a_sweep_does_not_judge_what_it_varies(capsys: pytest.CaptureFixture[str]):
    words = ["model=llama_debug", "optimizer.lrx=3", "parallelism.tp=2,3", "parallelism.pp=7", "data.source=foo"]
    assert main(["train", "-m", *words]) == 2
    err = capsys.readouterr().err
    assert "optimizer.lrx=3: unknown key" in err
    assert "data.source=foo: unknown source" in err
    assert "parallelism" not in err


def test_a_credential_is_not_quoted_beside_another_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    secret = "hf_" + "a1B2c3D4e5F6g7H8i9"
    assert main(["train", "model=llama_debug", "training.steps=x", f"data.source={secret}"]) == 2
    assert secret not in capsys.readouterr().err


def test_rules_find_what_they_find_without_gaps():
    """Every group in turn has a gap in each value: rules that do not read it say the same, and none crashes."""
    cfg = compose(["model=llama_debug", "parallelism.tp=3", "data.source=foo", "checkpoint.accept_changes=[nonsense]"])
    found, whole = readable_part(cfg)
    assert (found, whole) == ([], experiment("model=llama_debug", "parallelism.tp=3", "data.source=foo",
                                             "checkpoint.accept_changes=[nonsense]"))  # fmt: skip
    every = violations(whole)
    for group, values in vars(whole).items():
        for name in vars(values):
            known = {key: value for key, value in vars(values).items() if key != name}
            gap = with_gaps(type(values), known)
            with pytest.raises(GapError):
                getattr(gap, name)
            try:
                left = violations(type(whole)(**{**vars(whole), group: gap}))
            except GapError:
                continue  # the layout reads it
            assert [violation for violation in left if violation not in every] == [], f"{group}.{name}"
