"""Inference: text generation, and evaluation of checkpoints.

The usage of `titan-exp evaluate` is here, since the evaluation imports torch.
"""

from titan_exp.config.extension import added_usage, help_line, provided
from titan_exp.models.spec.rope import ROPE

FLAGS = "".join(f" [--{name}]" for name in provided("observations"))  # flags of extensions
MEANINGS = "".join(
    f"  --{name} also {help_line(path)[:1].lower()}{help_line(path)[1:]}\n"
    for name, path in provided("observations").items()
)
"""Help lines about these flags."""
USAGE = f"""\
titan-exp evaluate RUN|FOLDER [step=N] [split=held_out|all] [data=GROUP] [data.KEY=VALUE] [training.seq_len=N]
                   [training.micro_batch_size=N] [{ROPE}.KEY=VALUE] [model.context=N] [parallelism.KEY=VALUE]
                   [paths.runs=FOLDER] [--averaged]{FLAGS} [--json] [--trust]
  for example: titan-exp evaluate runs/first/6c43198cf79b data=text data.paths='[notes]' split=all

  The data are those of the run unless you choose others. split=held_out evaluates the documents that training holds
  out, and split=all every document of the source. data.validation_documents=N limits either to its first N documents.
  By default one process evaluates, whatever layout the run had. parallelism.tp=2 or dp_shard=2 start two. Sequences
  beyond the model's context need a scaling, as in {ROPE}.scaling=yarn {ROPE}.factor=4. With
  model.context=N you see what happens without one.
{added_usage("evaluate")}  --averaged evaluates the averaged weights of a run with weight_average.
{MEANINGS}  --trust imports the model or data source of a run that another user launched."""
