"""Builds the wheel and runs it in a clean environment outside the checkout."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    print("+", *map(str, command), flush=True)
    return subprocess.run(list(map(str, command)), check=True, **options)


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        run(sys.executable, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        quiet = ("--quiet", "--disable-pip-version-check")
        run(
            python,
            "-m",
            "pip",
            "install",
            *quiet,
            "-c",
            ROOT / "constraints.txt",
            wheel,
        )
        specdec = folder / "venv" / "bin" / "specdec"
        run(specdec, "info", "--json", cwd=folder)
        # No flags: the bundled pair, which must have travelled in the wheel.
        run(specdec, "generate", "--max-new-tokens", 24, cwd=folder)
    print("the wheel runs in a clean environment")


if __name__ == "__main__":
    main()
