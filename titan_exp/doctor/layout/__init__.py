"""Layout check: a shrunken model trains two steps in fp64 on one rank and in each axis that a run asks for.

Its verdict is made in a process of its own; importing this package imports no torch.
"""

import time
from dataclasses import replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.doctor.layout import cases


def check_layouts(experiment: Experiment, seconds: float) -> cases.Verdict:
    """Train a shrunken model of a run with a resolved layout for two steps, on one rank and in each axis and pair of
    axes that the run asks for, and compare. It stops after `seconds`, with a note. It makes fp64 of every dtype of
    torch in this process, and nothing of dropout, so that only a process of its own may call it."""
    in_double()
    from titan_exp.doctor.layout.compare import compare
    from titan_exp.doctor.layout.ranks import without_dropout
    from titan_exp.doctor.layout.shrink import shrink

    without_dropout()
    began = time.monotonic()
    small = shrink(experiment)
    if isinstance(small, str):
        return cases.Verdict(notes=(f"We did not check its layouts, because we cannot shrink the model: {small}.",))
    asked, refused = cases.cases(experiment, small)
    verdict = compare(asked, began + seconds)
    notes = (*verdict.notes, *(f"Not checked: {sentence}." for sentence in refused))
    return replace(verdict, notes=notes, seconds=time.monotonic() - began)


def in_double() -> None:
    """Let every floating dtype of torch be fp64 in this process. Call it before any other import that may read a dtype:
    afterwards every floating dtype that Python code names is fp64, in forward, backward and recomputation, in bodies of
    custom operators, and in your code."""
    import torch

    torch.set_default_dtype(torch.float64)
    for name in ("float32", "float", "bfloat16", "float16", "half"):
        setattr(torch, name, torch.float64)
    for name in ("float", "bfloat16", "half"):
        setattr(torch.Tensor, name, torch.Tensor.double)
