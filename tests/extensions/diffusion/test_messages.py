"""Refusals that name keys, options and words of diffusion, and what they say instead."""

from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.cli.main import main
from titan_exp.config.schema.foreign_code import sources
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE
from titan_exp.models.spec.lookup import model_spec


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "train data=images data.options.latnets=vae",
            "name yet\n    did you mean latents? Otherwise add it with a plus: +data.options.latnets=vae",
        ),
        (
            "train +experiment=flux_laptop +training.objective_options.times=mode",
            "leave out the plus: training.objective_options.times=mode",
        ),
        ("train data.image=glyphs", "did you mean data.images?"),
        ("train data=latens", "latents"),
        ("train data=images data.images=foldr", "did you mean folder?"),
        ("train training.objective=rectified_flo", "did you mean rectified_flow?"),
        ("train data.source=latens", "did you mean latents?"),
        (
            "train model=flux_debug",
            "training.objective=rectified_flow data=latents data.paths='[STORE]', or choose a language",
        ),
        (
            "train data.images=glyphs",
            "the source python_stdlib does not read this key\n    use data=images data.images=glyphs",
        ),
        ("generate sample=3", "did you mean samples?"),
    ],
)
def test_what_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main([*words.split(), *([f"paths.runs={tmp_path}"] if words.startswith("train") else [])]) == 2
    assert says in capsys.readouterr().err


def test_images_count_in_no_run_of_another_source():
    """A new source of the core must not change the ids of its runs by a key of another extension."""
    switch, idle = COUNTS_BESIDE["data.images"]
    assert (switch, {*idle}) == ("data.source", {*sources()} - {"images"})


def test_help_has_the_options_and_examples(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--help"]) == 0
    said = capsys.readouterr().out
    assert 'prompt="blue heart"' in said
    assert all(f"  {option}=" in said for option in ("prompt", "tokens", "guidance", "cp"))
    assert main(["evaluate", "--help"]) == 0
    assert "The loss of a diffusion model is that at eight fixed times" in capsys.readouterr().out


def test_inputs_say_how_a_sequence_is_divided_and_what_a_batch_holds():
    spec = model_spec(experiment("model=flux_debug").model)
    assert spec is not None
    assert spec.inputs is not None
    text, image = spec.streams(24)
    assert (text, image) == (16, 8)
    batch = spec.inputs.example(3, 24)
    assert {len(tensor) for tensor in batch.tensors} == {3, 1}
    assert batch.inputs().named.keys() == {*spec.inputs.named}
