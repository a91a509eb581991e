"""Estimators that outlive their process: pickles, copies, and files without code.

===================  ==========================================  =======================================================
way                  holds                                       for
===================  ==========================================  =======================================================
pickle, joblib       everything, functions by name or by value   workers, and files that only their writer reads
save, load           data alone: JSON and safetensors            files that are kept, or come from somewhere else
copy, deepcopy       the object; functions are shared            the same process
===================  ==========================================  =======================================================
"""

import copy
import os
from typing import Any, TypeVar

from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.persistence.container import read_file, write_file
from lmfit_gpu.persistence.document import document_of
from lmfit_gpu.persistence.pickling import packed, unpacked
from lmfit_gpu.persistence.restoring import restored

__all__ = ["Persistent"]

Kind = TypeVar("Kind", bound="Persistent")


NO_DATA = {"_data": None, "_space": None}  # attributes that hold rows of the fit


class Persistent(BaseEstimator):
    """What makes an estimator picklable, copyable, and able to be saved."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file that holds data and no code (safetensors, with JSON in its header).

        A file of that name is replaced at the end, at once. Options that are functions or modules are not written:
        they are given to :meth:`load` again. For the check that they are the same, the model is called on four
        made-up rows.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        NotFittedError
        ValueError
            If the model was changed since the fit, or an attribute is no data.
        OSError
            If the file cannot be written.
        """
        check_is_fitted(self, "result_")
        write_file(path, *document_of(self))

    @classmethod
    def load(cls: type[Kind], path: str | os.PathLike[str], model: Any = None, **code: Any) -> Kind:
        """Return the fitted estimator of a file that :meth:`save` wrote; it predicts on the CPU.

        Parameters
        ----------
        path : str or path-like
        model : callable, torch.nn.Module, or module factory, optional
            The model of the saved estimator: a function; or a module of the same architecture, or a factory of it,
            whose state comes from the file (a module is copied, never changed). Not for the default network.
        **code
            Every other option that was a function, or an object of a class of the user's own: residual,
            predict_fn, tied, loss, jac, callback, p0. ``callback=None`` leaves it out.

        Raises
        ------
        ValueError, TypeError
            If it is no such file, a damaged one or one of another version of the format; if code is missing (the
            message names all of it), or is not that of the saved estimator: other parameters, another architecture, or
            other predictions of four made-up rows.
        OSError
            If the file cannot be read.
        """
        document, tensors = read_file(path)
        given = code if model is None else {"model": model, **code}
        estimator: Kind = restored(cls, document, tensors, given)
        return estimator

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), **NO_DATA}  # data are no part of a pickle
        return packed(self, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unpacked(self, state))

    def __copy__(self) -> "Persistent":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Persistent":
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        state = {**self.__dict__, **NO_DATA}
        other.__dict__.update(copy.deepcopy(state, memo))  # functions are shared, as Python does
        other.__dict__["_data"] = self.__dict__.get("_data")  # and data, which nobody changes
        return other
