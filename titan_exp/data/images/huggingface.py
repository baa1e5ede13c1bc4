"""Captioned images of a Hugging Face data set: from the hub, a local folder of files, or `save_to_disk`."""

from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.images.captioned_images import no_images, to_rgb


class HuggingFaceImages:
    """Images and captions of two columns; rows without a caption are left out.

    Raises:
        UserError: the data set cannot be loaded, or has no such column.
    """

    def __init__(self, path: str, split: str, image_key: str, caption_key: str) -> None:
        if not path:
            raise no_images(path, "no data set is given", "images=huggingface paths=OWNER/NAME, or a local folder")
        data = _load(path, split)
        for option, key in (("image_key", image_key), ("caption_key", caption_key)):
            if key not in data.column_names:
                reason = f"{path} has no such column"
                remedy = f"{option}= one of {listed(data.column_names)}"
                raise UserError("This cannot be encoded.", [Violation(option, key, reason, remedy)])
        captions = [str(text or "").strip() for text in data.select_columns([caption_key])[caption_key]]
        self._rows = [(index, caption) for index, caption in enumerate(captions) if caption]
        if not self._rows:
            raise no_images(path, f"no row has a caption under {caption_key}", "caption_key=... of the captions")
        self._data, self._key, self._path = data, image_key, path
        left_out = len(captions) - len(self._rows)
        self.name = f"{len(self._rows)} images of {path}, {left_out} without caption left out, {data._fingerprint}"

    def __len__(self) -> int:
        return len(self._rows)

    def caption(self, index: int) -> str:
        """Caption of an image."""
        return self._rows[index][1]

    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""
        image = self._image(index)
        return image.height, image.width

    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8."""
        return to_rgb(self._image(index), f"{self._path}: row {self._rows[index][0]}")

    def _image(self, index: int) -> Any:
        row = self._rows[index][0]
        try:
            return self._data[row][self._key]
        except Exception as error:  # decoders of many formats
            reason = f"row {row} cannot be decoded: {error}"
            raise no_images(self._path, reason, "remove the row from the data set") from error


def _load(path: str, split: str) -> Any:
    from datasets import Dataset, load_dataset, load_from_disk

    local = Path(path).expanduser()
    try:
        if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
            found = load_from_disk(str(local))
            return found if isinstance(found, Dataset) else found[split]
        return load_dataset(str(local) if local.exists() else path, split=split)
    except Exception as error:  # the hub, its cache, and files of many formats
        reason = f"it cannot be loaded with split={split}: {str(error).strip().partition(chr(10))[0]}"
        raise no_images(path, reason, "OWNER/NAME on the hub, or a local folder, and split=...") from error
