r"""A batch that grows when its steps are noise.

A step p computed on one batch is judged on the m rows of another: with Δ_i the fall of the cost of row i,

.. math:: \text{noise} = \frac{s / \sqrt m}{|\bar\Delta|}, \qquad s^2 = \frac{1}{m - 1} \sum_i (\Delta_i - \bar\Delta)^2

is its relative standard error. While noise ≤ θ the batch shows truly which way is down; beyond, more rows are worth
more than more steps. This is the norm test of Byrd, Chin, Nocedal and Wu, Sample size selection in optimization methods
for machine learning (2012), doi:10.1007/s10107-012-0572-5, which asks of the gradients g_i of a batch that
‖Var g_i‖₁/m ≤ θ²‖ḡ‖². To first order Δ_i = −g_iᵀp: tested here is that condition along the one direction taken,
and, as the rows are others than those that made p, with its curvature and without its bias. Noise falls like m^-½: a
batch of four times the rows halves it. Far from the minimum falls are large and small batches pass; near it the mean
fall vanishes, the scatter does not, and the batch grows to all rows, where Levenberg-Marquardt converges as it does
without batches.

The *median* of the last few values decides, not their mean: one fall that happens to be near 0 makes its noise
as large as you please. They are forgotten whenever the batch grows, as they speak of the smaller one.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

__all__ = ["AdaptiveBatchSampler"]

WINDOW = 5  # values of noise that decide together: two may be accidents

NUMBERS = (int, float, np.integer, np.floating)

SETTINGS = ("n_samples", "seed", "shuffle", "drop_last")  # what the order of the rows depends on


class AdaptiveBatchSampler(Sampler[list[int]]):
    """Deal the rows of a data set in batches that grow, never shrink, as training gets noisy.

    Parameters
    ----------
    data : int or sized
        Number of rows, or the data set that has them.
    batch_size : int
        Rows of the first batches.
    max_batch_size : int, optional
        Where the growth ends; by default with all rows.
    growth : float, default 2
        Factor by which a batch grows, > 1.
    threshold : float, default 0.5
        θ, the noise above which it does. At 0.5 the fall of the cost is two standard errors, and a step that
        does no good would seem to do as much in about one of twenty.
    shuffle : bool, default True
        Another permutation in every epoch, which depends on `seed` and the number of the epoch alone.
    seed : int, default 0
    drop_last : bool, default False
        Leave out the rows at the end of an epoch that make no whole batch.

    Attributes
    ----------
    batch_size : int
        Rows of the next batch.
    epoch : int
        Number of epochs finished.

    Notes
    -----
    A batch counts as used when :meth:`update` was called after it, once. Worker processes of a DataLoader
    fetch batches ahead; those that were not used yet are in :meth:`state_dict`, with the size they had, and are dealt
    again after a resume. A larger batch comes after those already fetched.

    Leaving the loop over an epoch early ends that epoch: the next loop deals another permutation.

    Examples
    --------
    >>> sampler = AdaptiveBatchSampler(10, 4, shuffle=False)
    >>> [len(batch) for batch in sampler]
    [4, 4, 2]
    >>> for noise in [0.2, 0.9, 0.8, 0.1, 1.1]:
    ...     sampler.update(noise)
    >>> list(sampler)
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]

    With LMA::

        sampler = AdaptiveBatchSampler(dataset, 256)
        for epoch in range(20):
            for x, y in DataLoader(dataset, batch_sampler=sampler):
                loss, terminated = lma.step(x, y)
                sampler.update(lma.noise)
    """

    def __init__(  # noqa: PLR0913
        self,
        data: int | Sized,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        growth: float = 2.0,
        threshold: float = 0.5,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(data, (int, np.integer, Sized)):
            raise TypeError(
                f"data: got {type(data).__name__}; a number of rows or a data set with a length is expected"
            )
        n_samples = len(data) if isinstance(data, Sized) else data
        self.n_samples = _whole("data", n_samples, 1)
        self.batch_size = _whole("batch_size", batch_size, 1, self.n_samples)
        limit = self.n_samples if max_batch_size is None else max_batch_size
        self.max_batch_size = _whole("max_batch_size", limit, self.batch_size, self.n_samples)
        self.growth = _above("growth", growth, 1)
        self.threshold = _above("threshold", threshold, 0)
        self.seed = _whole("seed", seed, 0)
        self.shuffle, self.drop_last = _flag("shuffle", shuffle), _flag("drop_last", drop_last)

        self.epoch = 0
        self._used = 0  # rows of this epoch
        self._ahead: deque[int] = deque()  # sizes of the batches dealt and not used yet
        self._again: deque[int] = deque()  # sizes of those that a resume deals again
        self._resumed = False
        self._noises: deque[float] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        """Return the number of batches of this epoch that are not used yet, if the batch does not grow."""
        sizes = [*self._ahead, *self._again]
        left = self.n_samples - self._used - sum(sizes)
        return len(sizes) + (left // self.batch_size if self.drop_last else math.ceil(left / self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of each batch of an epoch: a new one, or the rest of the one that was resumed."""
        if not self._resumed and (self._used or self._ahead):
            self._next_epoch()
        self._resumed = False
        epoch, order = self.epoch, self._order()
        while epoch == self.epoch and (size := self._next_size()):
            start = self._used + sum(self._ahead)
            if self._again:
                self._again.popleft()
            self._ahead.append(size)
            yield order[start : start + size].tolist()

    def update(self, noise: float | None) -> None:
        """Note that a batch was used, and what its step showed; let the next ones grow where that asks for it.

        Parameters
        ----------
        noise : float or None
            Standard error over |mean| of the fall of the cost on independent rows, >= 0: ``lma.noise``. None or NaN
            where it is not known.
        """
        if noise is not None and (isinstance(noise, bool) or not isinstance(noise, NUMBERS)):
            raise TypeError(f"noise: got {noise!r}; a number >= 0, NaN or None is expected")
        if noise is not None and noise < 0:
            raise ValueError(f"noise: got {noise!r}; a number >= 0, NaN or None is expected")
        if noise is not None and not math.isnan(noise):
            self._noises.append(float(noise))
        if self._ahead:
            self._used += self._ahead.popleft()
        if len(self._noises) == WINDOW and statistics.median(self._noises) > self.threshold:
            self.batch_size = min(math.ceil(self.growth * self.batch_size), self.max_batch_size)
            self._noises.clear()
        if self._used and not self._ahead and not self._next_size():
            self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, as numbers and lists of them."""
        state = {name: getattr(self, name) for name in SETTINGS}
        return state | {
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "used": self._used,
            "ahead": [*self._ahead, *self._again],
            "noises": list(self._noises),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the next loop deals the batches that the interrupted one had not used yet.

        Raises
        ------
        ValueError
            For the state of a sampler of other rows or another order, or a batch above `max_batch_size`; the message
            names what differs. Growth and threshold may change.
        """
        expected = {*SETTINGS, "batch_size", "epoch", "used", "ahead", "noises"}
        if set(state) != expected:
            raise ValueError(f"state: got the keys {sorted(state)}; {sorted(expected)} are expected")
        for name in SETTINGS:
            if state[name] != getattr(self, name):
                raise ValueError(f"state: has {name}={state[name]!r}; this sampler has {getattr(self, name)!r}")
        self.batch_size = _whole("batch_size of state", state["batch_size"], 1, self.max_batch_size)
        self.epoch, self._used = state["epoch"], state["used"]
        self._ahead, self._again = deque(), deque(state["ahead"])
        self._noises = deque(state["noises"], maxlen=WINDOW)
        self._resumed = True

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_samples)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.n_samples)

    def _next_size(self) -> int:
        """Return how many rows the next batch of this epoch has; 0 at its end."""
        if self._again:
            return self._again[0]
        left = self.n_samples - self._used - sum(self._ahead)
        return 0 if self.drop_last and left < self.batch_size else min(left, self.batch_size)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._used = 0
        self._ahead.clear()
        self._again.clear()


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {value!r}; {allowed} is expected")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: got {value!r}; {allowed} is expected")
    return int(value)


def _above(name: str, value: Any, low: int) -> float:
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name}: got {value!r}; a number > {low} is expected")
    if not low < value < math.inf:
        raise ValueError(f"{name}: got {value!r}; a finite number > {low} is expected")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}; True or False is expected")
    return bool(value)
