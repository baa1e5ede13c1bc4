"""Analysis: specialization of experts, loss by position, coordinate checks and rounding errors.

The help of the verbs, with the numbers that it mentions, is here, since the verbs import torch when they run.
"""

STEPS = 5  # number of optimizer steps in a coordinate check
LARGEST_SLOPE = 0.25
"""Largest |slope| of log2 change against log2 width that passes. muP's slopes are 0 in the limit of large widths; the
standard parametrization's are 0.5 to 1."""
WIDTH = "model.dim"  # key of the model's width
SMALL_LLAMA = ("model=llama_debug", "training.seq_len=64", "training.global_batch_size=4")
"""Model and batch of a check if you give no lists."""
LLAMA_WIDTHS = (
    *(f"{WIDTH}=64,128,256,512", "model.heads=4,8,16,32", "model.kv_heads=2,4,8,16"),
    "model.ffn_dim=256,512,1024,2048",
)
"""Widths of that model, with heads of 16 features."""
EXPERT_WIDTHS = (
    *("model=qwen3_moe_debug", f"{WIDTH}=64,128,256", "model.heads=4,8,16", "model.kv_heads=2,4,8"),
    "model.moe.ffn_dim=64,128,256",
)
"""Widths of a model with experts, as an example."""

NUMERICS = """\
titan-exp doctor --numerics [RUN|FOLDER] quantization=RECIPE [--trust] [key=value ...]
  for example: titan-exp doctor --numerics runs/first/6c43198cf79b quantization=float8_rowwise data=text

  Runs the first training batch in fp32 and with the recipe, and lists the linear layers by their quantization error.
  It takes the weights of a run or of any folder that generate reads, and without one the model's initial weights.
  training.micro_batch_size is the number of sequences, 4 by default. --trust imports the model or data source of a run
  that another user launched."""

COORDINATES = f"""\
titan-exp doctor --coordinates [--output FILE.png] [key=value ...]
  for example: titan-exp doctor --coordinates parametrization=mup
  or: titan-exp doctor --coordinates parametrization=mup {" ".join(EXPERT_WIDTHS)}

  The coordinate check of a parametrization: models of several widths take {STEPS} steps at optimizer.lr, without
  warm-up and clipping, and a picture shows the sizes of their activations against the width. The check passes if the
  change of every kind of layer since the initial weights grows or shrinks no faster than width^{LARGEST_SLOPE}. The
  exit status is 3 if not. Give the values at each width as a list with commas, as long as that of {WIDTH}. Without a
  list, the check takes a small Llama that is {LLAMA_WIDTHS[0].partition("=")[2]} wide.
    --output FILE.png   picture, coordinates.png by default"""
