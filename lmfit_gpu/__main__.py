"""The command line: ``python -m lmfit_gpu demo`` and ``python -m lmfit_gpu validate``."""

import argparse
import sys
from collections.abc import Sequence

from lmfit_gpu import demo, validate
from lmfit_gpu.exceptions import BackendUnavailableError

__all__ = ["main"]

VALIDATE = """\
Fit the 27 NIST StRD problems from both starts with LMRegressor and default options; print trials,
evaluations, correct digits and status of each run, totals, and the totals of scipy.optimize.curve_fit.
Without --model and --jac this is done in three ways: torch models by autograd, torch models by 3-point
differences, numpy models by automatic differences.

Exit status 1 if a run has not converged, has fewer than 6 right digits in its parameters or in its
standard errors (Lanczos1: 2.8, its residuals are rounding), or one way takes more than 1,600 trials.
"""

DEMO = """\
Fit NIST's Thurber data and print the report; then fit a small network to sin(10x)/(10x) by
Levenberg-Marquardt and by Adam and compare loss against time. Saves two plots; under a minute in all.
Needs matplotlib.
"""

RAW = argparse.RawDescriptionHelpFormatter  # keeps the paragraphs


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m lmfit_gpu", description="Levenberg-Marquardt for scientists.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo_parser = commands.add_parser("demo", help="two fits with plots", description=DEMO, formatter_class=RAW)
    demo.add_arguments(demo_parser)
    validate_parser = commands.add_parser(
        "validate", help="the NIST problems, digits counted", description=VALIDATE, formatter_class=RAW
    )
    validate.add_arguments(validate_parser)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return demo.main(arguments) if arguments.command == "demo" else validate.main(arguments)
    except BackendUnavailableError as error:
        print(f"lmfit_gpu {arguments.command}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        if arguments.command == "validate":
            validate_parser.error(str(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
