"""Indexing, scattering, joining and padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from .run import BF16, FP32, NAMES, Run, of_floats, ones_and_zeros, real, whole


def indexing() -> Iterator[tuple]:
    def masked(function: Callable, *shape: int) -> Run:
        mask = ones_and_zeros(*shape)
        return Run(lambda x: function(x, mask), real(*shape, grad=True))

    for shape in ((100,), (1000,), (100_000,), (64, 512), (512, 512)):
        for name, function in (
            ("nonzero", lambda x, m: m.nonzero()),
            ("nonzero tuple", lambda x, m: m.nonzero(as_tuple=True)),
            ("select", torch.masked_select),
            ("index", lambda x, m: x[m]),
            ("where", lambda x, m: torch.where(m)),
            ("fill", lambda x, m: x.masked_fill(m, 0)),
            ("where 3", lambda x, m: torch.where(m, x, 0.0)),
            ("argwhere", lambda x, m: m.argwhere()),
            ("count", lambda x, m: m.sum()),
            ("index put", lambda x, m: (x * 1).index_put((m,), torch.zeros((), device="cuda"))),
            ("assign", _assigned),
            ("masked_scatter", lambda x, m: x.masked_scatter(m, x.flatten())),
        ):
            yield f"mask {name} {shape}", masked, function, *shape

    def indexed(function: Callable, rows: int, width: int, count: int, dtype: torch.dtype) -> Run:
        ids = whole(rows, count)
        shape = (rows, width) if width else (rows,)
        return Run(lambda x: function(x, ids), real(*shape, dtype=dtype, grad=True))

    for name, function in (
        ("index", lambda x, i: x[i]),
        ("index_select", lambda x, i: x.index_select(0, i)),
        ("take", lambda x, i: x.take(i)),
        ("index_put", lambda x, i: (x * 1).index_put((i,), x[i])),
        ("index_put add", lambda x, i: (x * 1).index_put((i,), x[i], accumulate=True)),
        ("index_add", lambda x, i: (x * 1).index_add(0, i, x[i])),
        ("index_copy", lambda x, i: (x * 1).index_copy(0, i, x[i])),
        ("index_fill", lambda x, i: (x * 1).index_fill(0, i, 1.0)),
        ("assign add", _added_in_place),
        (
            "scatter rows",
            lambda x, i: (x * 1).scatter(0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]), 1.0),
        ),
        (
            "scatter_add",
            lambda x, i: torch.zeros_like(x).scatter_add(
                0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]), x[i]
            ),
        ),
        (
            "scatter_reduce",
            lambda x, i: torch.zeros_like(x).scatter_reduce(
                0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]), x[i], "mean"
            ),
        ),
        (
            "scatter_reduce max",
            lambda x, i: torch.zeros_like(x).scatter_reduce(
                0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]), x[i], "amax"
            ),
        ),
        ("gather", lambda x, i: x.gather(0, i.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:]))),
        ("two indices", lambda x, i: x[i, i % x.shape[1]] if x.dim() > 1 else x[i]),
        ("column", lambda x, i: x[:, i % x.shape[1]] if x.dim() > 1 else x[i]),
        ("32 bit", lambda x, i: x[i.int()]),
        ("2d index", lambda x, i: x[i.view(2, -1)]),
    ):
        for rows, width, count in (
            (1000, 64, 100),
            (1000, 64, 5000),
            (50, 0, 4000),
            (50257, 768, 4096),
            (100_000, 0, 200_000),
        ):
            for dtype in (FP32, BF16):
                yield f"{name} {rows}×{width} {count} {NAMES[dtype]}", indexed, function, rows, width, count, dtype
    for name, function in (
        ("slice", lambda x: x[:, 3:100]),
        ("step", lambda x: x[::2]),
        ("int", lambda x: x[3]),
        ("ellipsis", lambda x: x[..., 0]),
        ("none", lambda x: x[:, None]),
        ("split", lambda x: x.split(64, 1)),
        ("chunk", lambda x: x.chunk(3, 1)),
        ("unbind", lambda x: x.unbind(0)),
        ("narrow", lambda x: x.narrow(0, 1, 7)),
        ("select", lambda x: x.select(1, 5)),
        ("diagonal", lambda x: x.diagonal()),
        ("diag", torch.diag),
        ("flip", lambda x: x.flip(0)),
        ("list", lambda x: x[[1, 5, 9]]),
        ("copy into", lambda x: torch.zeros_like(x).copy_(x)),
        ("slice assigned", _slice_assigned),
        ("unfold", lambda x: x.unfold(1, 10, 5)),
        ("expand sum", lambda x: x[None].expand(4, -1, -1).sum(0)),
        ("view", lambda x: x.view(-1)),
        ("as_strided", lambda x: x.as_strided((10, 10), (1, 2))),
        ("tril mask", lambda x: x.masked_fill(torch.ones_like(x).tril() == 0, -1e9)),
    ):
        for dtype in (FP32, BF16):
            yield f"view {name} {NAMES[dtype]}", functools.partial(of_floats, function, (512, 300), dtype=dtype)


def _assigned(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[mask] = 0.0
    return y


def _added_in_place(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[ids] += 1.0
    return y


def _slice_assigned(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 10:20] = x[:, :10]
    return y


def joining() -> Iterator[tuple]:
    for name, function in (
        ("cat 0", lambda *t: torch.cat(t, 0)),
        ("cat -1", lambda *t: torch.cat(t, -1)),
        ("stack", lambda *t: torch.stack(t)),
        ("stack -1", lambda *t: torch.stack(t, -1)),
        ("hstack", lambda *t: torch.hstack(t)),
        ("cat many", lambda *t: torch.cat(t * 40, 0)),
        ("block_diag", lambda *t: torch.block_diag(*(u[0] for u in t))),
        ("meshgrid", lambda *t: torch.meshgrid(*(u[0, 0, :50] for u in t), indexing="ij")),
        ("cartesian", lambda *t: torch.cartesian_prod(*(u[0, 0, :50] for u in t))),
        ("cat transposed", lambda *t: torch.cat([u.transpose(1, 2) for u in t], 0)),
    ):
        for dtype in (FP32, BF16):
            yield f"{name} {NAMES[dtype]}", functools.partial(of_floats, function, *[(4, 128, 300)] * 3, dtype=dtype)
    yield "cat mixed types", functools.partial(of_floats, lambda a, b: torch.cat([a, b.to(BF16)]), (64, 512), (64, 512))
    yield (
        "cat autocast",
        functools.partial(of_floats, lambda a, b: torch.cat([a, b.to(BF16)]), (64, 512), (64, 512), autocast=BF16),
    )
    for name, function in (
        ("pad", lambda x: F.pad(x, (1, 2))),
        ("pad reflect", lambda x: F.pad(x, (3, 3), mode="reflect")),
        ("pad replicate", lambda x: F.pad(x, (3, 3), mode="replicate")),
        ("pad circular", lambda x: F.pad(x, (3, 3), mode="circular")),
        ("roll", lambda x: x.roll(3, 1)),
        ("roll all", lambda x: x.roll(3)),
        ("repeat", lambda x: x.repeat(1, 2, 3)),
        ("repeat_interleave", lambda x: x.repeat_interleave(3, 1)),
        ("tile", lambda x: x.tile(2)),
        ("expand contiguous", lambda x: x[:, :, None].expand(-1, -1, 3, -1).reshape(4, 384, 300)),
        ("permute contiguous", lambda x: x.permute(2, 0, 1).contiguous()),
        ("reshape of transposed", lambda x: x.transpose(1, 2).reshape(4, -1)),
        ("flatten", lambda x: x.flatten()),
        ("rot90", lambda x: x.rot90(1, (1, 2))),
        ("interpolate", lambda x: F.interpolate(x, scale_factor=2)),
        ("interpolate linear", lambda x: F.interpolate(x, scale_factor=2, mode="linear")),
        ("avg_pool", lambda x: F.avg_pool1d(x, 2)),
        ("max_pool", lambda x: F.max_pool1d(x, 2)),
        ("adaptive", lambda x: F.adaptive_avg_pool1d(x, 7)),
        ("fold", lambda x: F.unfold(x[:, None], 3)),
        ("kron", lambda x: torch.kron(x[0, :20, :20], x[0, :20, :20])),
        ("cov", lambda x: torch.cov(x[0])),
        ("diff", torch.diff),
        ("cross", lambda x: torch.cross(x[..., :3], x[..., 3:6], dim=-1)),
        ("renorm", lambda x: x.renorm(2, 0, 1.0)),
        ("tensordot", lambda x: torch.tensordot(x, x, dims=([1], [1]))),
        ("trapezoid", lambda x: torch.trapezoid(x)),
        ("vander", lambda x: torch.vander(x[0, 0])),
        (
            "repeat_interleave counts",
            lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3]).cuda(), 0, output_size=6),
        ),
    ):
        for dtype in (FP32, BF16):
            yield f"{name} {NAMES[dtype]}", functools.partial(of_floats, function, (4, 128, 300), dtype=dtype)
