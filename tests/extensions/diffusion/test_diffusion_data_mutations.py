"""Mutations of the encoding and the drawing of images, each of which a test of them must notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extensions.diffusion import test_captioned_images as images
from tests.extensions.diffusion import test_latent_store as stores
from tests.extensions.diffusion import test_rectified_flow as flow
from titan_exp.extensions.diffusion import encoders, latents, rectified_flow, samples
from titan_exp.extensions.diffusion import images as buckets
from titan_exp.extensions.diffusion.images import Bucket

Notice = Callable[[Path], Any]
"""Test that notices it, given a folder."""
__all__: list[str] = []


def images_are_cropped_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> Notice:
    plain = buckets.fit

    def fit(image: np.ndarray, bucket: Bucket, token_size: int) -> np.ndarray:
        height, width = bucket.rows * token_size, bucket.columns * token_size
        factor = max(height / image.shape[0], width / image.shape[1])
        return plain(image[: round(height / factor), : round(width / factor)], bucket, token_size)

    monkeypatch.setattr(images, "fit", fit)
    return lambda _: images.test_images_are_scaled_to_cover_a_bucket_and_cropped_in_the_middle()


def ratios_are_compared_as_differences(monkeypatch: pytest.MonkeyPatch) -> Notice:
    def nearest(height: int, width: int, buckets: list[Bucket]) -> Bucket:
        return min(buckets, key=lambda shape: abs(shape.rows / shape.columns - height / width))

    monkeypatch.setattr(images, "nearest_bucket", nearest)
    return lambda _: images.test_buckets_have_equally_many_tokens_and_images_go_to_the_nearest()


def rows_are_taken_for_columns(monkeypatch: pytest.MonkeyPatch) -> Notice:
    plain = encoders.nearest_bucket
    monkeypatch.setattr(encoders, "nearest_bucket", lambda height, width, shapes: plain(width, height, shapes))
    return images.test_hugging_face_data_sets_from_disk_and_from_a_folder


def held_out_images_depend_on_their_place(monkeypatch: pytest.MonkeyPatch) -> Notice:
    counted = iter(range(10**6))
    monkeypatch.setattr(encoders, "unit_hash", lambda text: next(counted) % 20 / 20)
    return captions_decide


def captions_decide(path: Path) -> None:
    """Images with equal captions are in one split."""
    from tests.extensions.diffusion.made_images import Flags
    from titan_exp.extensions.diffusion.encoders import order_samples

    class Pairs(Flags):
        def __len__(self) -> int:
            return 200

        def caption(self, index: int) -> str:
            return f"flag {index // 2}"

    found = order_samples(Pairs(), [Bucket(2, 2)], 0.3, seed=1)
    held_out = {index // 2 for _, group in found["validation"] for index in group}
    trained = {index // 2 for _, group in found["train"] for index in group}
    assert held_out
    assert not held_out & trained


def patches_are_ordered_by_row_column_channel(monkeypatch: pytest.MonkeyPatch) -> Notice:
    def to_tokens(pictures: np.ndarray, patch: int) -> np.ndarray:
        n, height, width, channels = pictures.shape
        found = pictures.reshape(n, height // patch, patch, width // patch, patch, channels)
        return found.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, channels * patch * patch).astype(np.float32)

    monkeypatch.setattr(encoders, "to_tokens", to_tokens)
    return lambda _: stores.test_pixels_come_back_and_have_the_order_of_channel_row_column()


def posterior_noise_is_that_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> Notice:
    monkeypatch.setattr(rectified_flow, "noise_of", lambda batch, seed, _: samples.noise_of(batch, seed, "noise"))
    return lambda _: flow.test_latents_are_drawn_from_their_posterior_anew_for_each_sample()


def the_posterior_is_drawn_once_for_all_epochs(monkeypatch: pytest.MonkeyPatch) -> Notice:
    def noise_of(batch: Any, seed: int, purpose: str) -> Any:
        from dataclasses import replace

        keyed = replace(batch, samples=batch.samples % flow.ROWS) if purpose == "posterior" else batch
        return samples.noise_of(keyed, seed, purpose)

    monkeypatch.setattr(rectified_flow, "noise_of", noise_of)
    return lambda _: flow.test_latents_are_drawn_from_their_posterior_anew_for_each_sample()


def deviations_are_variances(monkeypatch: pytest.MonkeyPatch) -> Notice:
    def noise_of(batch: Any, seed: int, purpose: str) -> Any:
        return samples.noise_of(batch, seed, purpose) * (batch.deviations if purpose == "posterior" else 1)

    monkeypatch.setattr(rectified_flow, "noise_of", noise_of)
    return lambda _: flow.test_latents_are_drawn_from_their_posterior_anew_for_each_sample()


def every_epoch_has_one_order(monkeypatch: pytest.MonkeyPatch) -> Notice:
    plain = latents.Permutation
    monkeypatch.setattr(latents, "Permutation", lambda size, name, seed, epoch=0: plain(size, name, seed, 0))

    def notice(path: Path) -> None:
        stores.write(path / "store")
        stores.test_an_epoch_has_every_sample_once_and_its_second_visit_has_other_noise(path / "store")

    return notice


def samples_are_numbered_by_their_rank(monkeypatch: pytest.MonkeyPatch) -> Notice:
    def fill(self: Any, index: int, sample: int) -> None:
        self._indices.append(index)
        self._samples.append(sample // 2)

    monkeypatch.setattr(latents.LatentRows, "_fill", fill)

    def notice(path: Path) -> None:
        stores.write(path / "store")
        stores.test_noise_times_and_dropped_texts_are_those_of_one_device_in_every_layout_and_after_a_resume(
            path / "store"
        )

    return notice


@pytest.mark.parametrize(
    "mutation",
    [
        images_are_cropped_at_the_edge,
        ratios_are_compared_as_differences,
        rows_are_taken_for_columns,
        held_out_images_depend_on_their_place,
        patches_are_ordered_by_row_column_channel,
        posterior_noise_is_that_of_the_flow,
        the_posterior_is_drawn_once_for_all_epochs,
        deviations_are_variances,
        every_epoch_has_one_order,
        samples_are_numbered_by_their_rank,
    ],
)
@pytest.mark.night
def test_mutations_are_noticed(
    monkeypatch: pytest.MonkeyPatch, mutation: Callable[[pytest.MonkeyPatch], Notice], tmp_path: Path
):
    noticing = mutation(monkeypatch)
    with pytest.raises(AssertionError):
        noticing(tmp_path)


def test_images_with_equal_captions_are_in_one_split(tmp_path: Path):
    captions_decide(tmp_path)
