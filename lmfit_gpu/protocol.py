"""What scikit-learn asks of a regressor besides fit and predict: checked arguments, tags, nested parameters.

``model__width`` is the parameter ``width`` of a module factory, in ``get_params``, ``set_params`` and the grid of a
search: a change replaces the factory by a :class:`functools.partial` of it, so that neither the class nor the user's
own partial is touched.
"""

from typing import Any, Self

from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils._param_validation import validate_parameter_constraints

from lmfit_gpu.factories import factory_parameters, is_factory, with_parameters
from lmfit_gpu.parameter_constraints import PARAMETER_CONSTRAINTS, given_arguments
from lmfit_gpu.preparation import has_network, is_module

__all__ = ["Regressor"]

NESTED = "model__"


class Regressor(RegressorMixin, BaseEstimator):
    """A regressor whose arguments are those of :class:`lmfit_gpu.LMRegressor`."""

    model: Any
    residual: Any
    nan_policy: str
    _parameter_constraints = PARAMETER_CONSTRAINTS
    _caller: str | None = None  # whom errors name; None: the class

    def _validate_params(self) -> None:
        """Check the arguments that were given."""
        caller = self._caller or type(self).__name__
        validate_parameter_constraints(self._parameter_constraints, given_arguments(self), caller)

    def __sklearn_tags__(self) -> Tags:
        """Return what this instance takes; it follows the model."""
        tags = super().__sklearn_tags__()
        module, alone = is_module(self), self.model is None and self.residual is not None
        tags.target_tags.required = not alone
        tags.target_tags.multi_output = module  # how many values a function returns is known when it is called
        tags.input_tags.three_d_array = module and not has_network(self)
        tags.input_tags.allow_nan = self.nan_policy == "omit"
        return tags

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments; with `deep` also those of a factory, as ``model__name``.

        Parameters
        ----------
        deep : bool, default True

        Returns
        -------
        dict of str to object
            ``inspect.Parameter.empty`` for a parameter of a factory that has no value yet.
        """
        params = super().get_params(deep)
        if deep and is_factory(params["model"]):
            params |= {NESTED + name: value for name, value in factory_parameters(params["model"]).items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set arguments; ``model__name=value`` replaces a factory by a partial of it.

        Parameters
        ----------
        **params
            `model` itself, when it is given too, is set first.

        Raises
        ------
        ValueError
            For names that there are not.
        """
        nested = {name.removeprefix(NESTED): value for name, value in params.items() if name.startswith(NESTED)}
        super().set_params(**{name: value for name, value in params.items() if not name.startswith(NESTED)})
        if not nested:
            return self
        model = self.model
        if hasattr(model, "set_params") and not is_factory(model):  # an object with parameters of its own
            return super().set_params(**{NESTED + name: value for name, value in nested.items()})
        if not is_factory(model):
            raise ValueError(
                f"Invalid parameter {NESTED + next(iter(nested))!r}: model={model!r} has no parameters of its own; a "
                "subclass of torch.nn.Module, or a functools.partial of one, has"
            )
        self.model = with_parameters(model, nested)
        return self
