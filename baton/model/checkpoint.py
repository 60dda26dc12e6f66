"""Files of a checkpoint, in a directory or by hub name, and the digest of its tokenizer.

No torch: the router resolves names, and the fingerprint hashes files, without loading a tensor. Routers and workers
compare digests to check that they use the same tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from baton.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model"]


def resolve(name: str | Path) -> Path:
    """The checkpoint directory of `name`: a directory, or a name on the Hugging Face hub, from which it is fetched.

    Raises ModelError with the value if it is neither.
    """
    if str(name) and (directory := Path(name).expanduser()).is_dir():
        return directory
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"{str(name)!r} is not a directory, and huggingface_hub is not installed") from error
    try:
        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises its own, its transport's and ValueError alike
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{str(name)!r} is not a directory, and cannot be fetched as a hub name: {reason[0]}"
        ) from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the weights, sorted; a single file is preferred to an index.

    Raises ModelError with the file that is missing or malformed.
    """
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(directory / Path(name).name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from error
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index} names {file.name}, which does not exist")
    return files


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_digest(directory: str | Path) -> str:
    """SHA-256, in hex, of name, length and bytes of each of TOKENIZER_FILES that `directory` has.

    Empty if there is no tokenizer.json: a checkpoint without a tokenizer serves token ids only.
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
