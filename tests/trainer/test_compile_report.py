"""Compile report: logs the first compilation, and warns of later ones."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from titan_exp.trainer.profiling.step_times import MAX_WARNINGS, CompileReport


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[int, str]]]:
    """Lines since the last call."""
    caplog.set_level(logging.INFO, logger="titan_exp")

    def lines() -> list[tuple[int, str]]:
        found = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "titan_exp"]
        caplog.clear()
        return found

    return lines


def compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: x.sin(), backend="aot_eager", dynamic=False)


def test_without_compilation_nothing_is_logged(said):
    report = CompileReport()
    report.after("step", 1)
    report.after("evaluation", 1)
    assert said() == []


def test_the_first_compilation_of_step_and_evaluation_is_logged(said):
    report, function = CompileReport(), compiled()
    function(torch.ones(3, requires_grad=True)).sum().backward()
    report.after("step", 1)
    ((level, text),) = said()
    assert level == logging.INFO
    assert text.startswith("first step: compilation took ")
    function(torch.ones(3, requires_grad=True)).sum().backward()
    report.after("step", 2)
    assert said() == []
    with torch.no_grad():
        function(torch.ones(3))
    report.after("evaluation", 2)
    ((level, text),) = said()
    assert level == logging.INFO
    assert text.startswith("first evaluation: compilation took ")


def test_recompilation_is_a_warning(said):
    report, function = CompileReport(), compiled()
    function(torch.ones(3, requires_grad=True)).sum().backward()
    report.after("step", 1)
    said()
    function(torch.ones(5, requires_grad=True)).sum().backward()
    report.after("step", 3)
    ((level, text),) = said()
    assert level == logging.WARNING
    assert text.startswith("recompiled in the step at step 3")
    assert "expected 3, actual 5" in text
    assert "compile=none" in text


def test_the_number_of_warnings_is_limited(said):
    report, function = CompileReport(), compiled()
    for step in range(1, MAX_WARNINGS + 3):
        function(torch.ones(step))
        report.after("step", step)
    lines = said()
    assert len(lines) == 1 + MAX_WARNINGS
    assert "do not log further" in lines[-1][1]
    assert all("do not log further" not in text for _, text in lines[:-1])


def test_earlier_compilation_in_the_process_is_not_counted(said):
    compiled()(torch.ones(3))
    CompileReport().after("step", 1)
    assert said() == []
