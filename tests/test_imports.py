"""The imports run downwards: a table, held by walking the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import specdec_jax

ROOT = Path(specdec_jax.__file__).parent

BELOW = {
    "base": set(),
    "rng": {"base"},
    "sampling": {"base", "rng"},
    "cache": {"base"},
    "acceptance": {"base", "rng", "sampling", "cache"},
    "state": {"base", "rng", "sampling", "cache"},
    "verify": {"base", "rng", "sampling", "cache"},
    "decode": {"base", "rng", "sampling", "cache", "state", "verify"},
    "drafters": {
        "base",
        "rng",
        "sampling",
        "cache",
        "acceptance",
        "state",
        "verify",
        "decode",
    },
    "networks": {"base", "cache"},
    "checkpoints": {"base", "cache", "networks"},
    "theory": set(),
    "tree_choice": set(),
    "processes": set(),
    "sharding": {"base", "cache", "processes"},
    "audit": {
        "base",
        "rng",
        "sampling",
        "acceptance",
        "state",
        "verify",
        "decode",
        "drafters",
    },
    "calibrate": {
        "base",
        "rng",
        "sampling",
        "theory",
        "trace",
        "tree_choice",
        "drafters",
        "benchmark",
        "text",
    },
}
"""What each part may import besides itself. Parts that are not listed sit above."""


def part(module: str) -> str:
    return module.removeprefix("specdec_jax.").split(".")[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "specdec_jax":
                names = [f"specdec_jax.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {part(n) for n in names if n.startswith("specdec_jax.")}
    return found


def test_imports_run_downwards():
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own in BELOW:
            assert imports(path) <= BELOW[own] | {own}, path
        elif own not in {"cli", "__init__"}:
            assert "cli" not in imports(path), path


def test_importing_the_package_pulls_in_no_large_library():
    code = (
        "import sys, specdec_jax; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
