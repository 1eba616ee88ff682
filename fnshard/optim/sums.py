"""Sums over whole leaves, for which one fp32 accumulator is not enough.

torch's norms on a CPU add all squares of a leaf to one fp32 accumulator per SIMD lane. For 6e7 numbers the
norm is off by 0.3%, and by another amount on another mesh (pytorch issues 68326, 151761). Its `sum` adds in
pairs, and is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# How many squares are added in fp32. If the numbers are equal, each addition may round the same way.
PIECE = 512
CAST = 1 << 18  # how many numbers are copied at a time, if they are widened or have gaps


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers of the tensors, 0-d in fp64, to within 1e-6.

    Pieces are summed in fp32 (in fp64 if a tensor has that), and their sums are added in fp64. At most a
    small part of a tensor is copied at a time.

    >>> sum_squares([torch.ones(4), torch.full((2, 2), 2.0)])
    tensor(20., dtype=torch.float64)
    """
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    buffer_size = min(CAST, max((t.numel() for t in tensors if t.is_cpu), default=0))
    buffer: Tensor | None = None
    norms: list[Tensor] = []  # the norms of pieces, each [n]
    whole: list[Tensor] = []  # tensors that need no cutting, whose norms one call computes
    for tensor in tensors:
        # An accelerator's kernel sums by blocks, and takes all leaves in one launch.
        if tensor.numel() <= PIECE or not tensor.is_cpu:
            whole.append(tensor)
            continue

        # Widen a part, or close its gaps, in a buffer that all parts share; then take the norm of each piece.
        for part in _cut_into_parts(tensor, is_copied=tensor.dtype != wide):
            is_copied = part.dtype != wide or not part.is_contiguous()
            if is_copied:
                if buffer is None or buffer.numel() < part.numel():
                    buffer = torch.empty(max(part.numel(), buffer_size), dtype=wide)
                part = buffer[: part.numel()].view(part.shape).copy_(part)
            flat = part.view(-1)
            even = part.numel() // PIECE * PIECE
            pieces, tail = flat.split_with_sizes((even, part.numel() - even))
            norms.append(torch.linalg.vector_norm(pieces.view(-1, PIECE), dim=1))
            if even < len(flat):
                whole.append(tail.clone() if is_copied else tail)  # the next part overwrites the buffer
    if whole:
        norms.append(torch.stack(torch._foreach_norm(whole, 2, dtype=wide)))
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.cat(norms).double().square().sum()


def _cut_into_parts(tensor: Tensor, is_copied: bool) -> Sequence[Tensor]:
    """Return views of a tensor that together have all its numbers, in any order.

    A tensor without gaps that is not copied is one flat view; others are slices of about `CAST` numbers.
    """
    # Permuted to the order in memory, a transposed tensor is contiguous.
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous():
        return tensor.view(-1).split(CAST if is_copied else tensor.numel())
    longest = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    return tensor.split(max(1, tensor.shape[longest] * CAST // tensor.numel()), dim=longest)


def matrix_norm(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix [..., M, N], [..., 1, 1] in fp64, to within 1e-6.

    >>> matrix_norm(torch.ones(2, 4, 4))[:, 0, 0]
    tensor([4., 4.], dtype=torch.float64)
    """
    width, wide = matrix.shape[-1], torch.promote_types(matrix.dtype, torch.float32)
    # Rows are cut into equal pieces of at most `PIECE`. Where these would be short, a row is one piece.
    piece = max((d for d in range(1, PIECE + 1) if width % d == 0), default=1)
    if piece < PIECE // 8:
        piece = max(width, 1)
    pieces = matrix.unflatten(-1, (-1, piece))
    rows = torch.linalg.vector_norm(pieces, dim=-1, dtype=wide)
    return torch.linalg.vector_norm(rows.double(), dim=(-2, -1), keepdim=True)
