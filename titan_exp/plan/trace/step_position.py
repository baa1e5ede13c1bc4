"""Positions in a traced step: stage, micro-batch, part and block to which a segment belongs."""

from typing import NamedTuple

NOWHERE = -1
"""Stage number outside all stages, e.g. of the loss."""
PROLOGUE, REDUCE, GROUP, REST, END = "prologue", "reduce", "group", "rest", "end"
"""Parts of a step outside actions: before the first; a stage's gradient reduction, its FSDP parameter groups, and the
rest of it; the place of reduced gradients."""
TIED_SUM, OPTIMIZER_STEP = "sum of tied gradients", "optimizer step"
"""Last parts of a step: the sum of tied gradients between stages; from summed gradients to the next step."""
BETWEEN, SUM, RESULT = " between", " sum", " result"
"""Suffixes of an action's parts: messages after it; the sums of FSDP parameter groups' gradients in a split backward
pass; the storage of its result."""
GRADIENT_SUM = "sum of gradients"
"""Phase of the sum of a parameter group's gradients in a split backward pass."""


class StepPosition(NamedTuple):
    """Position in a step."""

    step: int
    """-1 for the build, 0 for the first step, 1 for the second."""
    stage: int
    """Pipeline stage."""
    micro: int | None
    """Micro-batch; None for parts that run once per step."""
    part: str
    """Part of the step: `F before`, `F block`, `F after` and so on for an action."""
    block: int | None
    """Block of the stage; None outside blocks, -1 for the group of the stage's other parameters."""

    def next_group(self, part: str) -> "StepPosition":
        """Position of the next FSDP parameter group of a part."""
        return self._replace(part=part, block=self.block + 1 if self.part == part and self.block is not None else 0)

    def next_phase(self, phase: str) -> "StepPosition":
        """Position at which a phase begins."""
        action = self.part[:1]
        if phase == GRADIENT_SUM:
            return self.next_group(action + SUM)
        if self.micro is not None and ", block " in phase:
            kind = action if action in "IW" else phase[0].upper()
            return self._replace(part=f"{kind} block", block=int(phase.partition(", block ")[2]))
        return self if self.block is None else self._replace(part=f"{action} after", block=None)


PROLOGUES = [StepPosition(step, NOWHERE, None, PROLOGUE, None) for step in (0, 1)]
"""Position before the first action, for each step."""
