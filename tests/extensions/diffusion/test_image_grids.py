"""Grids of images on the comparison page: the last one of each run, side by side."""

import base64
import re
from pathlib import Path

import numpy as np
from PIL import Image

from tests.compare.made_runs import make_run, rows
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.pages import to_html
from titan_exp.compare.runs import select
from titan_exp.extensions.diffusion.images import image_grid, save_image
from titan_exp.tracking.run_folder.run_folder import RunFolder


def grid_of(run: Path, step: int, shade: int) -> bytes:
    folder = RunFolder(run).images
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.png"
    save_image(path, np.full((4, 4, 3), shade, dtype=np.uint8), {"step": step})
    return path.read_bytes()


def test_the_page_shows_the_last_grid_of_each_run(tmp_path: Path):
    expected = []
    for lr, shade in ((1e-3, 10), (3e-3, 200)):
        run = make_run(tmp_path, {"optimizer.lr": lr}, metrics=rows(3.0))
        grid_of(run, 50, 90)
        expected.append(grid_of(run, 100, shade))
        (RunFolder(run).images / "step-00000150.part.png").write_bytes(b"a kill left this")
    make_run(tmp_path, {"optimizer.lr": 1e-2}, metrics=rows(3.0))
    page = to_html(compare(select(["made"], tmp_path)))
    found = re.findall(r'<figcaption class="key">([^<]*)</figcaption><img src="data:image/png;base64,([^"]*)"', page)
    assert [base64.b64decode(picture) for _, picture in found] == expected
    assert all(label.endswith(", step 100") for label, _ in found)


def test_a_grid_places_images_row_by_row_above_their_captions():
    images = [np.full((32, 32, 3), shade, dtype=np.uint8) for shade in (0, 60, 120)]
    grid = image_grid(images, ["a", "b c", "a caption of many words " * 3], 2)
    middle = 4 + 48
    step_x, step_y = 100, (grid.shape[0] - 4) // 2
    assert [grid[middle, middle, 0], grid[middle, middle + step_x, 0], grid[middle + step_y, middle, 0]] == [0, 60, 120]
    assert grid[middle + step_y, middle + step_x].tolist() == [255] * 3
    under = grid[4 + 96 : step_y, 4:100]
    assert under.min() < 100, "the caption is drawn"


def test_descriptions_are_kept_in_the_file(tmp_path: Path):
    save_image(tmp_path / "a.png", np.zeros((2, 2, 3), dtype=np.uint8), {"prompt": "Ünïcode", "seed": 3})
    with Image.open(tmp_path / "a.png") as image:
        assert image.info == {"prompt": "Ünïcode", "seed": "3"}
