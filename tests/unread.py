"""Messages with a field of which only the number of elements may be read."""

from typing import Any, NoReturn

COUNT = 10**9


class Unread:
    """Stands for a repeated field or a map of `COUNT` elements."""

    def __len__(self) -> int:
        return COUNT

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("an element was read before their number was checked")

    __iter__ = __getitem__ = __contains__ = __reversed__ = _refuse
    items = keys = values = _refuse


class WithUnread:
    """A message whose field at a dotted path is `Unread`, and that must not be serialized to learn its size."""

    def __init__(self, message: Any, path: str) -> None:
        self._message, self._path = message, path

    def __getattr__(self, name: str) -> Any:
        head, _, rest = self._path.partition(".")
        value = getattr(self._message, name)
        if name != head:
            return value
        return WithUnread(value, rest) if rest else Unread()

    def ByteSize(self) -> NoReturn:
        raise AssertionError("all elements were read to learn their size")
