"""Sources of captioned images: read with their captions, cut to buckets, refused in words, and resumed after a kill."""

import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.diffusion import rendered_images
from titan_exp.extensions.diffusion.encoders import Pixels
from titan_exp.extensions.diffusion.images import Bucket, aspect_buckets, fit, nearest_bucket
from titan_exp.extensions.diffusion.latent_format import read_latent_manifest
from titan_exp.extensions.diffusion.latents import LatentSplit
from titan_exp.extensions.diffusion.verbs import encode as run

SIZES = {"square": (24, 24), "wide": (12, 48), "high": (64, 16)}
"""Height and width."""


def picture(name: str) -> Image.Image:
    """A colour with a black left edge."""
    height, width = SIZES[name]
    array = np.full((height, width, 3), [10 * len(name), 200, 40], dtype=np.uint8)
    array[:, 0] = 0
    return Image.fromarray(array)


def encoded(out: Path, *words: str) -> dict[str, tuple[int, int]]:
    """Shapes in tokens by caption of what `encode` wrote."""
    assert run([f"out={out}", "size=24", "patch=4", "max_aspect=9", "validation_fraction=0", *words]) == 0
    split = LatentSplit(read_latent_manifest(out), "train")
    return {caption: split.shape(index) for index, caption in enumerate(split.captions())}


EXPECTED = {"a square": (6, 6), "a wide": (3, 12), "a high": (12, 3)}


def test_folders_have_captions_beside_images_or_in_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for name in SIZES:
        picture(name).save(folder / f"{name}.png")
    picture("wide").save(folder / "more" / "wide.jpg")
    picture("wide").save(folder / "more" / "silent.webp")
    (folder / "square.txt").write_text("a square\n")
    (folder / "list.jsonl").write_text('{"file_name": "wide.png", "text": "a wide"}\n')
    (folder / "more" / "list.csv").write_text('file_name,text\n../high.png,a high\nwide.jpg,"wide, again"\n')
    found = encoded(tmp_path / "store", "images=folder", f"paths={folder}")
    assert found == {**EXPECTED, "wide, again": (3, 12)}
    assert "1 without caption left out" in capsys.readouterr().out
    picture("high").save(folder / "high.png", compress_level=0)
    with pytest.raises(
        UserError, match=r"images: .* began with images 4 images of a folder.* and you typed 4 images of a folder"
    ):
        encoded(tmp_path / "store", "images=folder", f"paths={folder}")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("square.txt", b"\xff\xfe\x00", r"square\.txt: we cannot read the caption.*\n.*UTF-8"),
        ("list.jsonl", b'{"file_name": "wide.png"', r"list\.jsonl: we cannot read row 1: .*delimiter"),
        (
            "list.jsonl",
            b'\n{"file_name": "wide.png", "text": "a"}\n[1]',
            r"we cannot read row 2: it is not a JSON object",
        ),
        ("list.jsonl", b'{"file_name": "wide.png", "txt": "a"}', r"row 1 has no text under text, .*\n.*caption_key"),
        ("list.csv", b"file_name,text\nwide.png,\xff", r"list\.csv: we cannot read row 1"),
        ("00.tar.gz", b"\x1f\x8b", r"00\.tar\.gz: we cannot read the shard.*\n.*gunzip"),
    ],
)
def test_damaged_captions_and_shards_are_named(file: str, content: bytes, message: str, tmp_path: Path):
    picture("square").save(tmp_path / "square.png")
    (tmp_path / file).write_bytes(content)
    source = (
        ["images=webdataset", f"paths={tmp_path}/*.gz"] if "tar" in file else ["images=folder", f"paths={tmp_path}"]
    )
    with pytest.raises(UserError, match=message):
        encoded(tmp_path / "store", *source)


def test_webdataset_shards_hold_samples_by_key(tmp_path: Path):
    files = dict[str, bytes]()
    for name in SIZES:
        stream = io.BytesIO()
        picture(name).save(stream, "PNG")
        files[f"part/{name}.seg.png" if name == "high" else f"part/{name}.png"] = stream.getvalue()
    files |= {"part/square.txt": b"a square", "part/wide.json": b'{"text": "a wide"}', "part/lone.txt": b"no image"}
    damaged = {**files, "part/wide.json": b'{"text": '}
    for name, contents in (("broken", damaged), ("00", files)):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for member, content in contents.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    with pytest.raises(UserError, match=r"broken\.tar: part/wide\.json: we cannot read the caption"):
        encoded(tmp_path / "other", "images=webdataset", f"paths={tmp_path}/broken.tar")
    found = encoded(tmp_path / "store", "images=webdataset", f"paths={tmp_path}/00.tar")
    assert found == {key: EXPECTED[key] for key in ("a square", "a wide")}
    tokens = LatentSplit(read_latent_manifest(tmp_path / "store"), "train")[0].latents
    shape = next(iter(found.values()))
    expected = fit(np.asarray(picture("square" if shape == (6, 6) else "wide")), Bucket(*shape), 4)
    assert (Pixels(4).decode(tokens[None], *shape)[0] == expected).all()


