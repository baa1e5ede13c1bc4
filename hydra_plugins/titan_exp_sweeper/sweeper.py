"""`-m` on the command line: Hydra hands every sweep to this class. Imported at each start, so it imports little."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TitanExpSweeperConfig:
    """The node `hydra.sweeper`."""

    _target_: str = "hydra_plugins.titan_exp_sweeper.sweeper.TitanExpSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="titan_exp", node=TitanExpSweeperConfig, provider="titan_exp")


class TitanExpSweeper(Sweeper):
    """Composes and checks every point first, then runs them; Hydra's launchers have no part in it.

    A launcher gets one configuration for a whole sweep and must return finished jobs, and a job that fails looks like
    one that succeeded; points here each have their own resources and their own end.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing needs."""
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: Sequence[str]) -> None:
        """Run every point that the overrides name.

        Raises:
            UserError: some cannot run, so that none was started.
            SystemExit: with the exit code, where not all of them are done.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        from titan_exp.config.convert import to_experiment
        from titan_exp.config.errors import UserError
        from titan_exp.config.experiment import Experiment
        from titan_exp.launch.sweep import Point, points, run_locally, sweep

        assert self.hydra_context is not None
        assert self.config is not None
        loader, config = self.hydra_context.config_loader, self.config

        def compose(point: Point) -> Experiment:
            try:
                composed = loader.load_sweep_config(config, list(point.overrides))
            except HydraException as error:
                raise UserError(str(error)) from error
            return to_experiment(composed)

        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(arguments))
        code = sweep(points(parsed), compose, run=run_locally)
        if code:
            raise SystemExit(code)
