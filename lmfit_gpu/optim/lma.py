r"""Levenberg-Marquardt as a training loop: ``loss, terminated = LMA(model, devices, residual_fn).step(x, y)``.

One step linearises the residuals of a batch at the parameters that the module has, and tries damped steps until one
lowers the cost; the module then has the new parameters, or those it had if none did. What is minimised is

.. math:: \frac1m \sum_i r_i(\theta)^2 + \alpha \|\theta_{weights}\|^2, \qquad
          \frac1N \sum_i \ell_i(\theta) + \tfrac12 \alpha \|\theta_{weights}\|^2

for m residuals, or N rows of a likelihood. The damping, D and the radius are carried from batch to batch for each
square root of a residual, so that batches of any size speak of the same thing.

**Other rows.** A step that fits its own batch may not fit the data. When the next batch has other rows, the cost of
each of its rows is looked at before and after the last step: the mean fall and its standard error are an independent
judgement. A rise that is more than chance undoes the step; else the gain ratio of those rows moves the radius, and
their standard error over the mean is :attr:`LMA.noise`, by which a sampler may let batches grow (Byrd, Chin, Nocedal
and Wu (2012), doi:10.1007/s10107-012-0572-5).

The engine is that of :class:`lmfit_gpu.LMRegressor`; the interface is that of LeMA (cuPyLMA).
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lmfit_gpu.backends import backend_name, get_backend
from lmfit_gpu.blocks import Workers
from lmfit_gpu.damping import updated_scale
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import MOST_DENSE, GhostLinearization, Step, linearize
from lmfit_gpu.messages import explained
from lmfit_gpu.optim.arguments import (
    check_dtype,
    checked_attention,
    checked_number,
    checked_solver,
    checked_whole,
    devices_of,
    first_parameter,
)
from lmfit_gpu.optim.batch import BatchProblem, Randomness
from lmfit_gpu.optim.grouping import Recent, batch_groups
from lmfit_gpu.optim.judgement import SAME_ROWS, judged, shorter
from lmfit_gpu.optim.memory import Last, Memory, fitting_scale, is_seen, references
from lmfit_gpu.optim.network import Network, called, frozen_statistics, is_random, on_device
from lmfit_gpu.optim.policies import resolve_policy
from lmfit_gpu.optim.residuals import ONLY, resolve_residuals
from lmfit_gpu.optim.routes import derivatives_for
from lmfit_gpu.optim.trials import Trials
from lmfit_gpu.result import IterationRecord, Status, Stop
from lmfit_gpu.rows import each_tensor
from lmfit_gpu.state import State
from lmfit_gpu.trial import Trial

__all__ = ["LMA"]

DECAY = 0.9  # of D from batch to batch
ATTEMPTS = 10  # trials of one step, as in LeMA
NO_STEP = Step(torch.empty(0), 0.0, 0.0, 0.0, valid=False)
QR_PARAMS, QR_RESIDUALS = 1000, 5000  # beyond, cholesky takes 0.6 of the time for the same losses


class LMA:
    """Levenberg-Marquardt optimizer of a torch module.

    Parameters
    ----------
    model : torch.nn.Module
        Trained in place. Parameters with ``requires_grad=False`` keep their values; tied ones stay tied.
    devices : device, list of devices or "auto", default "auto"
        Which hold a replica of the model each; slices of a batch are dealt over them. "auto": where the model is.
    residual_fn : optional
        * None or "gaussian": outputs − targets.
        * f(outputs, targets): residuals, any number for each row.
        * f(model, x, y): residuals; it calls the model itself, and may differentiate it with respect to x.
        * "softmax", "binary", "poisson", or a likelihood of :mod:`lmfit_gpu.likelihoods`.
        * a dict of such functions by name: groups of residuals; x and y are dicts with the same names.
    solver : {"auto", "qr", "cholesky", "dual", "ghost", "cg"}
        "auto": qr up to 1,000 parameters and 5,000 residuals, and cholesky beyond; ghost with fewer residuals than
        parameters; cg where a matrix of side 20,000 would be needed.
    learning_rate : float, default 1.0
        Share of the step that is tried, at most 1.
    damping_start, damping_up, damping_down : float, optional
        First λ and its factors, with ``damping="lema"`` (which they imply) and "marquardt".
    dtype : torch or numpy dtype, optional
        Must be that of the model, in which J is computed: ``model.double()`` changes it.
    backend : {"auto", "scipy", "torch", "cupynumeric"}
        "auto": cupynumeric under Legate; on the CPU torch, and scipy where torch has one thread.
    damping : {"auto", "trust-region", "nielsen", "marquardt", "lema"} or a policy
        "auto" is the trust region.
    scaling : {"jacobian", "identity", "diagonal"}, optional
        D, in place of the policy's. "identity" means that of the mean of squares.
    alpha : float, default 0.0
        Penalty on weights, tensors with two axes or more.
    momentum : float, default 0.0
        Share of the last displacement that is added to a step where the model of the batch gains by it.
    noise_aware : bool or "auto"
        Judge a step again on the next batch. "auto": yes, but for "lema".
    decay : float or "auto"
        Of D from one batch to another; "auto" is 0.9. On the same rows nothing is forgotten.
    weights : dict of str to float, optional
        w of each group: it contributes w Σ r².
    attention : ResidualAttention, optional
        Weights of the rows that grow with their residuals; every step must have the same rows.
    attempts : int, optional
        Most trials of a step; 10 by default, or what the policy says.
    seed : int, default 0
        Of the random numbers that a model in training mode draws.

    Attributes
    ----------
    status : Status or None
        The stop test that the last step met; None: none.
    message : str
        The same with the measured value, its limit and what to try.
    record : IterationRecord or None
        The last trial.
    noise : float
        Standard error over |mean| of the fall of the cost of other rows; NaN while none were seen.
    n_steps : int

    Raises
    ------
    TypeError, ValueError
        For arguments that are not as above, before any work.

    Examples
    --------
    >>> import torch
    >>> from lmfit_gpu import LMA, get_available_gpus
    >>> _ = torch.manual_seed(0)
    >>> devices = get_available_gpus()
    >>> layers = torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    >>> model = torch.nn.Sequential(*layers).double().to(devices[0])
    >>> x = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]
    >>> y = torch.sin(3 * x)
    >>> lma = LMA(model, devices, lambda a, b: a - b)
    >>> for _ in range(30):
    ...     loss, terminated = lma.step(x, y)
    >>> loss < 1e-6
    True
    """

    def __init__(  # noqa: PLR0913
        self,
        model: torch.nn.Module,
        devices: Any = "auto",
        residual_fn: Any = None,
        solver: str = "auto",
        learning_rate: float = 1.0,
        damping_start: float | None = None,
        damping_up: float | None = None,
        damping_down: float | None = None,
        dtype: Any = None,
        *,
        backend: str = "auto",
        damping: Any = "auto",
        scaling: Any = None,
        alpha: float = 0.0,
        momentum: float = 0.0,
        noise_aware: bool | str = "auto",
        decay: float | str = "auto",
        weights: Mapping[str, float] | None = None,
        attention: Any = None,
        attempts: int | None = None,
        seed: int = 0,
    ) -> None:
        own = first_parameter(model)
        check_dtype(dtype, own.dtype)
        self.model = model
        self.devices = devices_of(devices, own.device)
        self._residuals = resolve_residuals(residual_fn, weights)
        self._solver = checked_solver(solver)
        self._backend = backend_name(backend, self.devices[0])
        if backend == "auto" and self._backend == "scipy" and torch.get_num_threads() > 1:
            self._backend = "torch"  # two libraries whose threads spin while the other works are ten times slower
        get_backend(self._backend, self.devices[0])
        given = {"damping_start": damping_start, "damping_up": damping_up, "damping_down": damping_down}
        self._policy = resolve_policy(damping, scaling, given)
        self._share = checked_number(
            "learning_rate", learning_rate, 0, 1, "a number > 0 and <= 1, a share of the step,"
        )
        self._alpha = checked_number("alpha", alpha, -1e-300, math.inf, "a number >= 0")
        self._momentum = (
            0.0 if momentum == 0 else checked_number("momentum", momentum, 0, 0.999, "a number from 0 to 1")
        )
        if not (isinstance(noise_aware, bool) or noise_aware == "auto"):
            raise ValueError(f"noise_aware: got {noise_aware!r}; True, False or 'auto' is expected")
        self._noise_aware = self._policy.attempts is None if noise_aware == "auto" else bool(noise_aware)
        self._decay = DECAY if decay == "auto" else checked_number("decay", decay, 0, 1, "a number > 0 and <= 1")
        self._attention = checked_attention(attention)
        if attempts is not None:
            checked_whole("attempts", attempts, 1)
            if self._policy.attempts is not None:
                self._policy = replace(self._policy, attempts=int(attempts))  # type: ignore[type-var]
        self._attempts = ATTEMPTS if attempts is None else int(attempts)
        self._seed = checked_whole("seed", seed, 0)
        self._network = Network(model)
        self._replicas = [self._network]
        self._replicas += [Network(copy.deepcopy(model).to(device)) for device in self.devices[1:]]
        self._workers = Workers(len(self.devices))
        self._known, self._chosen = Recent(), Recent()
        self._kinds: tuple[Any, ...] = ()
        self._memory = Memory()
        self._seen: Any = None
        self.status: Status | None = None
        self.message = ""
        self.record: IterationRecord | None = None
        self.noise = float("nan")

    @property
    def n_steps(self) -> int:
        """Steps so far."""
        return self._memory.n_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module; a step neither reads nor writes them."""
        self.model.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later step depends on besides the parameters and buffers of the module: tensors and numbers."""
        return {"version": 1, "seed": self._seed, "memory": self._memory.written()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the module must be given its own state by its own ``load_state_dict``.

        Raises
        ------
        ValueError
            If the state is none of an LMA, or of another model.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1 or "memory" not in state:
            raise ValueError("state_dict: got something that LMA.state_dict() has not made (version 1)")
        memory = Memory.read(state["memory"], self.devices[0])
        n, n_tensors = sum(self._network.sizes), len(self._network.sizes)
        if memory.scale is not None and memory.scale.d.numel() not in (n, n_tensors):
            raise ValueError(f"state_dict: D has {memory.scale.d.numel()} numbers; the model has {n} parameters")
        self._memory, self._seed, self._seen = memory.cast(self._network.dtype), int(state["seed"]), None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: all but threads, and what can be found again."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_seen", "_workers", "_known", "_chosen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was kept."""
        self.__dict__.update(state)
        self._seen, self._workers = None, Workers(len(self.devices))
        self._known, self._chosen = Recent(), Recent()

    def step(self, x: Any, y: Any = None, slice_size: int | None = None) -> tuple[float, bool]:
        """Make one step on a batch.

        Parameters
        ----------
        x : tensor, or tuple, list or dict of tensors
            Inputs, rows in front, on any device; a tuple or list is the model's positional arguments, a dict its
            keyword arguments.
        y : tensor, or tuple, list or dict of tensors, optional
            Targets, as the residual function takes them.
        slice_size : int, optional
            Rows that a device works on at a time; above 4,096 the next lower multiple of it, so that sums are the same
            to the bit. Memory, not the result, depends on it, but for the random numbers of a model in training mode,
            which every slice draws for itself.

        Returns
        -------
        loss : float
            Mean of the squared residuals (mean negative log-likelihood of a row) after the step, without the penalty.
        terminated : bool
            No step can lower the cost of these rows any further: a stop test was met, or no trial succeeded. See
            :attr:`message`. On changing batches one such step does not end the training, two in a row do.

        Raises
        ------
        ValueError, TypeError
            If rows, targets and residual function do not fit each other.
        NonFiniteError
            If residuals or derivatives are not finite at the parameters that the module has.
        """
        if slice_size is not None:
            slice_size = checked_whole("slice_size", slice_size, 1)
        self._network.check_current()
        with frozen_statistics(self.model, lambda: self._run(x, y)):
            for replica in self._replicas[1:]:
                replica.follow(self.model)
            theta = self._network.theta
            return self._stepped(self._problem(x, y, slice_size, theta), theta, (x, y))

    def _run(self, x: Any, y: Any) -> None:
        """Run the module over a whole batch, as its residual functions do."""
        several = set(self._residuals) != {ONLY}
        for name, residuals in self._residuals.items():
            parts = ((tree[name] if several and tree is not None else tree) for tree in (x, y))
            part_x, part_y = (on_device(part, self.devices[0], self._network.dtype) for part in parts)
            if residuals.function is not None and residuals.form == "network":
                residuals.function(self.model, each_tensor(lambda tensor: tensor.detach(), part_x), part_y)
            else:
                with torch.no_grad():
                    called(self.model, {}, part_x)

    def _problem(self, x: Any, y: Any, slice_size: int | None, theta: torch.Tensor) -> BatchProblem:
        memory = self._memory
        groups, self._kinds = batch_groups(
            self._residuals, x, y, self._network, theta, known=self._known, row_weights=memory.row_weights
        )
        seed = self._seed + memory.n_steps if is_random(self.model) else None
        problem = BatchProblem(
            self._replicas,
            groups,
            theta,
            devices=self.devices,
            workers=self._workers,
            slice_size=slice_size,
            randomness=Randomness(seed),
        )
        if self._attention is not None:
            problem = self._attended(problem, theta)
        return problem.penalised(self._alpha, by_tensor=self._solver_for(problem) == "ghost")

    def _attended(self, problem: BatchProblem, theta: torch.Tensor) -> BatchProblem:
        """Return the problem with the weights of its rows renewed by their residuals."""
        found = dict(zip(self._residuals, problem.residuals_by_group(theta), strict=True))
        row_weights = self._attention.updated(self._memory.row_weights or None, found)
        return problem.weighted(row_weights.values())

    def _solver_for(self, problem: BatchProblem) -> str:
        if self._solver == "ghost" and len(problem.groups) > 1:
            raise ValueError("solver: got 'ghost' with several groups of residuals; it is for one")
        if self._solver != "auto":
            return self._solver
        if problem.n_residuals < problem.n_params and not problem.coupled and len(problem.groups) == 1:
            return "ghost" if problem.n_residuals <= MOST_DENSE else "cg"
        if problem.n_params <= QR_PARAMS and problem.n_residuals <= QR_RESIDUALS:
            return "qr"
        return "cholesky" if problem.n_params <= MOST_DENSE else "cg"

    def _stepped(self, problem: BatchProblem, theta: torch.Tensor, batch: Any) -> tuple[float, bool]:
        memory, repeats = self._memory, self._attention is not None or is_seen(self._seen, batch)
        self._seen = references(batch)
        if not repeats and memory.cost is not None and self._noise_aware:
            judgement = judged(problem, theta, memory, self._policy)
            theta, memory, repeats = judgement.theta, judgement.memory, judgement.same_rows
            self.noise = self.noise if math.isnan(judgement.noise) else judgement.noise
        policy, scale = memory.in_units_of(problem.n_counted)
        state = self._linearized(problem, theta, scale, repeats)
        if memory.cost is not None and not repeats:
            limit = SAME_ROWS[problem.dtype] * memory.cost
            repeats = abs(state.cost / problem.n_counted - memory.cost) <= limit
        state = replace(state, policy=self._policy.start(state.lin, theta) if policy is None else policy)
        trials, trial = Trials(self._engine(problem), self._share, self._momentum, self._attempts), None
        stop = trials.tested(problem, state, memory, repeats)
        if stop is None:
            begun = state.policy
            state, trial, stop = trials.tried(problem, state, memory.displacement)
            self.record = state.record
            if trial is None and self._noise_aware and not repeats:
                # one batch on which nothing succeeds must not leave the next ones without a step
                state = replace(state, policy=shorter(self._policy, begun, NO_STEP))
        moved = state if trial is None else replace(state, theta=trial.theta, cost=trial.cost)
        if not torch.equal(moved.theta, self._network.theta):
            self._network.load(moved.theta)
        self._memory = self._remembered(problem, state, trial, memory, stop)
        terminated = stop is not None and (repeats or memory.cost is None or memory.stopped)
        stop = None if stop is None else explained(stop, state.refusal, [])
        self.status, self.message = (None, "") if stop is None else (stop.status, stop.message)
        return problem.mean_loss(moved.cost, moved.theta), terminated

    def _engine(self, problem: BatchProblem) -> LevenbergMarquardt:
        return LevenbergMarquardt(
            solver=self._solver_for(problem),
            backend=self._backend,
            damping=self._policy,
            within_reach=True,
        )

    def _linearized(self, problem: BatchProblem, theta: torch.Tensor, scale: Any, repeats: bool) -> State:
        """Return the state at theta, linearised, with D."""
        solver = self._solver_for(problem)
        key = (solver == "ghost", *self._kinds)
        if key not in self._chosen:
            self._chosen[key] = derivatives_for(problem, theta, by_tensor=solver == "ghost").route
        derivatives = Derivatives(problem, self._chosen[key])
        jacobian = derivatives.at(theta)
        full = linearize(jacobian, solver, get_backend(self._backend, problem.device))
        if problem.curves:
            cost = problem.cost(theta)
        else:
            cost = 0.5 * full.residual_norm**2 + problem.penalty_cost(theta)
        if not (math.isfinite(cost) and full.finite):
            what = "derivatives" if math.isfinite(cost) else "residuals"
            raise NonFiniteError(f"step: the {what} of this batch are not finite at the parameters of the model")
        norms = full.tensor_norms if isinstance(full, GhostLinearization) else None
        scale = fitting_scale(scale, full.column_norms if norms is None else norms, self._network.sizes)
        scaling: Any = self._policy.scaling
        unit = problem.n_counted**0.5
        scale = updated_scale(scaling, full, scale, 1.0 if repeats else self._decay, norms)
        if scaling == "identity":
            scale = replace(scale, d=scale.d * unit)
        lin = full.with_scale(scale.d)
        return State(theta, cost, derivatives, jacobian, lin, scale, None, njev=1)

    def _remembered(
        self, problem: BatchProblem, state: State, trial: Trial | None, memory: Memory, stop: Stop | None
    ) -> Memory:
        count, before = problem.n_counted, state.policy
        kept = replace(memory, n_steps=memory.n_steps + 1, stopped=stop is not None)
        if self._attention is not None:
            weights = zip(self._residuals, problem.groups, strict=True)
            kept = replace(kept, row_weights={k: g.row_weights for k, g in weights if g.row_weights is not None})
        if trial is None:
            kept = replace(kept, cost=state.cost / count, fall=0.0, last=None, displacement=None)
            return kept.with_units_of(count, before, state.scale)
        gain_ratio = trial.gain_ratio(state.cost)
        policy = self._policy.accept(before, trial.step, gain_ratio)
        kept = kept.with_units_of(count, policy, state.scale)
        root = count**0.5
        last = None
        if self._noise_aware:
            undecided = memory.with_units_of(count, before, state.scale).policy
            step = trial.step
            last = Last(
                state.theta,
                undecided,
                step.predicted_reduction / count,
                gain_ratio,
                step.scaled_norm / root,
                step.damping,
            )
        return replace(
            kept,
            cost=trial.cost / count,
            fall=(state.cost - trial.cost) / state.cost if state.cost > 0 else 0.0,
            last=last,
            displacement=trial.theta - state.theta if self._momentum else None,
        )