def test_hugging_face_data_sets_from_disk_and_from_a_folder(tmp_path: Path):
    from datasets import Dataset

    rows = {"picture": [picture(name) for name in SIZES], "words": [f"a {name}" for name in SIZES]}
    data = Dataset.from_dict(rows)
    data.save_to_disk(tmp_path / "data")
    keys = ["images=huggingface", "image_key=picture", "caption_key=words"]
    assert encoded(tmp_path / "store", *keys, f"paths={tmp_path / 'data'}") == EXPECTED
    with pytest.raises(UserError, match=r"image_key=image: .*no such column\n.*picture"):
        encoded(tmp_path / "other", "images=huggingface", f"paths={tmp_path / 'data'}")


def test_buckets_have_equally_many_tokens_and_images_go_to_the_nearest():
    buckets = aspect_buckets(48, 2.25)
    assert {shape.rows * shape.columns for shape in buckets} == {48 * 48}
    assert Bucket(36, 64) in buckets
    assert Bucket(32, 72) in buckets
    assert Bucket(24, 96) not in buckets
    assert aspect_buckets(48, 1) == [Bucket(48, 48)]
    assert nearest_bucket(900, 1600, buckets) == Bucket(36, 64)
    assert nearest_bucket(1600, 900, buckets) == Bucket(64, 36)
    # Between 4 x 9 and 3 x 12: nearer to the first as a factor, to the second as a difference.
    assert nearest_bucket(335, 1000, aspect_buckets(6, 9)) == Bucket(4, 9)
    assert nearest_bucket(1000, 335, aspect_buckets(6, 9)) == Bucket(9, 4)


def test_images_are_scaled_to_cover_a_bucket_and_cropped_in_the_middle():
    image = np.zeros((10, 40, 3), dtype=np.uint8)
    image[:, 15:25] = 255
    assert fit(image, Bucket(5, 5), 4)[:, 3:-3].min() > 240  # Lanczos rings at the edges
    assert fit(image, Bucket(5, 10), 4).shape == (20, 40, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["images=folder", "paths=/nowhere"], "no such folder"),
        (["images=folder", "paths=."], "none of its 1 images has a caption"),
        (["images=webdataset", "paths=*.tar"], "no file has this name"),
        (["images=webdataset", "paths=a.png"], "we cannot read"),
        (["images=huggingface", "paths=./nothing_here"], "does not load"),
        (["images=huggingface"], "you named no data set"),
        (["latents=."], "no config.json"),
        (["texts=."], "it lacks text_encoder, tokenizer, text_encoder_2, tokenizer_2"),
        (["size=30", "patch=4"], r"image tokens are 4 pixels wide\n.*size=32"),
    ],
)
def test_what_cannot_be_encoded_is_said(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    picture("square").save("a.png")
    with pytest.raises(UserError, match=message):
        run(["out=store", *words])


def test_a_damaged_image_is_named(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"no image")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a\.png: we cannot read the image"):
        run([f"out={tmp_path / 'store'}", "images=folder", f"paths={tmp_path}"])


def test_without_its_font_emoji_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(rendered_images, "FONT", tmp_path / "none.ttf")
    with pytest.raises(UserError, match="apt-get install fonts-noto-color-emoji"):
        run([f"out={tmp_path / 'store'}", "images=emoji"])


@pytest.mark.skipif(not rendered_images.FONT.is_file(), reason="fonts-noto-color-emoji is not installed")
def test_emoji_have_names_skin_tones_and_pictures_of_their_own():
    images = rendered_images.EmojiImages(16)
    captions = [images.caption(index) for index in range(len(images))]
    assert len(captions) > 1200
    assert len(set(captions)) == len(captions)
    thumbs = [captions.index(f"Thumbs up sign{tone}") for tone in ("", ", light skin tone", ", dark skin tone")]
    plain, light, dark = (images.image(index) for index in thumbs)
    assert plain.shape == (16, 16, 3)
    assert plain[8, 8].tolist() != light[8, 8].tolist()
    assert int(light[8, 8].sum()) > int(dark[8, 8].sum()) + 200


def test_a_store_killed_in_the_middle_is_continued_with_the_same_bytes(tmp_path: Path):
    words = ["images=glyphs", "size=8", "shard_samples=100"]
    assert run([f"out={tmp_path / 'whole'}", *words]) == 0
    command = [sys.executable, "-m", "titan_exp", "encode", f"out={tmp_path / 'store'}", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    journal = tmp_path / "store" / "unfinished"
    while len(list(journal.glob("train-*.json"))) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "store" / "manifest.json").exists()
    assert run(command[4:]) == 0
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "store")]
    assert files[0] == files[1]
    assert json.loads(files[0]["manifest.json"])["splits"]["train"][1]["samples"] == 100
