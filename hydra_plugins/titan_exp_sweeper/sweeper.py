"""`-m` on the command line: Hydra hands every sweep to this class. Imported at each start, so it imports little."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TitanExpSweeperConfig:
    """The node `hydra.sweeper`. `titan-exp sweep` and the flags of `train -m` set its keys."""

    _target_: str = "hydra_plugins.titan_exp_sweeper.sweeper.TitanExpSweeper"
    study: str | None = None
    """The file of a study, whose points are swept over instead of what is listed with commas."""
    size: str | None = None
    """One of the study's sizes; null takes the first."""
    dry_run: bool = False
    """Print the plan and start nothing."""
    skip: bool = False
    """Leave out points that cannot run; studies always do."""
    jobs: int = 1
    """Runs at a time on this machine."""
    prune: bool = False
    """Cancel runs that the study no longer holds."""
    yes: bool = False
    """Ask nothing."""


ConfigStore.instance().store(group="hydra/sweeper", name="titan_exp", node=TitanExpSweeperConfig, provider="titan_exp")


class TitanExpSweeper(Sweeper):
    """Composes and checks every point first, then has them carried out; Hydra's launchers have no part in it.

    A launcher gets one configuration for a whole sweep and must return finished jobs, and a job that fails looks like
    one that succeeded; points here each have their own resources and their own end.
    """

    def __init__(self, *, study: str | None = None, size: str | None = None, **wishes: bool | int) -> None:
        self._study, self._size, self._wishes = study, size, wishes

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing needs."""
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: Sequence[str]) -> None:
        """Carry out every point that the overrides, or the study, name.

        Raises:
            UserError: some cannot run, so that none was started.
            SystemExit: with the exit code, where not all of them are done.
        """
        from pathlib import Path

        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        from titan_exp.config.convert import to_experiment
        from titan_exp.config.errors import UserError
        from titan_exp.config.experiment import Experiment
        from titan_exp.config.study_file import read_study
        from titan_exp.launch.composing import Composer
        from titan_exp.launch.study import OpenStudy
        from titan_exp.launch.sweep import Point, Wishes, points, sweep

        assert self.hydra_context is not None
        assert self.config is not None
        loader, config = self.hydra_context.config_loader, self.config
        parser = OverridesParser.create(config_loader=loader)
        composer = Composer(lambda overrides: loader.load_sweep_config(config, overrides), parser)

        def compose(point: Point) -> Experiment:
            try:
                composed = composer(point.overrides)
            except HydraException as error:
                raise UserError(str(error)) from error
            return to_experiment(composed)

        typed = parser.parse_overrides(list(arguments))
        study = None if self._study is None else OpenStudy(read_study(Path(self._study)), self._size, typed)
        wishes = Wishes(**self._wishes)  # type: ignore[arg-type]  # Hydra has checked the node's types
        code = sweep(points(typed) if study is None else study.points, compose, wishes, study=study)
        if code:
            raise SystemExit(code)
