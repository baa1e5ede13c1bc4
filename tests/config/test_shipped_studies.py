"""Every shipped study at every size: each point is composed and keeps every rule."""

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_exp.cli.main import main
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME, extension_folders
from titan_exp.config.hydra.compose import HYDRA_VERSION, default_overrides, register_resolvers
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.config.study.points import baseline_of, study_points
from titan_exp.config.study.study_file import SWEEPS_DIR, read_study
from titan_exp.extensions.tasks import sums
from titan_exp.launch.sweep.ladder import LadderRounds
from titan_exp.launch.sweep.rounds import drawn_choices
from titan_exp.launch.sweep.sweeper import FastCompose
from titan_exp.rules import violations

STUDIES = [path for folder in (SWEEPS_DIR, *extension_folders("sweeps")) for path in sorted(folder.glob("*.yaml"))]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_point_can_run_at_every_size(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if path.stem == "diffusion_times":
        assert main(["encode", "images=glyphs", "size=16", "out=stores/glyphs16"]) == 0
    if path.stem == "right_sums":
        sums.main()
    study = read_study(path)
    assert list(study.sizes) == ["laptop", "cluster"]
    register_resolvers()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_VERSION):
        compose = FastCompose(
            lambda overrides: hydra_compose(CONFIG_NAME, [*default_overrides(), *overrides]), OverridesParser.create()
        )
        for size in study.sizes:
            # A machine without GPUs is a laptop; what SLURM's nodes have is in the study.
            points = study_points(
                study,
                size,
                [f"paths.runs={tmp_path}", *(["cluster.device=cpu"] * (size == "laptop"))],
                drawn_choices(study.search) if study.search else (),
            )
            if study.ladder is not None:
                rounds = LadderRounds(study, points, None, lambda point: to_experiment(compose(point.overrides)))
                points = rounds.first
            elif study.search is None:
                assert baseline_of(study, points) in {point.variant for point in points if not point.excluded}
            for point in points:
                experiment = to_experiment(compose(point.overrides))
                assert violations(experiment) == [], (size, point.label)
                assert experiment.cluster.kind == ("local" if size == "laptop" else "slurm")


def test_the_studies_there_are():
    assert {path.stem for path in SWEEPS_DIR.glob("*.yaml")} == {
        *("activation_checkpointing", "adamw_settings", "context_extension", "context_parallel_methods"),
        *("decay_shape", "expert_balance", "halving", "ladder", "learning_rate_batch_size"),
        *("linear_attention_ratio", "muon", "optimizers", "parallelism_degrees", "pipeline_schedules"),
        *("quantization_recipes", "virtual_shards", "width_transfer"),
    }
