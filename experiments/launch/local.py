r"""Several processes on this machine, each with a few simulated CPU devices.

    python experiments/launch/local.py --processes 2 --devices 4 -- \
        generate --mesh data=2,model=4 --prompts models/prompts.jsonl --output out.jsonl

What follows `--` is a command of `specdec`, which every process runs.
"""

import argparse
import socket
import subprocess
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4, help="of each process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = [word for word in options.command if word != "--"]
    program = "import sys; from specdec_jax.cli import main; sys.exit(main())"
    joined = ["--coordinator", f"localhost:{free_port()}"]
    joined += ["--num-processes", str(options.processes)]
    joined += ["--cpu-devices", str(options.devices)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, *command, *joined, "--process-id", str(i)]
        )
        for i in range(options.processes)
    ]
    return max(child.wait() for child in children)


def free_port():
    """A port that is free, and so is the one above it, on which the roll is called."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("localhost", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("localhost", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    sys.exit(main())
