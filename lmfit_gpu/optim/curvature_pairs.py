"""The curvature pairs of one block of parameters, and the L-BFGS inverse Hessian they make.

With pairs (s_i, ŷ_i), oldest first, the two-loop recursion (Nocedal and Wright, 2006, algorithm 7.4) gives H g by 2k
dot products and 2k updates, one after the other, k the number of pairs. The same H in compact form (Byrd, Nocedal,
Schnabel, 1994, theorem 2.2) is::

    H = γ I + Wᵀ M W,    W = [s_1, ŷ_1, …, s_k, ŷ_k] as rows, (2k, n),

    M = [ R⁻ᵀ (D + γ YYᵀ) R⁻¹   −γ R⁻ᵀ ]    in the order S, Y;
        [ −γ R⁻¹                  0    ]    R the upper triangle of S Yᵀ (rows s, ŷ), D its diagonal.

M (2k, 2k) changes with the pairs only. It is made on the host in float64 from the Gram matrix W Wᵀ, which a new pair
extends by one product of W with (s, y). A direction then costs two products with W (8 k n flops, W read twice) whatever
k is, without a host synchronisation. Pairs are stored with ‖s‖ = 1: H does not change when s and ŷ are scaled together.

Rounding in M W g is about ε ‖M‖ ‖W Wᵀ‖ ‖g‖. Where that is not small beside the smallest eigenvalue of H (pairs nearly
parallel, float32), the two-loop recursion is used: slower, and as accurate as H allows.

The eigenvalues of H are γ, and on the span of the pairs those of γ I + Cᵀ M C with C Cᵀ = W Wᵀ: known exactly at
the price of a (2k, 2k) eigenproblem for each new pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmfit_gpu.optim.pair_damping import DampedPair

__all__ = ["CurvaturePairs", "Prospect"]

CHUNK = 1 << 16  # columns converted to float64 at a time
SAFE = 0.05  # share of the smallest eigenvalue that rounding may reach before two-loop takes over


class CurvaturePairs:
    """Pairs of one block, the newest `capacity` of them; mutable.

    Parameters
    ----------
    n_params : int
        Length of the block.
    capacity : int
        Most pairs kept.
    like : Tensor
        Has the dtype and the device of the block.
    gamma : float
        H₀ = gamma · I before the first pair.

    Attributes
    ----------
    storage : Tensor, shape (capacity, 2, n_params), or None
        s and ŷ of each slot; None before the first pair.
    slots : list of int
        Slots in use, oldest pair first.
    gamma : float
        H₀ = gamma · I.
    eigenvalues : tuple of float
        Smallest and largest eigenvalue of H.
    """

    def __init__(self, n_params: int, capacity: int, like: torch.Tensor, gamma: float) -> None:
        self.n_params, self.capacity = n_params, capacity
        self.storage: torch.Tensor | None = None
        self.slots: list[int] = []
        self.gamma = gamma
        self.eigenvalues = (gamma, gamma)
        self._gram = np.zeros((2 * capacity, 2 * capacity))
        self._like = like
        self._core: torch.Tensor | None = None  # M; None: two-loop

    def __len__(self) -> int:
        return len(self.slots)

    def products(self, s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the products of (rows in use, s, y) with s and y, shape (2 rows + 2, 2), float64, on the device."""
        rows = self._rows()
        total = torch.zeros(rows.shape[0] + 2, 2, dtype=torch.float64, device=s.device)
        for start in range(0, self.n_params, CHUNK):
            part = slice(start, start + CHUNK)
            new = torch.stack((s[part], y[part])).double()
            total += torch.cat((rows[:, part].double(), new)) @ new.T
        return total

    def foreseen(self, pair: DampedPair, products: NDArray[np.float64]) -> "Prospect":
        """Return what H would be with ŷ = tau y + shift s as the newest pair, before anything is kept.

        Parameters
        ----------
        pair : DampedPair
        products : ndarray, shape (2 rows + 2, 2)
            What `products` returned.
        """
        rows, own = _products_with_new(pair, products)
        full = len(self.slots) == self.capacity
        slots = [*self.slots[1:], self.slots[0]] if full else [*self.slots, self._free_slot()]
        gram, new = self._gram.copy(), slice(2 * slots[-1], 2 * slots[-1] + 2)
        gram[: len(rows), new] = rows
        gram[new, : len(rows)] = rows.T
        gram[new, new] = own
        return Prospect(slots, gram, pair, products[-2, 0] ** 0.5, *_inverse(gram, slots, pair.gamma))

    def append(self, s: torch.Tensor, y: torch.Tensor, prospect: "Prospect") -> None:
        """Keep s and ŷ as the newest pair, as foreseen; the oldest leaves a full memory."""
        if self.storage is None:
            self.storage = torch.zeros(
                self.capacity, 2, self.n_params, dtype=self._like.dtype, device=self._like.device
            )
        pair, length = prospect.pair, prospect.length
        kept_s, kept_y = self.storage[prospect.slots[-1]]
        torch.mul(s, 1 / length, out=kept_s)
        torch.add(s * (pair.shift / length), y, alpha=pair.tau / length, out=kept_y)
        self.slots, self._gram, self.gamma = prospect.slots, prospect.gram, pair.gamma
        self._use(prospect.core, prospect.eigenvalues)

    def drop_oldest(self) -> None:
        """Forget the oldest pair, if there is one."""
        self.slots = self.slots[1:]
        self._prepare()

    def apply_(self, vector: torch.Tensor) -> torch.Tensor:
        """Replace a vector (n_params,) by H times it, in place, and return it."""
        if self._core is None:
            return self.two_loop_(vector) if self.slots else vector.mul_(self.gamma)
        return vector.addmv_(self._rows().T, self._weights(vector), beta=self.gamma)

    def add_applied_(self, total: torch.Tensor, decay: float, vector: torch.Tensor) -> torch.Tensor:
        """Replace `total` by decay · total + H · vector, in place, and return it; `vector` is left undefined.

        The product with the pairs does the decay on its way: a running sum costs no pass of its own.
        """
        if self._core is None:
            return total.mul_(decay).add_(self.apply_(vector))
        return total.addmv_(self._rows().T, self._weights(vector), beta=decay).add_(vector, alpha=self.gamma)

    def two_loop_(self, vector: torch.Tensor) -> torch.Tensor:
        """Replace a vector by H times it, in place, by the two-loop recursion."""
        assert self.storage is not None  # there are pairs
        weights = {}
        for slot in reversed(self.slots):
            s, y = self.storage[slot]
            weights[slot] = (s @ vector) / self._along(slot)
            vector.sub_(weights[slot] * y)
        vector.mul_(self.gamma)
        for slot in self.slots:
            s, y = self.storage[slot]
            vector.add_((weights[slot] - (y @ vector) / self._along(slot)) * s)
        return vector

    def written(self) -> dict[str, Any]:
        """Return what is not in `storage`, as plain numbers and lists."""
        return {"slots": list(self.slots), "gamma": self.gamma, "gram": self._gram.tolist()}

    def read(self, written: dict[str, Any], storage: torch.Tensor | None) -> None:
        """Take the place of pairs that were written.

        Parameters
        ----------
        written : dict
            From `written`.
        storage : Tensor, shape (capacity, 2, n_params), or None

        Raises
        ------
        ValueError
            If there were more or fewer slots.
        """
        if len(written["gram"]) != 2 * self.capacity:
            raise ValueError(f"history_size: got {self.capacity}; the pairs were kept with {len(written['gram']) // 2}")
        self.storage, self.slots, self.gamma = storage, list(written["slots"]), written["gamma"]
        self._gram = np.array(written["gram"], dtype=np.float64)
        self._prepare()

    def _weights(self, vector: torch.Tensor) -> torch.Tensor:
        """Return M W vector, the weight of each row in H · vector."""
        assert self._core is not None
        return (self._core @ (self._rows() @ vector).double()).to(vector.dtype)

    def _free_slot(self) -> int:
        return min(set(range(self.capacity)) - set(self.slots))

    def _rows(self) -> torch.Tensor:
        """Return the rows of W up to the last slot in use, (rows, n_params); free slots in between have weight 0."""
        if self.storage is None or not self.slots:
            return self._like.new_zeros(0, self.n_params)
        return self.storage.view(2 * self.capacity, self.n_params)[: 2 * (max(self.slots) + 1)]

    def _along(self, slot: int) -> float:
        return float(self._gram[2 * slot, 2 * slot + 1])

    def _prepare(self) -> None:
        """Make M and the eigenvalues of H from the Gram matrix."""
        self._use(*_inverse(self._gram, self.slots, self.gamma))

    def _use(self, core: NDArray[np.float64], eigenvalues: tuple[float, float]) -> None:
        """Put M where the products with W take it from, if rounding allows."""
        self._core, self.eigenvalues = None, eigenvalues
        order = _order(self.slots)
        rounding = torch.finfo(self._like.dtype).eps * np.linalg.norm(core) * np.trace(self._gram[np.ix_(order, order)])
        if not self.slots or not rounding <= SAFE * eigenvalues[0]:
            return
        n_rows = 2 * (max(self.slots) + 1)
        placed = np.zeros((n_rows, n_rows))
        placed[np.ix_(order, order)] = core
        self._core = torch.from_numpy(placed).to(self._like.device)


