"""Time that stands still until a test moves it."""


class Clock:
    """A clock for what takes one as a function."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
