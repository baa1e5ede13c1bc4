"""Usage of `titan-exp evaluate`, apart from the evaluation, which imports torch."""

from titan_exp.config.extension import added_usage, help_line, provided
from titan_exp.models.spec.rope import ROPE

FLAGS = "".join(f" [--{name}]" for name in provided("observations"))
"""Flags of extensions."""
MEANINGS = "".join(
    f"  --{name} also {help_line(path)[0].lower()}{help_line(path)[1:]}\n"
    for name, path in provided("observations").items()
)
"""Lines about them."""
USAGE = f"""\
titan-exp evaluate RUN|FOLDER [step=N] [split=held_out|all] [data=GROUP] [data.KEY=VALUE] [training.seq_len=N]
                   [training.micro_batch_size=N] [{ROPE}.KEY=VALUE] [model.context=N] [parallelism.KEY=VALUE]
                   [paths.runs=FOLDER] [--averaged]{FLAGS} [--json] [--trust]
  for example: titan-exp evaluate runs/first/6c43198cf79b data=text data.paths='[notes]' split=all

  Default data are those of the run. split=held_out evaluates the documents that training holds out, split=all every
  document of the source; data.validation_documents=N limits either to its first N documents. The default layout is one
  process; parallelism.tp=2 or dp_shard=2 start two, whatever layout the run had. Sequences beyond the model's context
  need its scaling, as {ROPE}.scaling=yarn {ROPE}.factor=4; or model.context=N, to see what happens without.
{added_usage("evaluate")}  --averaged evaluates the averaged weights of a run with weight_average.
{MEANINGS}  --trust imports the model or data source of a run that another user launched."""
