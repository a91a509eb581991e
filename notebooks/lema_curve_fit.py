"""LeMA's curve-fitting network by Levenberg-Marquardt, on any backend.

y = sin(10x)/(10x) on equidistant points of [-1, 1], without noise, by a network 1-20-1 with tanh in float64
(61 weights), all points at once::

    python notebooks/lema_curve_fit.py                                        # scipy
    python notebooks/lema_curve_fit.py --backend cupynumeric --solver cholesky
    legate --cpus 2 --gpus 0 notebooks/lema_curve_fit.py --backend cupynumeric

The last line printed has the mean square of the residuals in full precision, so that backends can be compared.

Why 60 iterations and not more. Training a network is chaotic: a difference of rounding in the weights grows from
trial to trial, and near the end, where J is singular to rounding, backends part. After 60 iterations from these
weights (seed 0, 1,000 points) a relative change of the starting weights by 1e-12 has changed the loss by about 2e-9
of itself, so rounding (1e-16) changes it far less than 1e-6; after 400 iterations with ``cholesky`` the same change
has become 7e-4. tests/test_lema_script.py changes the weights and looks. The fit is stopped before it converges, and
the data do not determine all weights; the warnings that say so are expected and not shown.
"""

import argparse
import warnings

import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor
from lmfit_gpu.demo import make_network, sinc_data
from lmfit_gpu.exceptions import CovarianceWarning

N_POINTS = 1000
ITERATIONS = 60


def parser():
    options = argparse.ArgumentParser(description="LeMA's curve-fitting network by Levenberg-Marquardt")
    options.add_argument("--backend", choices=("auto", "scipy", "torch", "cupynumeric"), default="auto")
    options.add_argument("--solver", choices=("qr", "cholesky"), default="qr")
    options.add_argument("--iterations", type=int, default=ITERATIONS, metavar="N", help="default: %(default)s")
    options.add_argument("--points", type=int, default=N_POINTS, metavar="N", help="default: %(default)s")
    return options


def perturbed(network, size):
    """Multiply every weight by 1 + size z, z standard normal, in place; return the network."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(1 + size * torch.randn(weights.shape, generator=generator, dtype=weights.dtype))
    return network


def train(options, network=None):
    """Return the fitted estimator and the mean square of its residuals."""
    x, y = sinc_data(options.points)
    network = make_network() if network is None else network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        estimator = LMRegressor(
            network, backend=options.backend, solver=options.solver, max_iter=options.iterations
        ).fit(x, y)
    return estimator, 2 * estimator.result_.cost / y.numel()


def main():
    options = parser().parse_args()
    estimator, loss = train(options)
    result = estimator.result_
    print(f"network 1-20-1, {options.points} points: {result.n_iter} iterations, {result.status.name}")
    print(f"backend {estimator.backend_}, solver {estimator.solver_}, loss {loss!r}")


if __name__ == "__main__":
    main()
