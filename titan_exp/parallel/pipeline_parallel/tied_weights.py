"""Tied weights of the first and the last stage: two copies with summed gradients, so that they stay equal."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.pipeline_parallel.stage import Stage
from titan_exp.parallel.pipeline_parallel.transport import P2PTransport


class TiedWeights:
    """The copies on this rank, if any."""

    def __init__(self, stages: Sequence[Stage], placement: list[int], transport: P2PTransport) -> None:
        self._transport = transport
        self._first, self._last = placement[0], placement[-1]
        copies = {name: stage.module.get_parameter(name) for stage in stages for name in stage.copied}
        # All ranks split the same model, so the first stage knows which copies the last one has.
        originals = {name: stage.module.get_parameter(name) for stage in stages for name in stage.shared}
        self._local_pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._remote: list[nn.Parameter] = []
        if self._first == self._last:
            self._local_pairs = [(originals[name], copies[name]) for name in copies]
        else:
            self._remote = list((originals or copies).values())

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients; called by all ranks of the pipeline."""
        for original, copy in self._local_pairs:
            total = _gradient(original).add_(_gradient(copy))
            _gradient(copy).copy_(total)
        for parameter in self._remote:
            own = _gradient(parameter)
            other = torch.empty_like(own)
            send, receive, rank = self._transport.send, self._transport.receive, self._transport.rank
            peer = self._last if rank == self._first else self._first
            # Both ranks post send and receive in the same order.
            calls = ((send, own), (receive, other))
            for work in [call(tensor, peer) for call, tensor in (calls if rank < peer else calls[::-1])]:
                work.wait()
            own.add_(other)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "both stages use a tied weight"
    return local_tensor(gradient)
