"""Machine diagnostics: measures compute, memory and link rates against data sheets, and the numerics of a recipe.

The usage of the verb is here, since the measurements import torch.
"""

from titan_exp.config.extension import help_line, provided

MACHINE = """\
titan-exp doctor [--seconds N] [--json] [paths.runs=FOLDER] [cluster.device=cpu]
  It measures matmuls by precision, every attention backend forward and backward, copies, operator launches,
  collectives between devices by size, memory beside tensors, and the disk of the runs. It also shows the scheduler.
  It saves the results in .cache/doctor under paths.runs, where runs and the planner read them.
    --seconds N   time to measure, 60 by default (processes need extra time to start)
    --json        print only the saved results"""
LAYOUT = """\
titan-exp doctor --layout [--json] [overrides of train]
  It checks that a model computes the same in the layouts that a run asks for: a small model of its kind trains two
  steps in fp64 on one rank and in each axis and pair of axes. It exits with 3 if one differs. A launch does the same
  for models of your own (plan.layout_check). See titan-exp help own-model."""


def usage() -> str:
    """Usage of the verb, and of the checks that extensions add by a flag."""
    checks = {name: path for name, path in provided("verbs").items() if name.startswith("doctor ")}
    lines = (f"titan-exp {name} ...\n  {help_line(path)} See titan-exp {name} --help." for name, path in checks.items())
    return "\n\n".join([MACHINE, LAYOUT, *lines])
