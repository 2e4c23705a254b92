"""Errors a user can cause and cure: what went wrong, why, and what to do.

    AutoparError            never raised itself
      UsageError       2    the command line does not make sense
      InputError       3    a file, model, number or strategy is not acceptable
      InfeasibleError  4    no plan fits
      RunError         5    a measurement, run or verification failed

A bug is any other exception and keeps its traceback (exit code 1).
"""

from __future__ import annotations


class AutoparError(Exception):
    """An error that the user can cure: `what` happened, `why`, and the `fix`; `exit_code` for the shell."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional arguments; ours are keywords.
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(kind: type[AutoparError], what: str, why: str, fix: str) -> AutoparError:
    return kind(what, why=why, fix=fix)


class UsageError(AutoparError):
    """The command line does not make sense."""

    exit_code = 2


class InputError(AutoparError):
    """A file, a model, a number or a strategy is not acceptable."""

    exit_code = 3


class InfeasibleError(AutoparError):
    """No plan fits the memory budget, the pins or the batch.

    leanest: the Plan nearest to fitting, if any; relaxations: what would fit (autopar.relaxing), cheapest first.
    """

    exit_code = 4
    leanest: object | None = None
    relaxations: tuple[object, ...] = ()


class RunError(AutoparError):
    """A measurement, a run or a verification failed."""

    exit_code = 5
