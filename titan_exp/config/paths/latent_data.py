"""Latent format of the data group: from the manifest of its store, or from the options of images to be encoded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.images.image_options import ImageOptions, ImageSource
from titan_exp.config.images.latent_format import LatentFormat, latent_format
from titan_exp.config.paths.latent_store_manifest import read_latent_manifest
from titan_exp.config.schema.typed_options import typed_options

_KEYS = {field.name: f"data.{field.name}" for field in fields(ImageSource)}
_KEYS |= {field.name: f"data.options.{field.name}" for field in fields(ImageOptions)}


def format_of(data: DataConfig) -> LatentFormat:
    """Format of the samples of a source that holds latents.

    Raises:
        UserError: the store cannot be used, or the options do not fit.
    """
    if data.source == "latents":
        return read_latent_manifest(data.paths[0])
    options = image_options(data)
    with in_keys_of_data():
        return latent_format(options)


def image_options(data: DataConfig) -> ImageOptions:
    """Typed `data.options` of images.

    Raises:
        UserError: a name or a value does not fit.
    """
    return typed_options(ImageOptions, data.options, "data.options")


@contextmanager
def in_keys_of_data() -> Iterator[None]:
    """Name options of `titan-exp encode` in errors by their keys of the data group."""
    try:
        yield
    except UserError as error:
        found = [
            replace(each, field=_KEYS.get(each.field, each.field), remedy=re.sub(r"\w+(?==)", _key, each.remedy))
            for each in error.violations
        ]
        raise UserError("The images cannot be used.", found) from error


def _key(option: re.Match[str]) -> str:
    return _KEYS.get(option[0], option[0])
