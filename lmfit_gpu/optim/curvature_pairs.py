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

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmfit_gpu.optim.pair_damping import DampedPair

__all__ = ["CurvaturePairs"]

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

    def append(self, s: torch.Tensor, y: torch.Tensor, pair: DampedPair, products: NDArray[np.float64]) -> None:
        """Keep s and ŷ = tau y + shift s as the newest pair; the oldest leaves a full memory.

        Parameters
        ----------
        s, y : Tensor, shape (n_params,)
        pair : DampedPair
        products : ndarray, shape (2 rows + 2, 2)
            What `products` returned.
        """
        if self.storage is None:
            self.storage = torch.zeros(
                self.capacity, 2, self.n_params, dtype=self._like.dtype, device=self._like.device
            )
        n_rows = products.shape[0] - 2
        slot = self.slots.pop(0) if len(self.slots) == self.capacity else self._free_slot()
        length = products[-2, 0] ** 0.5
        torch.mul(s, 1 / length, out=self.storage[slot, 0])
        torch.add(s * (pair.shift / length), y, alpha=pair.tau / length, out=self.storage[slot, 1])
        mixed = np.stack((products[:, 0], pair.shift * products[:, 0] + pair.tau * products[:, 1]), axis=1) / length
        own = np.stack((mixed[-2], pair.shift * mixed[-2] + pair.tau * mixed[-1])) / length
        new = slice(2 * slot, 2 * slot + 2)
        self._gram[:n_rows, new] = mixed[:-2]
        self._gram[new, :n_rows] = mixed[:-2].T
        self._gram[new, new] = own
        self.slots.append(slot)
        self.gamma = pair.gamma
        self._prepare()

    def drop_oldest(self) -> None:
        """Forget the oldest pair."""
        self.slots.pop(0)
        self._prepare()

    def use_scale(self, gamma: float) -> None:
        """Let H₀, and without pairs H, be gamma · I."""
        self.gamma = gamma
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
        self._core, self.eigenvalues = None, (self.gamma, self.gamma)
        if not self.slots:
            return
        order = np.array([2 * slot for slot in self.slots] + [2 * slot + 1 for slot in self.slots])
        gram = self._gram[np.ix_(order, order)]
        core = _compact(gram, self.gamma)
        self.eigenvalues = _eigenvalues(gram, core, self.gamma)
        rounding = torch.finfo(self._like.dtype).eps * np.linalg.norm(core, 2) * np.linalg.norm(gram, 2)
        if not rounding <= SAFE * self.eigenvalues[0]:
            return
        n_rows = 2 * (max(self.slots) + 1)
        placed = np.zeros((n_rows, n_rows))
        placed[np.ix_(order, order)] = core
        self._core = torch.from_numpy(placed).to(self._like.device)


def _compact(gram: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Return M for the order S, Y."""
    k = len(gram) // 2
    triangle = np.triu(gram[:k, k:])
    inverse = np.linalg.inv(triangle)
    middle = inverse.T @ (np.diag(np.diag(triangle)) + gamma * gram[k:, k:]) @ inverse
    return np.block([[middle, -gamma * inverse.T], [-gamma * inverse, np.zeros((k, k))]])


def _eigenvalues(gram: NDArray[np.float64], core: NDArray[np.float64], gamma: float) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of γI + Wᵀ M W (γ among them, which holds for n > 2k)."""
    squares, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(squares, 0.0))
    inner = root.T @ core @ root
    values = gamma + np.linalg.eigvalsh((inner + inner.T) / 2)
    return min(gamma, float(values[0])), max(gamma, float(values[-1]))
