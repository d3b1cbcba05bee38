"""Errors that say whose fault it is and what to do next.

Every class hands all its arguments to `Exception.__init__`, so that it survives pickling between
processes with its type and fields, and composes the sentence in `__str__`.
"""


class FabricError(Exception):
    """The root of every error that the fabric raises."""


class ConfigError(FabricError):
    """You configured something that cannot work."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field, self.problem, self.remedy = field, problem, remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}. {self.remedy}"


class Refused(ConfigError):
    """The machine does not give what you asked of it: room, a port, a folder, a process in time."""


class NamespaceMismatch(FabricError):
    """Two sides do not agree on something that must agree before bytes may be shared."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(field, ours, theirs)
        self.field, self.ours, self.theirs = field, ours, theirs

    def __str__(self) -> str:
        return (
            f"namespace field {self.field!r} differs: the pool has {self.ours}, the client brings "
            f"{self.theirs}. Start the engine with the pool's value, or give it a pool of its own."
        )


class Unsupported(FabricError):
    """You asked for something that the fabric refuses rather than does wrongly."""

    def __init__(self, field: str, value: str, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def __str__(self) -> str:
        return f"{self.field}={self.value} is not supported. {self.remedy}"


class Closed(FabricError):
    """You used something after closing it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is closed. Open a new one."


class Unavailable(FabricError):
    """The other side does not answer. Treat the chunk as a miss and go on."""

    def __init__(self, who: str, waited_s: float, remedy: str) -> None:
        super().__init__(who, waited_s, remedy)
        self.who, self.waited_s, self.remedy = who, waited_s, remedy

    def __str__(self) -> str:
        return f"{self.who} did not answer within {self.waited_s:g} s. {self.remedy}"


class Corrupt(FabricError):
    """Bytes are not what was stored. They were thrown away; the chunk is a miss."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what, self.problem = what, problem

    def __str__(self) -> str:
        return f"{self.what} is corrupt: {self.problem}. It is dropped and counts as a miss."


class Malformed(FabricError):
    """A message or an input line does not have the form that the protocol gives it."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what, self.problem = what, problem

    def __str__(self) -> str:
        return f"{self.what} is malformed: {self.problem}."


class Conservation(FabricError):
    """The fabric's own books do not balance: a bug of ours, to report with these numbers."""

    def __init__(self, what: str, numbers: str) -> None:
        super().__init__(what, numbers)
        self.what, self.numbers = what, numbers

    def __str__(self) -> str:
        return f"{self.what} does not balance: {self.numbers}. This is a bug in kvfabric."
