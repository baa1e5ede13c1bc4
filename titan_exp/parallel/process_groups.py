"""Process groups by name, for custom ops, and collectives under the names of the installed torch version."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# Names after torch 2.11; the older names still work with a warning.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_named(name: str) -> dist.ProcessGroup:
    """Process group with this `group_name`."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # torch has a type of its own for these strings


def gather_documents(documents: Tensor, group: str) -> Tensor:
    """Gather document numbers [batch, part] of the group's ranks to [degree, batch, part]."""
    ranks = group_named(group)
    gathered = documents.new_empty((ranks.size() * documents.shape[0], documents.shape[1]))
    all_gather(gathered, documents.contiguous(), group=ranks)
    return gathered.unflatten(0, (ranks.size(), -1))
