"""Estimators that outlive their process: pickles that load on a machine without a GPU, and copies."""

import copy
from typing import Any

from sklearn.base import BaseEstimator

from lmfit_gpu.persistence.pickling import packed, unpacked

__all__ = ["Persistent"]


class Persistent(BaseEstimator):
    """What makes an estimator picklable and copyable."""

    def __getstate__(self) -> dict[str, Any]:
        return packed(self, super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unpacked(self, state))

    def __copy__(self) -> "Persistent":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Persistent":
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))  # functions are shared, as Python does
        return other
