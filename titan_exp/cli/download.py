"""`titan-exp download REPO`: tokenizer, configuration and weights from the Hugging Face hub, by `huggingface_hub`.

An interrupted download resumes.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_exp.config.command_line.parse_options import HELP, options_help, parse_options
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
"""Path patterns in the repository by value of `files`."""

USAGE = "titan-exp download OWNER/NAME [files=tokenizer|config|weights|original|all] [target=FOLDER]"


def download_command(arguments: Sequence[str]) -> int:
    """Run `titan-exp download`; returns the exit code.

    The token for gated repositories is read from the environment variable HF_TOKEN and not stored.

    Raises:
        UserError: an option is wrong, the repository or the network is unreachable, or access is denied.
    """
    if set(arguments) & set(HELP):
        print(options_help(USAGE, DownloadOptions), end="")
        return 0
    options = parse_options(DownloadOptions, arguments, positional="repo")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise UserError(f"{USAGE}\n  {options.repo} is not of the form OWNER/NAME" if options.repo else USAGE)
    target = Path(options.target or f"downloads/{options.repo.partition('/')[2]}").expanduser()
    download(options.repo, target, FILES[options.files], options.revision or None)
    found = sorted(path for path in target.rglob("*") if path.is_file() and ".cache" not in path.parts)
    if not found:
        raise UserError(f"{options.repo} has no files for files={options.files}; files=all fetches everything.")
    print(f"{target}: {len(found)} files, {sum(path.stat().st_size for path in found) / 1e9:.2f} GB")
    return 0


def download(repo: str, target: Path, patterns: Sequence[str], revision: str | None = None) -> None:
    """Download or resume the files of a repository that match `patterns`.

    Raises:
        UserError: the repository is gated or unknown, the hub is unreachable, or the disk is full.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    token = os.environ.get("HF_TOKEN") or False
    try:
        # Without network, `snapshot_download` accepts any existing folder, whatever it holds.
        revision = HfApi(token=token).repo_info(repo, revision=revision).sha
        snapshot_download(repo, revision=revision, local_dir=target, allow_patterns=list(patterns), token=token)
    except errors.GatedRepoError as error:
        raise UserError(f"{repo} is gated. {_access(token)}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{repo} is not on the hub, or is private. {_access(token)}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision}.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise UserError(_unreachable(repo, error)) from error
    except Exception as error:
        # The library passes on errors of its HTTP client.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        raise UserError(_unreachable(repo, error)) from error


def _access(token: Any) -> str:
    if token:
        return "The token in HF_TOKEN has no access: accept the licence on the hub with the token's account."
    return "Set the environment variable HF_TOKEN to a token; it is not stored."


def _unreachable(repo: str, error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.errno in (28, 122):
        return f"{repo} could not be stored: the disk is full. Files stay; free some space and repeat the command."
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    return (
        f"{repo} could not be downloaded: the hub does not answer ({reason}).\n"
        "  Downloaded files stay, and the same command resumes. Without network, copy the folder from a machine that\n"
        "  has one. HTTPS_PROXY and HF_ENDPOINT are honoured; HF_HUB_OFFLINE=1 must not be set."
    )
