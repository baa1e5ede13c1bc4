"""Captioned images of a kind."""

from titan_exp.config.images.image_options import ImageOptions, ImageSource
from titan_exp.data.images.captioned_images import CaptionedImages


def open_images(source: ImageSource, options: ImageOptions) -> CaptionedImages:
    """Open images.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    match source.images:
        case "emoji":
            from titan_exp.data.images.emoji import EmojiImages

            return EmojiImages(options.size)
        case "glyphs":
            from titan_exp.data.images.glyphs import GlyphImages

            return GlyphImages(options.size)
        case "folder":
            from titan_exp.data.images.folder import FolderImages

            return FolderImages(source.paths, options.caption_key)
        case "webdataset":
            from titan_exp.data.images.webdataset import WebDatasetImages

            return WebDatasetImages(source.paths, options.caption_key)
        case "huggingface":
            from titan_exp.data.images.huggingface import HuggingFaceImages

            return HuggingFaceImages(source.paths, options.split, options.image_key, options.caption_key)
