"""A file of settings that may be replaced while a process runs: keys of tickets, keys of clients.

Its contents are looked at before each use; what can't be used is logged once, and the last good contents stay, so that
neither a slip of an operator nor a half-written file lets anybody in or shuts everybody out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Watched(Generic[T]):
    """What `parse` makes of the file at `path`, read again when the file changes; `setting` names it in errors.

    `parse` raises ConfigError saying what is wrong. Used from one thread.
    """

    def __init__(self, path: str, setting: str, parse: Callable[[bytes], T]) -> None:
        """Read the file; raises ConfigError naming setting and path if it can't be read or used."""
        self._path = Path(path)
        self._setting = setting
        self._parse = parse
        try:
            self._seen: tuple[int, int, int] | None = self._look()
            self._value = self._read()
        except OSError as error:
            raise ConfigError(f"{setting}: {path!r} can't be read: {error.strerror}") from None

    def value(self) -> T:
        """The newest contents that could be used."""
        try:
            seen = self._look()
        except OSError as error:
            # No file at all for a moment is how some tools replace it.
            if self._seen is not None:
                self._seen = None
                _logger.warning("%s: the file is gone, its old contents stay in use: %s", self._setting, error)
            return self._value
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
            except (OSError, ConfigError) as error:
                _logger.error("%s: the new file can't be used, the old one stays in use: %s", self._setting, error)
            else:
                _logger.info("%s: the new file is in use", self._setting)
        return self._value

    def _look(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> T:
        data = self._path.read_bytes()
        try:
            return self._parse(data)
        except ConfigError as error:
            raise ConfigError(f"{self._setting}: {str(self._path)!r}: {error}") from None
