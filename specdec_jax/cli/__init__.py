"""The command line, `specdec`. One command a file; messages and codes are made here.

A user's mistake ends with a message on stderr, exit code 2 and no traceback; set
SPECDEC_TRACEBACK=1 to see where it was found. Heavy imports wait inside the commands,
so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Sequence

import typer

from specdec_jax.cli.audit import audit
from specdec_jax.cli.bench import bench
from specdec_jax.cli.calibrate import calibrate
from specdec_jax.cli.environment import leave_absent_tpus_alone
from specdec_jax.cli.generate import generate
from specdec_jax.cli.info import info
from specdec_jax.cli.plan import plan
from specdec_jax.cli.theory import theory

app = typer.Typer(
    name="specdec",
    help="Exact speculative decoding in JAX.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(bench)
app.command()(calibrate)
app.command()(theory)
app.command()(audit)
app.command()(plan)
app.command()(info)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Arguments without the program's name; None takes those of the process.

    Returns:
      The exit code: the command's own, or 2 for a user's mistake.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    leave_absent_tpus_alone()
    try:
        return app(arguments, prog_name="specdec", standalone_mode=False) or 0
    except (ValueError, OSError, FloatingPointError) as error:
        if isinstance(error, BrokenPipeError):
            return _pipe_closed()
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        # typer carries click inside from 0.26 on and imports it before: no shared type.
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message())


def _complain(message: str) -> int:
    print(f"specdec: error: {message}", file=sys.stderr)
    return 2


def _pipe_closed() -> int:
    """Ends quietly when the reader of stdout has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
