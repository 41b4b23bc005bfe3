"""Which sample comes when: a permutation that needs no memory.

Sample i of a run is dataset sample `sample_index(i, n, seed)`: epoch i // n, position i % n, and one permutation of
0..n-1 per (seed, epoch). The permutation is a Feistel network on the smallest even number of bits that holds n, and
values that fall outside 0..n-1 are encrypted again until they fall inside ("cycle walking", Black and Rogaway, 2002:
fewer than four rounds of it on average, because the network's domain is at most four times n).

So the position in the data is one integer, any position is found in constant time, and neither the world size nor the
batch sizes nor the number of steps can change what comes when.
"""

import hashlib

_ROUNDS = 4


def sample_index(i: int, n: int, seed: int) -> int:
    """The dataset sample (0 <= result < n) that is sample `i` (0-based, over all epochs) of a run with this seed."""
    epoch, position = divmod(i, n)
    return permute(position, n, f"{seed}/{epoch}".encode())


def permute(position: int, n: int, key: bytes) -> int:
    """The image of `position` under the permutation of 0..n-1 that `key` (at most 64 bytes) stands for."""
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_hash(right, turn, key) & mask)
        value = left << half | right
        if value < n:
            return value


def _hash(value: int, turn: int, key: bytes) -> int:
    data = value.to_bytes(8, "little") + bytes((turn,))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
