"""Damage: arbitrary bytes, and what links and faulty peers make of valid ones."""

import random
from collections.abc import Callable, Sequence

_EDGES = (0, 1, 0x7F, 0x80, 0xFF)


def arbitrary(rng: random.Random, most: int = 300) -> bytes:
    """Bytes without meaning, short ones as likely as long ones."""
    return rng.randbytes(int(most ** rng.random()) - 1 + rng.randrange(2))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` after one to three faults, perhaps the same as before."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_FAULTS)(rng, data)
    return data


def changed(rng: random.Random, data: bytes) -> bytes:
    """`data` after faults, not the same as before."""
    while (other := mutated(rng, data)) == data:
        continue
    return other


def _flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_byte(rng: random.Random, data: bytes) -> bytes:
    # Half of them near the beginning, where tags and lengths are.
    at = rng.randrange(min(len(data), rng.choice((16, 1 << 30))) or 1)
    return data[:at] + bytes((rng.choice(_EDGES),)) + data[at + 1 :]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extend(rng: random.Random, data: bytes) -> bytes:
    return data + arbitrary(rng, 40)


def _remove(rng: random.Random, data: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:start] + data[end:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + arbitrary(rng, 40) + data[at:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start, end = _span(rng, data)
    return data[:end] + data[start:end] + data[end:]


def _longer_varint(rng: random.Random, data: bytes) -> bytes:
    """A number in more bytes than it needs, or one of ten bytes and more."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + b"\x80" * rng.choice((1, 1, 5, 12)) + data[at:]


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + 1 + rng.randrange(16))


_FAULTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip_bits,
    _flip_bits,
    _set_byte,
    _truncate,
    _extend,
    _remove,
    _insert,
    _repeat,
    _longer_varint,
)


def damaged_stream(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """A stream of which frames are lost, doubled, swapped, cut, joined or altered."""
    stream = list(frames)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not stream:
            break
        at, other = rng.randrange(len(stream)), rng.randrange(len(stream))
        fault = rng.randrange(9)
        if fault <= 2:
            stream[at] = mutated(rng, stream[at])
        elif fault == 3:
            del stream[at]
        elif fault == 4:
            stream.insert(other, stream[at])
        elif fault == 5:
            stream[at], stream[other] = stream[other], stream[at]
        elif fault == 6:
            del stream[at:]
        elif fault == 7:
            stream[at:] = [b"".join(stream[at : at + 2]), *stream[at + 2 :]]
        else:
            stream.insert(at, arbitrary(rng))
    return stream


def spliced(rng: random.Random, ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[bytes]:
    """Two sound streams mixed, frame by frame or cut in one place."""
    if rng.random() < 0.5:
        cut = rng.randrange(len(ours) + 1)
        return [*ours[:cut], *theirs[min(cut, len(theirs)) :]]
    return [rng.choice(pair) for pair in zip(ours, theirs, strict=False)]
