"""Data sets with known answers: the NIST nonlinear regression problems.

Everything is inside the package, so nothing is downloaded. See `lmfit_gpu.datasets.nist` for the format and
the source.
"""

from lmfit_gpu.datasets.nist import NIST_NAMES, NistProblem, NistSolution, correct_digits, load_nist

__all__ = ["NIST_NAMES", "NistProblem", "NistSolution", "correct_digits", "load_nist"]
