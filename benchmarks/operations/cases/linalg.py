"""Linear algebra."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .run import Run


def linalg() -> Iterator[tuple]:
    def spd(function: Callable, *shape: int, backward: bool = True) -> Run:
        eye = torch.eye(shape[-1], device="cuda").expand(*shape, shape[-1]) * 3
        matrix = eye + 0.1 * torch.ones(*shape, shape[-1], device="cuda")
        # different entries on the diagonal, so that no two singular values are equal
        matrix = (matrix + torch.diag(torch.arange(shape[-1], device="cuda").float())).requires_grad_(backward)
        return Run(function, matrix, backward=backward)

    functions: dict[str, Callable] = {
        "svd": torch.linalg.svd,
        "svdvals": torch.linalg.svdvals,
        "svd reduced": lambda a: torch.linalg.svd(a, full_matrices=False),
        "qr": torch.linalg.qr,
        "cholesky": torch.linalg.cholesky,
        "cholesky_inverse": torch.cholesky_inverse,
        "inv": torch.linalg.inv,
        "eigh": torch.linalg.eigh,
        "eigvalsh": torch.linalg.eigvalsh,
        "solve": lambda a: torch.linalg.solve(a, torch.ones(*a.shape[:-1], 4, device="cuda")),
        "lstsq": lambda a: torch.linalg.lstsq(a, torch.ones(*a.shape[:-1], 4, device="cuda")).solution,
        "lu": torch.linalg.lu,
        "lu_factor": torch.linalg.lu_factor,
        "det": torch.linalg.det,
        "slogdet": torch.linalg.slogdet,
        "pinv": torch.linalg.pinv,
        "solve_triangular": lambda a: torch.linalg.solve_triangular(
            a, torch.ones(*a.shape[:-1], 4, device="cuda"), upper=True
        ),
        "matrix_norm": torch.linalg.matrix_norm,
        "matrix_norm 2": lambda a: torch.linalg.matrix_norm(a, 2),
        "matrix_exp": torch.linalg.matrix_exp,
        "matrix_power": lambda a: torch.linalg.matrix_power(a, 3),
        "cond": torch.linalg.cond,
        "matrix_rank": torch.linalg.matrix_rank,
        "eig": torch.linalg.eigvals,
        "trace": lambda a: a.diagonal(dim1=-2, dim2=-1).sum(-1),
        "svd_lowrank": lambda a: torch.svd_lowrank(a, 4),
    }
    for (name, function), shape in itertools.product(functions.items(), ((64,), (513,), (8, 32), (4, 200))):
        yield f"{name} {shape}", functools.partial(spd, function, *shape)
        yield f"{name} {shape} infer", functools.partial(spd, function, *shape, backward=False)