@dataclass(frozen=True)
class Prospect:
    """Pairs with one more: their slots, Gram matrix, M and the eigenvalues of H; the newest pair and its ‖s‖."""

    slots: list[int]
    gram: NDArray[np.float64]
    pair: DampedPair
    length: float
    core: NDArray[np.float64]
    eigenvalues: tuple[float, float]


def _order(slots: Sequence[int]) -> NDArray[np.int_]:
    """Return the rows of all s, then those of all ŷ."""
    return np.array([2 * slot for slot in slots] + [2 * slot + 1 for slot in slots], dtype=int)


def _products_with_new(
    pair: DampedPair, products: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the products of the rows in use with s and ŷ, (rows, 2), and those of s and ŷ, (2, 2), for ‖s‖ = 1."""
    length = products[-2, 0] ** 0.5
    mixed = np.stack((products[:, 0], pair.shift * products[:, 0] + pair.tau * products[:, 1]), axis=1) / length
    own = np.stack((mixed[-2], pair.shift * mixed[-2] + pair.tau * mixed[-1])) / length
    return mixed[:-2], own


def _inverse(
    gram: NDArray[np.float64], slots: Sequence[int], gamma: float
) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Return M, in the order S, Y of the slots, and the eigenvalues of H."""
    if not slots:
        return np.zeros((0, 0)), (gamma, gamma)
    order = _order(slots)
    used = gram[np.ix_(order, order)]
    core = _compact(used, gamma)
    return core, _eigenvalues(used, core, gamma)


def _compact(gram: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Return M for the order S, Y."""
    k = len(gram) // 2
    triangle = np.triu(gram[:k, k:])
    inverse = np.linalg.inv(triangle)
    inner = gamma * gram[k:, k:]
    inner.flat[:: k + 1] += triangle.diagonal()
    core = np.zeros_like(gram)
    core[:k, :k] = inverse.T @ inner @ inverse
    core[:k, k:] = -gamma * inverse.T
    core[k:, :k] = -gamma * inverse
    return core


def _eigenvalues(gram: NDArray[np.float64], core: NDArray[np.float64], gamma: float) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of γI + Wᵀ M W (γ among them, which holds for n > 2k)."""
    squares, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(squares, 0.0))
    inner = root.T @ core @ root
    values = gamma + np.linalg.eigvalsh((inner + inner.T) / 2)
    return min(gamma, float(values[0])), max(gamma, float(values[-1]))
