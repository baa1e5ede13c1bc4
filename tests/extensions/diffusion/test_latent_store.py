"""Latent stores: written, interrupted, read in any layout, and refused where they do not fit."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.config.composing import experiment
from titan_exp.cli.main import main
from titan_exp.config.data_files import MANIFEST
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import DataConfig
from titan_exp.data import sample_store
from titan_exp.data.sample_store import AtomicFile
from titan_exp.data.train_loader import TrainLoader
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.extensions.diffusion import latents as writer
from titan_exp.extensions.diffusion.config import EncodeOptions
from titan_exp.extensions.diffusion.encoders import HashedWords, Pixels
from titan_exp.extensions.diffusion.latent_format import LatentManifest, read_latent_manifest
from titan_exp.extensions.diffusion.latents import LatentSplit, WithoutText
from titan_exp.extensions.diffusion.rectified_flow import RectifiedFlow
from titan_exp.extensions.diffusion.rendered_images import GlyphImages
from titan_exp.rules import violations

SIZES = ["model.patch_dim=12", "model.text_tokens=8", "model.text_dim=32", "model.pooled_dim=24"]
SEED = 3


def write(out: Path, size: int = 8, shard: int = 400) -> LatentManifest:
    """1,044 glyphs of 4 by 4 image tokens, with captions of up to 8 words."""
    texts = HashedWords(8, 32, 24, seed=0)
    options = EncodeOptions(size=size, shard_samples=shard)
    return writer.write_latent_store(out, GlyphImages(size), writer.Encoders(Pixels(2), texts), options)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores") / "glyphs"
    write(out)
    return out


def test_every_file_of_a_store_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "glyphs"
    write(out)
    assert main(["encode", f"check={out}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: all checksums match. ")
    assert said.endswith("held out, each of 8 text and 16 image tokens\n")
    files = [path for path in out.iterdir() if path.name != MANIFEST]
    assert {path.name.split(".", 1)[1] for path in files} >= {"captions.json", "text.npy", "pooled.npy"}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
        assert main(["encode", f"check={out}"]) == 2, path.name
        said = capsys.readouterr().err
        changed = f"{path.name}: the content of this file has changed"
        assert f"{changed}\n  Copy it again, or remove the folder and encode again." in said
        path.write_bytes(content)
    assert main(["encode", f"check={out}", "images=glyphs"]) == 2
    assert "leave images= out" in capsys.readouterr().err


def run(store: Path, *words: str) -> Any:
    return experiment(
        *("model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow"),
        *(*SIZES, "training.seq_len=24", "training.global_batch_size=8", "evaluation.every=0", *words),
    )


def test_pixels_come_back_and_have_the_order_of_channel_row_column():
    image = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    ((tokens,),) = Pixels(2).encode(image[None])
    assert (Pixels(2).decode(tokens[None], 3, 2)[0] == image).all()
    assert tokens[3].tolist() == pytest.approx(
        [
            image[2 + row, 2 + column, channel] / 127.5 - 1
            for channel in range(3)
            for row in (0, 1)
            for column in (0, 1)
        ],
        abs=1e-6,
    )


def test_words_have_vectors_of_their_own_and_the_empty_text_has_none():
    texts = HashedWords(8, 32, 24, seed=0)
    (states, pooled), (other, _) = texts("Latin SMALL letter a"), texts("small latin letter a")
    assert np.abs(states[4:]).sum() == 0
    assert (states[2:] == other[2:]).all()
    assert not np.allclose(states[:2], other[:2])
    assert np.allclose(pooled, texts("a letter small latin")[1], atol=1e-6)
    assert all(not array.any() for array in texts(""))
    assert not np.allclose(pooled, HashedWords(8, 32, 24, seed=1)("Latin small letter a")[1])


def test_a_store_holds_what_was_encoded(store: Path):
    manifest, images, texts = read_latent_manifest(store), GlyphImages(8), HashedWords(8, 32, 24, seed=0)
    assert sum(manifest.samples.values()) == len(images) == 1044
    assert 20 < manifest.samples["validation"] < 90
    captions = {images.caption(index): index for index in range(len(images))}
    for split in ("train", "validation"):
        found = LatentSplit(manifest, split)
        assert len(found.captions()) == len(found) == manifest.samples[split]
        for index in (0, len(found) - 1):
            caption = found.captions()[index]
            assert (found[index].latents == Pixels(2).encode(images.image(captions.pop(caption))[None])[0][0]).all()
            assert (found[index].text == texts(caption)[0]).all()
            assert (found[index].pooled == texts(caption)[1]).all()
    assert "Latin capital letter a, DejaVu Sans Bold Oblique" in captions


def test_an_interrupted_store_is_continued_and_is_the_same(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, calls = sample_store.write_json, list[str]()

    def interrupted(path: Path, content: Any) -> str:
        calls.append(path.name)
        if len(calls) == 7:  # the plan, then captions and a record of each shard
            raise KeyboardInterrupt
        return plain(path, content)

    monkeypatch.setattr(sample_store, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store")
    with pytest.raises(UserError, match=r"not complete yet\n.*the same titan-exp encode command again"):
        read_latent_manifest(tmp_path / "store")
    with pytest.raises(UserError, match=r"shard_samples: .* began with shard_samples 400, and you typed 300"):
        write(tmp_path / "store", shard=300)
    kept = (tmp_path / "store" / "train-00000.latents.npy").stat().st_mtime_ns
    found = write(tmp_path / "store")
    assert found.fingerprint == read_latent_manifest(store).fingerprint
    assert (tmp_path / "store" / "train-00000.latents.npy").stat().st_mtime_ns == kept
    assert write(tmp_path / "store") == found
    with pytest.raises(UserError, match=r"other settings[\s\S]*shard_samples 400, and you typed 300"):
        write(tmp_path / "store", shard=300)


def write_and_die(out: Path, after: int) -> None:
    """Write until a file has been written whole under its temporary name."""
    replace, left = os.replace, [after]

    def killed(*names: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*names)

    os.replace = killed
    write(out)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("after", [1, 5, 21], ids=["captions", "a record", "the manifest"])
def test_a_killed_process_leaves_no_partial_files_in_the_finished_store(store: Path, tmp_path: Path, after: int):
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(tmp_path / "store", after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list((tmp_path / "store").rglob("*.part"))
    write(tmp_path / "store")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == sorted(path.name for path in store.iterdir())


def test_a_truncated_array_is_refused(tmp_path: Path):
    manifest = write(tmp_path / "store")
    for size, reason in ((1000, "mmap length"), (0, "No data left")):
        os.truncate(tmp_path / "store" / "train-00001.text.npy", size)
        with pytest.raises(UserError, match=f"latent store is damaged[\\s\\S]*train-00001.text.npy: {reason}"):
            _ = LatentSplit(manifest, "train")[500]


def test_a_full_disk_is_reported_and_finished_shards_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit, left = AtomicFile.commit, [8]

    def full(self: AtomicFile) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "commit", full)
        with pytest.raises(UserError, match=r"disk of .*store is full[\s\S]*same command to continue"):
            write(tmp_path / "store")
    assert (tmp_path / "store" / "unfinished" / "train-00000.json").is_file()
    assert write(tmp_path / "store").samples == write(tmp_path / "other").samples


def loader(data: DataConfig, training: Any, rank: int = 0, degree: int = 1, rows: int = 8) -> TrainLoader:
    objective = RectifiedFlow()
    return TrainLoader(
        data,
        training,
        SEED,
        dp_rank=rank,
        dp_degree=degree,
        micro_batch_size=rows,
        pin_memory=False,
        prepare=lambda batch: objective.prepare(batch, SEED),
    )


def take(loader: TrainLoader, count: int) -> list[list[torch.Tensor]]:
    batches = [next(loader).tensors for _ in range(count)]
    loader.close()
    return batches


def test_noise_times_and_dropped_texts_are_those_of_one_device_in_every_layout_and_after_a_resume(store: Path):
    config = run(store)
    whole = take(loader(config.data, config.training), 3)
    # Two ranks with two micro-batches each: rank r has row r of each two.
    ranks = [take(loader(config.data, config.training, rank, 2, 2), 6) for rank in (0, 1)]
    rows = 6  # samples: tensors of the texts' empty states have one row
    for step in range(3):
        for number, tensor in enumerate(whole[step]):
            parts = [torch.cat([ranks[rank][2 * step + half][number] for half in (0, 1)]) for rank in (0, 1)]
            if len(tensor) == 1:
                continue
            mixed = torch.stack(parts, dim=1).flatten(0, 1)
            assert torch.equal(mixed, tensor)
    assert whole[1][rows].tolist() == list(range(8, 16))
    first = loader(config.data, config.training)
    next(first)
    state = first.state_dict()
    first.close()
    resumed = loader(config.data, config.training)
    resumed.load_state_dict(state)
    for found, expected in zip(take(resumed, 2), whole[1:], strict=True):
        assert all(map(torch.equal, found, expected))


def test_an_epoch_has_every_sample_once_and_its_second_visit_has_other_noise(store: Path):
    config, manifest = run(store), read_latent_manifest(store)
    count = manifest.samples["train"]
    steps = 2 * count // 8 + 1
    batches = take(loader(config.data, config.training), steps)
    latents, noise = (torch.cat([batch[number] for batch in batches]) for number in (0, 8))
    epochs = [latents[:count], latents[count : 2 * count]]
    keys = [sorted(row.numpy().tobytes() for row in epoch) for epoch in epochs]
    assert keys[0] == keys[1]
    assert not torch.equal(epochs[0], epochs[1])
    assert noise.flatten(1).unique(dim=0).shape[0] == len(noise)


def test_validation_is_every_held_out_sample_at_eight_times_on_one_rank_each(store: Path):
    config, count = run(store), read_latent_manifest(store).samples["validation"]
    seen = dict[tuple[float, int], torch.Tensor]()
    for degree in (1, 3):
        found = dict[tuple[float, int], torch.Tensor]()
        for rank in range(degree):
            batches = ValidationLoader(config.data, 24, dp_rank=rank, dp_degree=degree, micro_batch_size=4)
            assert list(batches.sources) == [f"t={(index + 0.5) / 8:g}" for index in range(8)]
            for batch in batches:
                for row, weight in enumerate(batch.weights.tolist()):
                    if weight:
                        key = (float(batch.times[row]), int(batch.samples[row]))
                        assert key not in found
                        found[key] = torch.cat((batch.noise[row], batch.latents[row]))
        assert len(found) == 8 * count
        assert not seen or all(torch.equal(seen[key], value) for key, value in found.items())
        seen = found


def test_validation_without_text_is_the_same_but_for_the_texts(store: Path):
    batches = ValidationLoader(run(store).data, 24, dp_rank=0, dp_degree=1, micro_batch_size=4)
    seen = dict[str, WithoutText]()
    found = batches.further_metrics(
        batches.sources, {"validation_loss": 1.5}, lambda others: seen.update(others) or {"validation_loss": 2.0}
    )
    assert found == {"validation_loss_without_text": 2.0, "validation_text_gain": 0.5}
    assert list(seen) == list(batches.sources)
    for name, source in batches.sources.items():
        for batch, other in zip(source, seen[name], strict=True):
            assert not other.text.any()
            assert not other.pooled.any()
            assert batch.text.any()
            for kept in ("latents", "noise", "times", "samples", "weights", "positions"):
                assert torch.equal(getattr(batch, kept), getattr(other, kept))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([], []),
        (["tracking.images_every=5"], []),
        (["tracking.images_every=5", "parallelism.tp=2", "parallelism.pp=2"], []),
        (
            ["tracking.images_every=5", "training.objective=language_modeling"],
            ["tracking.images_every", "training.objective"],
        ),
        (["model.text_dim=16", "model.text_tokens=9"], ["model.text_dim", "model.text_tokens"]),
        (["training.seq_len=32"], ["training.seq_len"]),
        (["training.objective=language_modeling"], ["training.objective"]),
        (["model=llama_debug", "training.objective=language_modeling"], ["data.source"]),
        (["data=python_stdlib", "data.paths=[]"], ["data.source"]),
        (["data.paths=[/nowhere]"], ["data.paths"]),
        (["+training.objective_options.times=cosine"], ["training.objective_options.times"]),
        (["+training.objective_options.dropout=0.1"], ["training.objective_options.dropout"]),
        (["parallelism.tp=2"], []),
        (["quantization=float8_rowwise"], []),
        (["quantization=mxfp8", "training.micro_batch_size=2"], ["training.micro_batch_size"]),
        (["quantization=mxfp8", "training.micro_batch_size=4"], []),
        (["quantization=mxfp8", "training.micro_batch_size=4", "parallelism.cp=2"], ["training.micro_batch_size"]),
        (
            [
                *("quantization=mxfp8", "training.micro_batch_size=4", "parallelism.cp=2"),
                *("training.global_batch_size=12", "quantization.filter=['*.text.*','*.image.*']"),
            ],
            ["training.micro_batch_size"],
        ),
        (["quantization=nvfp4"], ["quantization.recipe"]),
        (["quantization=nvfp4", "quantization.filter=['*.text.*','blocks.2.*','blocks.3.*']"], []),
        (["parallelism.tp=4"], ["parallelism.tp"]),
        # Four ranks of FSDP divide the rows of no projection, and 20 columns; biases stay whole.
        (["parallelism.tp=2", "parallelism.dp_shard=4", "model.dim=20", "model.rope_axes=[2,4,4]"], []),
        (["parallelism.cp=3", "training.global_batch_size=12"], ["parallelism.cp"]),
        (["parallelism.cp=8", "parallelism.tp=2"], ["parallelism.cp"]),
        (["parallelism.cp=8", "parallelism.tp=2", "parallelism.sequence_parallel=false"], []),
    ],
)
def test_model_objective_and_store_belong_together(store: Path, words: list[str], fields: list[str]):
    base = [] if any(word.startswith("model=llama") for word in words) else SIZES
    config = experiment(
        *("model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow"),
        *("training.seq_len=24", "training.global_batch_size=8", "evaluation.every=0", *base, *words),
    )
    assert sorted(violation.field for violation in violations(config)) == sorted(fields)
