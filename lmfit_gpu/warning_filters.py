"""Filters of warnings for one thread.

The filters of a process are shared by its threads. With ``warnings.catch_warnings`` a fit that tries a model under
``simplefilter("error")`` turns warnings of fits in other threads into errors, and of two that overlap the one that
leaves last puts back the filters of the other, for good.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["warnings_here"]

_LOCK = threading.Lock()


class _Here:
    """What a filter holds the text of a warning against: every text, in one thread, for a time."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.active = True  # a filter that another thread copied, and puts back later, matches nothing any more

    def match(self, text: str) -> bool:
        return self.active and threading.get_ident() == self.thread


class _NoWarning(Warning):
    """Nobody raises it."""


@contextmanager
def warnings_here(action: str, category: type[Warning] = Warning) -> Iterator[None]:
    """Filter the warnings of this thread.

    Parameters
    ----------
    action : {"error", "ignore"}
    category : type
    """
    here = _Here()
    entry = (action, here, category, None, 0)
    with _LOCK:
        _set_filters([entry, *warnings.filters])
        if action == "error":
            _forget_what_was_shown()
    try:
        yield
    finally:
        with _LOCK:
            here.active = False
            _set_filters([other for other in warnings.filters if other is not entry])


def _set_filters(filters: list[Any]) -> None:
    warnings.filters = filters  # a new list: the old one may be in use in another thread


def _forget_what_was_shown() -> None:
    """Let warnings be looked up in the filters that were shown before and are not to be shown again."""
    warnings.simplefilter("ignore", _NoWarning, append=True)
    _set_filters([other for other in warnings.filters if other[2] is not _NoWarning])
