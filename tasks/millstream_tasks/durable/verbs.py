"""What a handler raises to say how its attempt ends. Whatever else it raises is an error, and its policy decides."""

from __future__ import annotations


class Verb(Exception):
    """Root of what a handler raises to say how its attempt ends."""


class Retry(Verb):
    """Try again ``after`` seconds, or by the policy's back-off; counts as a failed attempt."""

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        self.after = after
        super().__init__(message)


class Snooze(Verb):
    """Put off for ``seconds``; no attempt counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"for {seconds} s")


class Fail(Verb):
    """The task has failed for good."""


class Cancel(Verb):
    """The task is cancelled."""


class NeedsReview(Verb):
    """A person has to look: nothing more happens by itself. ``evidence``: what they should see, shown behind the reason."""

    def __init__(self, reason: str = "", evidence: object = None) -> None:
        self.evidence = evidence
        super().__init__(reason if evidence is None else f"{reason}: {evidence!r}")
