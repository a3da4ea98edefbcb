"""Temporary storage that CUB's algorithms ask PyTorch for, in bytes (CCCL 3.0, of CUDA 13.0).

Each array of it is rounded up to 256 bytes, and 255 more align the first: an H100's requests are these to the byte.
"""

from __future__ import annotations

_DIGITS = 256  # eight bits at a time


def scan_bytes(count: int, element: int) -> int:
    """Of a running sum of `count` numbers of 4 or 8 bytes: a state for each tile and for 32 before the first.

    Source: default_policy in tuning_scan.cuh, which is taken as PyTorch's operators are none of CUB's own;
    tile_state_allocation_size in single_pass_scan_operators.cuh.
    """
    return _aliased(_tile_states(-(-count // (128 * (15 * 4 // element))), 2 * element))


def unique_bytes(count: int, compute_capability: tuple[int, int]) -> int:
    """Of the first places of each of `count` sorted 64-bit keys.

    Source: policy_hub in tuning_unique_by_key.cuh, for 8-byte keys and 4-byte values.
    """
    if compute_capability >= (10, 0):
        tile = 384 * 10
    elif compute_capability >= (9, 0):
        tile = 640 * 7
    else:
        tile = 256 * 7 if compute_capability == (8, 0) else 64 * 5
    return _aliased(_tile_states(-(-count // tile), 16))


def sort_pairs_bytes(count: int, compute_capability: tuple[int, int], key: int = 8, bits: int | None = None) -> int:
    """Of sorting `count` keys of `key` bytes with 64-bit values: bins, a row of them for each tile, second arrays.

    bits: so many of a key's; of up to eight there is one pass, from one array to the other.

    Nothing (asked for as 1 byte) where one block sorts all of them. Source: InvokeOnesweep and InvokeSingleTile in
    dispatch_radix_sort.cuh, policy_hub in tuning_radix_sort.cuh, whose items of 4 bytes are fewer for 8-byte values.
    """
    if count <= 256 * 9:
        return 1
    if compute_capability >= (9, 0):
        tile = {8: 384 * 12, 4: 384 * 14, 2: 512 * 11, 1: 384 * 9}[key]
    elif compute_capability >= (8, 0):
        tile = 384 * (8 if key == 4 else 10)
    else:
        tile = 256 * 11
    passes = -(-(bits or 8 * key) // 8)
    return _sort_bytes(count, tile, passes, *((key * count, 8 * count) if passes > 1 else ()))


def sort_keys_bytes(count: int, compute_capability: tuple[int, int]) -> int:
    """Of sorting `count` 64-bit keys by eight of their bits, from one array to another. Source: as above."""
    tile = 384 * 15 if compute_capability >= (9, 0) else 384 * 10 if compute_capability >= (8, 0) else 256 * 11
    return _sort_bytes(count, tile, 1)


def _sort_bytes(count: int, tile: int, passes: int, *arrays: int) -> int:
    """Eight bits a pass: bins of each, a row of them for each tile, second arrays, a counter for each pass."""
    return _aliased(passes * _DIGITS * 8, -(-count // tile) * _DIGITS * 4, *arrays, passes * 4)


def _tile_states(tiles: int, word: int) -> int:
    return _aliased((tiles + 32) * word)


def _aliased(*sizes: int) -> int:
    return sum(-(-size // 256) * 256 for size in sizes) + 255
