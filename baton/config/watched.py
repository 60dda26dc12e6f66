"""Files of settings that may be replaced while a process runs: certificates, ticket keys, API keys.

The files are checked before each use. If new contents can't be used, this is logged once, and the last good contents
stay in use. So a mistake of an operator or a half-written file neither admits nor excludes anybody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class WatchedFiles(Generic[T]):
    """The parsed contents of some files, read again when one of them changes.

    `files` has their paths, by the settings that name them. `parse` gets the contents of all, in that order, and raises
    ConfigError naming setting and path of the wrong file. Used from one thread at a time.
    """

    def __init__(self, files: Mapping[str, str], parse: Callable[..., T]) -> None:
        """Read the files; raises ConfigError naming setting and path if one can't be read or used."""
        self._files = files
        self._parse = parse
        self._stats = self._stat_files()
        self._value = self._read()

    def value(self) -> T:
        """The parsed contents; the newest ones that can be used."""
        seen = self._stat_files()
        if seen != self._stats:
            self._stats = seen
            try:
                self._value = self._read()
            except ConfigError as error:
                _logger.error("new contents can't be used, the old ones stay in use: %s", error)
            else:
                _logger.info("%s: the new contents are in use", ", ".join(self._files))
        return self._value

    def _stat_files(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._files.values()]

    def _read(self) -> T:
        contents = []
        for setting, path in self._files.items():
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise ConfigError(f"{setting}: {path!r} can't be read: {error.strerror}") from None
        return self._parse(*contents)


def watch_file(path: str, setting: str, parse: Callable[[bytes], T]) -> WatchedFiles[T]:
    """Watch one file. Setting and path are added to the ConfigError of `parse`."""

    def named(data: bytes) -> T:
        try:
            return parse(data)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {path!r}: {error}") from None

    return WatchedFiles({setting: path}, named)


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        # Some tools replace a file by removing it first.
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
