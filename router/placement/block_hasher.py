"""The digests of a request's blocks, for the workers that are there: hashed once for each namespace. Pure.

Fingerprint, KV format and salt are at the root of a chain (`baton.kv.hashing`), so workers of another format know the
same tokens by other names. The router's hashes only guide placement; workers compute their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from baton.kv.hashing import block_digests, chain_root

if TYPE_CHECKING:
    from baton.worker.status import WorkerIdentity
    from router.serving.threads import RunOnThread

_INLINE_TOKENS = 4096
"""Hashed in less than half a millisecond; more leaves the event loop."""


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """What workers must have in common to name blocks alike; `kv_format` is a digest."""

    fingerprint: str
    kv_format: str
    block_size: int

    @classmethod
    def of(cls, identity: WorkerIdentity) -> BlockNamespace:
        """The namespace of a worker."""
        return cls(identity.fingerprint, identity.kv_format.digest, identity.kv_format.block_size)


Digests: TypeAlias = Mapping[BlockNamespace, Sequence[bytes]]
"""Digests of the full blocks of one context, by namespace; empty for a request that reads no cache."""


class BlockHasher:
    """Hashes the blocks of one request, and keeps those of its prompt for the next attempt; `run` hashes long ones."""

    def __init__(self, prompt_ids: Sequence[int], salt: bytes, run: RunOnThread) -> None:
        self._prompt_ids = prompt_ids
        self._salt = salt
        self._run = run
        self._prompt: dict[BlockNamespace, list[bytes]] = {}

    async def hash(self, namespaces: Iterable[BlockNamespace], output_ids: Sequence[int] = ()) -> Digests:
        """Digests of prompt and output so far."""
        return {namespace: await self._hash(namespace, output_ids) for namespace in list(namespaces)}

    async def _hash(self, namespace: BlockNamespace, output_ids: Sequence[int]) -> list[bytes]:
        root = chain_root(namespace.fingerprint, namespace.kv_format, self._salt)
        if namespace not in self._prompt:
            self._prompt[namespace] = await self._digests(root, self._prompt_ids, namespace.block_size)
        prompt = self._prompt[namespace]
        if not output_ids:
            return prompt
        # The chain goes on from its last block as it began from its root.
        rest = [*self._prompt_ids[len(prompt) * namespace.block_size :], *output_ids]
        return prompt + await self._digests(prompt[-1] if prompt else root, rest, namespace.block_size)

    async def _digests(self, parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        if len(token_ids) <= _INLINE_TOKENS:
            return block_digests(parent, token_ids, block_size)
        return await self._run(partial(block_digests, parent, token_ids, block_size))
