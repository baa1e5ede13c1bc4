"""Download tokenizer, configuration and weights from the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from titan_exp.checkpoint.remote.hub_download import download
from titan_exp.config.command_line.options import HELP, options_help, parse_options
from titan_exp.config.command_line.verb_options import DownloadOptions
from titan_exp.config.errors.user_error import UserError

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*/tokenizer.model")
CONFIGURATION = ("config.json", "generation_config.json", "*/params.json", "params.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ORIGINAL = ("consolidated.*.pth", "*/consolidated.*.pth")

FILES: dict[str, tuple[str, ...]] = {
    "tokenizer": TOKENIZER,
    "config": CONFIGURATION,
    "weights": (*TOKENIZER, *CONFIGURATION, *WEIGHTS),
    "original": (*TOKENIZER, *CONFIGURATION, *ORIGINAL),
    "all": ("*",),
}
"""Path patterns in the repository, for each value of `files`."""

USAGE = "titan-exp download OWNER/NAME [files=tokenizer|config|weights|original|all] [target=FOLDER]"


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code. Gated repositories need a token in HF_TOKEN."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, DownloadOptions), end="")
        return 0
    options = parse_options(DownloadOptions, argv, positional=["repo"])
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise UserError(f"{USAGE}\n  {options.repo} is not OWNER/NAME" if options.repo else USAGE)
    target = Path(options.target or f"downloads/{options.repo.partition('/')[2]}").expanduser()
    download(options.repo, target, FILES[options.files], options.revision or None)
    found = sorted(path for path in target.rglob("*") if path.is_file() and ".cache" not in path.parts)
    if not found:
        raise UserError(f"{options.repo} has no files of files={options.files}; files=all downloads all files.")
    print(f"{target}: {len(found)} files, {sum(path.stat().st_size for path in found) / 1e9:.2f} GB")
    return 0
