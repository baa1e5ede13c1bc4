"""Weights that the first and the last stage both use: two copies that stay one, as tied embeddings must."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.pipeline_parallel.stage import Stage
from titan_exp.parallel.pipeline_parallel.transport import P2PTransport


class TiedWeights:
    """The copies on this rank, if any. Both begin alike, get the same gradient and so stay alike.

    Args:
        stages: this rank's.
        placement: pipeline rank of each stage.
        transport: sends and receives between the ranks of this pipeline.
    """

    def __init__(self, stages: Sequence[Stage], placement: list[int], transport: P2PTransport) -> None:
        self._transport = transport
        self._first, self._last = placement[0], placement[-1]
        copies = {name: stage.module.get_parameter(name) for stage in stages for name in stage.copied}
        # All ranks cut the same model, so the first stage knows by its own what the last one has.
        originals = {name: stage.module.get_parameter(name) for stage in stages for name in stage.shared}
        self._here: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._there: list[nn.Parameter] = []
        if self._first == self._last:
            self._here = [(originals[name], copies[name]) for name in copies]
        else:
            self._there = list((originals or copies).values())

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients; called by all ranks of the pipeline."""
        for original, copy in self._here:
            total = _gradient(original).add_(_gradient(copy))
            _gradient(copy).copy_(total)
        for parameter in self._there:
            own = _gradient(parameter)
            other = torch.empty_like(own)
            send, receive, rank = self._transport.send, self._transport.receive, self._transport.rank
            peer = self._last if rank == self._first else self._first
            # Both directions in the same order on both sides.
            calls = ((send, own), (receive, other))
            for work in [call(tensor, peer) for call, tensor in (calls if rank < peer else calls[::-1])]:
                work.wait()
            own.add_(other)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "a shared weight is used by both of its stages"
    return local_tensor(gradient)
