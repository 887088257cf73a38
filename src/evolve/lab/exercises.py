"""Exercises with answers that check themselves.

An exercise is a stub and a test. ``check(attempt, test)`` says "not yet" as long as the stub is a stub or the
test fails, and why; it never raises, so that a notebook with unsolved exercises runs to its end.
``verify`` runs the same test on the solution and does raise.
"""

from collections.abc import Callable
from typing import Any


def check(attempt: Any, test: Callable[[Any], None]) -> None:
    """Print whether ``attempt`` passes ``test`` (a function of asserts), and if not, the first reason.

    ``attempt`` is a value or a function; a value of ``None``, or a function that returns ``None`` where the
    test wants something, counts as not done yet.
    """
    if attempt is None:
        print("not yet: the answer is still None")
        return
    try:
        test(attempt)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"not yet: {reason}")
    else:
        print("right")


def verify(solution: Any, test: Callable[[Any], None]) -> None:
    """Run ``test`` on the solution, errors and all, and say so."""
    test(solution)
    print("the solution passes the same check")
