"""Eigenbases of covariances of gradients: by an eigendecomposition first, then by power iteration and QR."""

import torch
from torch import Tensor

from titan_exp.optim.matrices.noise import NOISE


def initial_basis(covariance: Tensor) -> Tensor:
    """Eigenvectors [matrices, size, size] of covariances of gradients, by falling eigenvalue.

    A gradient of fewer directions than columns has rounding noise in the others, whose eigenvectors are others for
    every rounding. A small diagonal of distinct numbers, larger than its square, decides these instead.
    """
    largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    ramp = torch.linspace(2, 1, covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    scale = torch.where(largest > 0, NOISE**2 * largest, 1.0)
    return torch.linalg.eigh(covariance + (scale * ramp).diag_embed()).eigenvectors.flip(-1)


def iterated_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis after one step of power iteration, and the order of the former columns by falling Rayleigh quotient.

    The covariance is shifted by its rounding error, so that directions below it keep their place instead of following
    it, and columns whose quotients differ by less keep their order. Columns' signs are arbitrary: an update in the
    basis does not depend on them.
    """
    power = covariance @ basis
    quotients = (basis * power).sum(-2)
    shift = torch.finfo(covariance.dtype).eps * covariance.shape[-1] * quotients.amax(-1)
    power += shift[..., None, None] * basis
    ranks = (quotients / shift[..., None].clamp(min=torch.finfo(covariance.dtype).tiny)).round()
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    return torch.linalg.qr(power.gather(-1, order.unsqueeze(-2).expand_as(power))).Q, order
