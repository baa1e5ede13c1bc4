"""Layout check: a shrunken model trains two steps in fp64 on one rank and in each axis that a run asks for."""
