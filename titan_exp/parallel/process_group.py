"""Process groups by name, which is how an operator that the compiler sees can refer to one."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


def group_named(name: str) -> dist.ProcessGroup:
    """The process group whose `group_name` this is."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # torch has a type of its own for these strings


def gather_documents(documents: Tensor, group: str) -> Tensor:
    """Document numbers [batch, part] of every rank of the group, as [degree, batch, part]."""
    ranks = group_named(group)
    gathered = documents.new_empty((ranks.size() * documents.shape[0], documents.shape[1]))
    dist.all_gather_into_tensor(gathered, documents.contiguous(), group=ranks)
    return gathered.unflatten(0, (ranks.size(), -1))
