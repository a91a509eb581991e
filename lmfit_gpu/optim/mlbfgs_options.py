"""What the options of MLBFGS must be, for all parameters or one param group, checked before any work."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch

from lmfit_gpu.optim.arguments import ARITHMETIC, checked_number, checked_whole
from lmfit_gpu.optim.pair_damping import RULES
from lmfit_gpu.optim.parameter_blocks import KINDS

__all__ = ["check_loaded", "checked_options", "checked_parameters", "named_groups"]

INITIAL = ("fixed", "pair")
NORMS = (None, "gradient", "unit")
SOURCES = ("averages", "overlap")
WINDOW = (0.1, 10.0)  # σ_L, σ_H
POWELL_BOUNDS = (0.01, math.inf)  # of B₀
BETA = 0.98
TAU = 1.0  # τ₀
TORCH_ONLY = "differentiable"  # torch's Optimizer adds it to the defaults when a state is taken up
BELOW_ONE = math.nextafter(1.0, 0.0)
BELOW_ZERO = math.nextafter(0.0, -1.0)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a param group with defaults that depend on the damping filled in.

    Raises
    ------
    ValueError, TypeError
        That name the option, what was given and what is allowed.
    """
    checked = dict(options)
    for name in ("lr", "weight_decay"):
        checked[name] = checked_number(name, options[name], BELOW_ZERO, math.inf, "a number >= 0")
        if math.isinf(checked[name]):
            raise ValueError(f"{name}: got inf; a finite number is expected")
    checked["momentum"] = checked_number("momentum", options["momentum"], BELOW_ZERO, BELOW_ONE, "a number in [0, 1)")
    checked["initial_scale"] = _positive("initial_scale", options["initial_scale"])
    for name in ("update_every", "history_size"):
        checked[name] = checked_whole(name, options[name], 1)
    if options["history_growth"] is not None:
        checked["history_growth"] = checked_whole("history_growth", options["history_growth"], 1)
    _one_of("blocks", options["blocks"], KINDS)
    _one_of("damping", options["damping"], RULES)
    _one_of("normalize", options["normalize"], NORMS)
    _one_of("pairs", options["pairs"], SOURCES)
    checked["initial_inverse"] = _initial_inverse(options)
    if options["nesterov"] and checked["momentum"] == 0:
        raise ValueError("nesterov: got True; it needs momentum > 0")
    for name in ("relative_window", "maximize", "nesterov"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name}: got {options[name]!r}; True or False is expected")
    if options["eigenvalue_bounds"] is not None:
        low, high = checked["eigenvalue_bounds"] = _interval("eigenvalue_bounds", options["eigenvalue_bounds"])
        if checked["initial_inverse"] == "fixed" and not low <= checked["initial_scale"] <= high:
            raise ValueError(
                f"eigenvalue_bounds: got {(low, high)!r}; initial_scale, {checked['initial_scale']!r}, lies outside"
            )
    checked["beta"] = _beta(options)
    checked.update(_damping(options))
    return checked


def _beta(options: dict[str, Any]) -> float | None:
    beta = options["beta"]
    if options["pairs"] == "overlap":
        if beta is not None:
            raise ValueError(f"beta: got {beta!r}; None is expected with pairs='overlap', which takes no averages")
        return None
    return checked_number("beta", BETA if beta is None else beta, BELOW_ZERO, BELOW_ONE, "a number in [0, 1)")


def _initial_inverse(options: dict[str, Any]) -> str:
    given, rule = options["initial_inverse"], options["damping"]
    _one_of("initial_inverse", given, (None, *INITIAL))
    if given == "fixed" and rule == "powell":
        raise ValueError("initial_inverse: got 'fixed'; damping='powell' has one of its own, 'pair'")
    return given or ("fixed" if rule == "window" else "pair")


def _damping(options: dict[str, Any]) -> dict[str, Any]:
    rule, window, tau = options["damping"], options["curvature_window"], options["tau"]
    if rule != "window" and (tau is not None or options["relative_window"]):
        given = "tau" if tau is not None else "relative_window"
        raise ValueError(f"{given}: got {options[given]!r}; it goes with damping='window', not {rule!r}")
    if rule is None:
        if window is not None:
            raise ValueError(f"curvature_window: got {window!r}; None is expected with damping=None")
        return {}
    if rule == "powell":
        return {"curvature_window": _interval("curvature_window", POWELL_BOUNDS if window is None else window)}
    low, high = _interval("curvature_window", WINDOW if window is None else window)
    if not (low < 1 < high and math.isfinite(high)):
        raise ValueError(f"curvature_window: got {(low, high)!r}; 0 < low < 1 < high < inf is expected")
    share = checked_number("tau", TAU if tau is None else tau, 0, 1, "0 < tau <= 1")
    return {"curvature_window": (low, high), "tau": share}


def check_loaded(groups: list[dict[str, Any]], names: Iterable[str]) -> None:
    """Raise ValueError for param groups that are of another optimizer, or have options that are not allowed."""
    for group in groups:
        missing = [name for name in (*names, "n_steps") if name not in group and name != TORCH_ONLY]
        if missing:
            raise ValueError(f"state_dict: its param groups have no {', '.join(missing)}; those of MLBFGS are expected")
        checked_options(group)


def checked_parameters(parameters: list[torch.Tensor]) -> None:
    """Raise for parameters that are not float32 or float64, or given twice."""
    seen: dict[int, int] = {}
    for number, parameter in enumerate(parameters):
        first = seen.setdefault(id(parameter), number)
        if first != number:
            raise ValueError(f"params: tensor {number} is tensor {first} again; each is expected once")
        if parameter.dtype not in ARITHMETIC:
            raise ValueError(
                f"params: tensor {number} is {parameter.dtype}; float32 or float64 is expected (for mixed precision "
                "keep the parameters in float32, and use torch.autocast)"
            )
        if parameter.layout != torch.strided:
            raise ValueError(f"params: tensor {number} is {parameter.layout}; a dense tensor is expected")


def named_groups(params: Any) -> Any:
    """Return params for torch's Optimizer; a module becomes its named parameters that are trained."""
    if not isinstance(params, torch.nn.Module):
        return params
    named = [(name, parameter) for name, parameter in params.named_parameters() if parameter.requires_grad]
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for _, parameter in named):
        raise ValueError("params: a lazy layer has no weights yet; call the model once on some rows")
    if not named:
        raise ValueError("params: the module has no parameters to train")
    return named


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _positive(name: str, value: Any) -> float:
    number = checked_number(name, value, 0, math.inf, "a number > 0")
    if math.isinf(number):
        raise ValueError(f"{name}: got inf; a finite number is expected")
    return number


def _interval(name: str, value: Any) -> tuple[float, float]:
    """Return (low, high) with 0 < low < high, high may be infinite."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not all(isinstance(end, numbers.Real) and not isinstance(end, bool) for end in value):
        raise ValueError(f"{name}: got {value!r}; two numbers (low, high) are expected")
    low, high = float(value[0]), float(value[1])
    if not 0 < low < high:
        raise ValueError(f"{name}: got {value!r}; 0 < low < high is expected")
    return low, high
