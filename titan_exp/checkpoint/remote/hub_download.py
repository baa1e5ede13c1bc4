"""Hugging Face hub downloads through huggingface_hub, which resumes interrupted downloads."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError


def download(repo: str, target: Path, patterns: Sequence[str], revision: str | None = None) -> None:
    """Download a repository's files that match the patterns, or resume. Raises UserError if the repository or the hub
    is unreachable, or access is denied."""
    from huggingface_hub import HfApi, errors, snapshot_download

    token = os.environ.get("HF_TOKEN") or False
    try:
        # Checked first: without network, `snapshot_download` accepts an existing folder with any content.
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
        # The library does not wrap its HTTP client's errors.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        raise UserError(_unreachable(repo, error)) from error


def _access(token: Any) -> str:
    if token:
        return "The token in HF_TOKEN has no access: accept the licence on the hub with the token's account."
    return "Set the environment variable HF_TOKEN to a token; it is used for this command and not stored."


def _unreachable(repo: str, error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.errno in (28, 122):
        return f"{repo} could not be stored: the disk is full. Downloaded files are kept; free space and retry."
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    return (
        f"{repo} could not be downloaded: the hub does not answer ({reason}).\n"
        "  The same command resumes. Without network, copy the folder from a machine that has one.\n"
        "  HTTPS_PROXY and HF_ENDPOINT are honoured; HF_HUB_OFFLINE=1 must not be set."
    )
