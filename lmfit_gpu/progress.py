"""What a fit shows while it runs, and the user's callback beside it.

After every trial the engine hands over one :class:`~lmfit_gpu.result.IterationRecord`. It goes to two places, in this
order: what ``verbose`` asks for, then ``callback(record)``, whose true answer stops the fit. So the record at which a
callback stops, or fails, has been shown.

=========  ===========  ==============================================================================================
verbose    stream       shows
=========  ===========  ==============================================================================================
0          none         nothing
1          stderr       a tqdm bar over the trials, of ``max_iter`` at most, with the cost
2          stdout       the iteration table, a line a trial, then :meth:`lmfit_gpu.result.Result.brief`
=========  ===========  ==============================================================================================

The streams are those of the moment of the fit, so a notebook, or a test that captures them, gets the text.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from tqdm import tqdm

from lmfit_gpu.result import TABLE_HEAD, IterationRecord, Result, table_row

__all__ = ["followed"]

Callback = Callable[[IterationRecord], Any]


def followed(minimize: Callable[..., Result], callback: Callback | None, verbose: int, max_iter: int) -> Result:
    """Return what `minimize` returns, shown as it goes.

    Parameters
    ----------
    minimize : callable (callback=) -> Result
        Calls that callback with the record of every trial; a true answer stops it.
    callback : callable or None
        The user's.
    verbose : int
    max_iter : int
        Most trials.

    Raises
    ------
    TypeError
        If the callback returns what is neither true nor false.
    whatever `minimize` or the callback raises
        As raised. Only an error of the stream after the last trial gets the result as its attribute ``result``.
    """
    display = _display(verbose, max_iter)
    result: Result | None = None

    def told(record: IterationRecord) -> bool:
        display.trial(record)
        return callback is not None and _is_true(callback(record))

    try:
        result = minimize(callback=told)
        display.end(result)
    except BaseException as error:
        if result is not None:  # the fit is done, its last line could not be written
            error.result = result  # type: ignore[attr-defined]
        else:
            with suppress(OSError, ValueError):  # a closed stream must not hide why the fit ended
                display.end(getattr(error, "result", None))
        raise
    return result


def _is_true(answer: Any) -> bool:
    try:
        return bool(answer)
    except (TypeError, ValueError, RuntimeError) as error:  # arrays and tensors of several values
        raise TypeError(
            f"callback: returned {type(answer).__name__}, which is neither true nor false ({error}); "
            "a true value stops the fit, None or False goes on"
        ) from error


class Display(Protocol):
    """Shows one fit."""

    def trial(self, record: IterationRecord) -> None:
        """Show a trial."""
        ...

    def end(self, result: Result | None) -> None:
        """Show how the fit ended, where that is known; called once, and last."""
        ...


class Silent:
    """Nothing."""

    def trial(self, record: IterationRecord) -> None:
        """Show nothing."""

    def end(self, result: Result | None) -> None:
        """Show nothing."""


class QuietBar(tqdm):
    """A bar without tqdm's thread that watches for slow loops: a fit leaves no thread behind."""

    monitor_interval = 0


class Bar:
    """A bar over the trials on stderr."""

    def __init__(self, max_iter: int) -> None:
        self._bar = QuietBar(total=max_iter, desc="LMRegressor", unit="trial", disable=sys.stderr is None)

    def trial(self, record: IterationRecord) -> None:
        """Move on by one."""
        self._bar.set_postfix_str(f"cost {record.cost:.6g}", refresh=False)
        self._bar.update()

    def end(self, result: Result | None) -> None:
        """Leave the bar where it ended, with the status."""
        if result is not None:
            self._bar.set_postfix_str(f"cost {result.cost:.6g}, {result.status.name}", refresh=False)
        self._bar.close()


class Table:
    """The iteration table on stdout, a line a trial."""

    def __init__(self) -> None:
        self._begun = False

    def trial(self, record: IterationRecord) -> None:
        """Write a line, below the head."""
        _write(table_row(record) if self._begun else f"{TABLE_HEAD}\n{table_row(record)}")
        self._begun = True

    def end(self, result: Result | None) -> None:
        """Write one line: outcome, cost and counts."""
        if result is not None:
            _write(result.brief())


def _display(verbose: int, max_iter: int) -> Display:
    if verbose == 0:
        return Silent()
    return Bar(max_iter) if verbose == 1 else Table()


def _write(text: str) -> None:
    """Write lines to standard output at once, so that they appear while the fit runs; a program without one goes on."""
    if sys.stdout is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
