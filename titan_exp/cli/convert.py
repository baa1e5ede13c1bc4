"""Convert checkpoints to and from Hugging Face, diffusers, Meta's Llama, torchtune and plain torch."""

from collections.abc import Sequence

from titan_exp.config.command_line.options import options_help, parse_options
from titan_exp.config.command_line.verb_options import ConvertOptions
from titan_exp.config.errors.user_error import UserError

USAGE = """\
titan-exp convert SOURCE TARGET [format=...] [dtype=...]
  for example: titan-exp convert runs/first/6c43198cf79b export/first dtype=bf16"""
HELP_TEXT = options_help(USAGE, ConvertOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options = parse_options(ConvertOptions, argv, positional=["source", "target"])
    if not options.source or not options.target:
        raise UserError(USAGE)
    from titan_exp.checkpoint.convert_command import convert_command
    from titan_exp.launch.run_lookup import run_path

    convert_command(options, run_path)
    return 0
