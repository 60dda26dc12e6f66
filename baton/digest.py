"""The digest with which routers and workers check that they use the same tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_digest(directory: str | Path) -> str:
    """SHA-256 in hex over name, length and bytes of each of TOKENIZER_FILES found in `directory`.

    Empty when there is no tokenizer.json: a checkpoint without a tokenizer serves token ids only.
    """
    folder = Path(directory)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        return ""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()
