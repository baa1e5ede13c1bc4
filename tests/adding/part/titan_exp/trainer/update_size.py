"""Size of the update of a step."""

import torch

from titan_exp.ops.autograd import local_tensor
from titan_exp.trainer.part import Part, Run, Step, Update


class UpdateSize(Part):
    """Logs the largest change of this rank's weights by the last step."""

    name = "update_size"

    def begin(self, run: Run) -> None:
        """Remember the weights."""
        self.weights = [local_tensor(weight.detach()) for part in run.state.model.parts for weight in part.parameters()]

    def on_gradients(self, update: Update) -> None:
        """Remember them as they were."""
        self.earlier = [weight.clone() for weight in self.weights]

    def on_update(self, update: Update) -> None:
        """Compare."""
        changes = [(now - then).abs().amax() for now, then in zip(self.weights, self.earlier, strict=True)]
        self.largest = torch.stack(changes).amax()

    def after(self, step: Step) -> dict[str, float]:
        """Report the largest change."""
        return {"update_size": float(self.largest)}
