"""Plugins of Hydra: the sweeper behind `-m`, and option files of extensions. Imported at each start: imports little."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TitanExpSweeperConfig:
    """The node `hydra.sweeper`."""

    _target_: str = "hydra_plugins.titan_exp_sweeper.sweeper.TitanExpSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="titan_exp", node=TitanExpSweeperConfig, provider="titan_exp")


class TitanExpSweeper(Sweeper):
    """Composes and checks every point first, then has them carried out; Hydra's launchers have no part in it.

    A launcher gets one configuration for a whole sweep and must return finished jobs, and a job that fails looks like
    one that succeeded; points here each have their own resources and their own end.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing needs."""
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: Sequence[str]) -> None:
        """Carry out every point that the overrides, or the study, name.

        Raises:
            UserError: some cannot run, so that none was started.
            SystemExit: with the exit code, where not all of them are done.
        """
        import sys

        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        from titan_exp.config.command_line.options import read_arguments
        from titan_exp.config.errors.user_error import UserError
        from titan_exp.config.groups.experiment import Experiment
        from titan_exp.config.hydra.config_groups import option_values
        from titan_exp.config.study.points import Point
        from titan_exp.config.study.study_file import read_study
        from titan_exp.launch.sweep.shipped_study import StudySweep
        from titan_exp.launch.sweep.sweep_args import current_sweep_options
        from titan_exp.launch.sweep.sweeper import FastCompose, points, sweep
        from titan_exp.rules.composed import read_experiment

        assert self.hydra_context is not None
        assert self.config is not None
        loader, config = self.hydra_context.config_loader, self.config
        parser = OverridesParser.create(config_loader=loader)
        composer = FastCompose(lambda overrides: loader.load_sweep_config(config, overrides), parser)
        values = option_values(read_arguments(sys.argv[1:]))

        def compose(point: Point) -> Experiment:
            try:
                composed = composer(values(point.overrides))
            except HydraException as error:
                raise UserError(str(error)) from error
            return read_experiment(composed, lambda _: True)

        asked = current_sweep_options()
        typed = parser.parse_overrides([*arguments, *asked.typed])
        study = None
        if asked.study is not None:
            question = read_study(asked.study)
            study = StudySweep(question, asked.size, typed, compose, change_question=asked.change_question)
        code = sweep([] if study is not None else points(typed), compose, asked, study=study)
        if code:
            raise SystemExit(code)


class ExtensionSearchPath(SearchPathPlugin):
    """Appends the folders of extensions where the configuration is titan_exp's own, not another application's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders, behind the core's, whose options win."""
        from titan_exp.config.extension import CONF_DIR, shipped_folders

        if any(str(element.path).removeprefix("file://") == str(CONF_DIR) for element in search_path.get_path()):
            for folder in shipped_folders()[1:]:
                search_path.append("titan_exp", f"file://{folder}")
