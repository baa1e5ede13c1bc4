"""Eigenbases of covariances of gradients: by an eigendecomposition first, then by power iteration and QR."""

import torch
from torch import Tensor


def initial_basis(covariance: Tensor, rank: int) -> Tensor:
    """Eigenvectors [matrices, size, size] of covariances of gradients whose rank is at most `rank`, by falling
    eigenvalue.

    Covariances of few columns have a null space, in which an eigensolver returns any basis, another for every
    rounding. Householder reflections of the other eigenvectors, with their signs fixed, complete the basis instead.
    """
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
    if rank >= covariance.shape[-1]:
        return vectors
    largest = vectors[..., :rank]
    signs = largest.gather(-2, largest.abs().argmax(-2, keepdim=True)).sign()
    return torch.linalg.qr(largest * signs, mode="complete").Q


def iterated_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A basis after one step of power iteration, and the order of the former columns by falling Rayleigh quotient.

    The covariance is shifted by its rounding error, so that directions below it keep their place instead of following
    it. Columns' signs are arbitrary: an update in the basis does not depend on them.
    """
    power = covariance @ basis
    quotients = (basis * power).sum(-2)
    shift = torch.finfo(covariance.dtype).eps * covariance.shape[-1] * quotients.amax(-1)
    power += shift[..., None, None] * basis
    order = quotients.argsort(dim=-1, descending=True, stable=True)
    return torch.linalg.qr(power.gather(-1, order.unsqueeze(-2).expand_as(power))).Q, order
