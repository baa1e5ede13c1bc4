"""Usage of `titan-exp doctor`, apart from the measurements, which import torch."""

from titan_exp.models.parametrization.example_widths import EXPERT_WIDTHS, LLAMA_WIDTHS, WIDTH

STEPS = 5
"""Optimizer steps of a coordinate check."""
LARGEST_SLOPE = 0.25
"""Largest |slope| of log2 change against log2 width that passes. muP's slopes are 0 in the limit of large widths; the
standard parametrization's are 0.5 to 1."""

MACHINE = """\
titan-exp doctor [--seconds N] [--json] [paths.runs=FOLDER] [cluster.device=cpu]
  measures matmuls by precision, every attention backend forward and backward, copies, operator launches, collectives
  between devices by size, memory beside tensors and the disk of the runs, and reports the scheduler. Results are
  saved in .cache/doctor under paths.runs, where runs and the planner read them.
    --seconds N   measuring time, default 60; starting processes takes extra time
    --json        print only the saved results

titan-exp doctor --numerics [RUN|FOLDER] quantization=RECIPE ...
  reports the rounding error of a numeric recipe per layer; see titan-exp doctor --numerics --help.

titan-exp doctor --coordinates parametrization=mup ...
  draws the coordinate check of a parametrization; see titan-exp doctor --coordinates --help."""

NUMERICS = """\
titan-exp doctor --numerics [RUN|FOLDER] quantization=RECIPE [--trust] [key=value ...]
  for example: titan-exp doctor --numerics runs/first/6c43198cf79b quantization=float8_rowwise data=text

  Runs the first training batch in fp32 and with the recipe, through the weights of a run (or any folder that generate
  reads; the default is the model's initial weights), and lists the linear layers by their quantization error.
  training.micro_batch_size is the number of sequences, default 4. --trust imports the model or data source of a run
  that another user launched."""

COORDINATES = f"""\
titan-exp doctor --coordinates [--output FILE.png] [key=value ...]
  for example: titan-exp doctor --coordinates parametrization=mup
  or: titan-exp doctor --coordinates parametrization=mup {" ".join(EXPERT_WIDTHS)}

  The coordinate check of a parametrization: models of several widths take {STEPS} steps at optimizer.lr, without
  warm-up and clipping, and the sizes of their activations are drawn against the width. It passes if the change of every
  kind of layer since the initial weights grows or shrinks no faster than width^{LARGEST_SLOPE}; exit status 3 if not.
  Lists with commas are the values at each width, all as long as that of {WIDTH}. Without one, a small Llama is
  {LLAMA_WIDTHS[0].partition("=")[2]} wide.
    --output FILE.png   picture, default coordinates.png"""
