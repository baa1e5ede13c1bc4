"""Point-to-point transport between pipeline ranks: shapes of sent activations, sends and receives."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.config.layout.resolved_layout import ResolvedLayout


@dataclass(frozen=True)
class ActivationSpec:
    """Shape, dtype and device of the hidden states that stages send each other."""

    shape: tuple[int, ...]
    """[rows, tokens, dim] of one micro-batch on one rank."""
    dtype: torch.dtype
    """Dtype of hidden states and of their gradients."""
    device: torch.device
    """This rank's device."""

    @staticmethod
    def of(layout: ResolvedLayout, device: torch.device, extra_tokens: int = 0) -> "ActivationSpec":
        """The spec of a layout; `extra_tokens` are sent beside those of the sequence."""
        dtype = torch.bfloat16 if layout.training.mixed_precision == "bf16" else torch.float32
        rows, tokens, width = layout.hidden_shape
        return ActivationSpec((rows, tokens + extra_tokens, width), dtype, device)


class P2PTransport:
    """Sends and receives between the ranks of one pipeline."""

    sees_completion = True
    """True if sent tensors are freed as soon as their send is complete, else at the end of the pass."""

    def __init__(self, group: dist.ProcessGroup, activation: ActivationSpec) -> None:
        self.rank = dist.get_rank(group)
        """Pipeline rank of this process."""
        self.rows = activation.shape[0]
        """Rows of a micro-batch."""
        self._group, self._activation = group, activation

    def empty(self) -> Tensor:
        """A buffer for a received activation, or for its gradient."""
        return torch.empty(self._activation.shape, dtype=self._activation.dtype, device=self._activation.device)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to send a tensor to another pipeline rank."""
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None, "this rank belongs to the group"
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to receive a tensor from another pipeline rank."""
        work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None, "this rank belongs to the group"
        return work

    def broadcast(self, tensor: Tensor | None, source: int) -> Tensor:
        """Tensor in fp32 of a pipeline rank on all of them; the others give None."""
        shape = torch.zeros(3, dtype=torch.int64) if tensor is None else torch.tensor(tensor.shape)
        shape = shape.to(self._activation.device)
        dist.broadcast(shape, group=self._group, group_src=source)
        sent = torch.empty(*shape.tolist(), device=self._activation.device) if tensor is None else tensor.contiguous()
        dist.broadcast(sent, group=self._group, group_src=source)
        return sent

    def is_sent(self, work: dist.Work) -> bool:
        """True if a send is complete, so that its tensor may be freed."""
        if not self.sees_completion or not work.is_completed():
            return False
        # NCCL's work keeps the sent tensor alive until it is waited for or its watchdog runs.
        work.wait()
        return True
