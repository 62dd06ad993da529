"""Flags that several commands share, and loading what they name."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_jax.acceptance import LOSSY
from specdec_jax.cli import show
from specdec_jax.text.pairing import default_draft

Target = Annotated[str, typer.Option(help="Checkpoint: name, folder, file or hub id.")]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        help="The same, or ngram, ngram_counts, early_exit, bigram:corpus=FILE, "
        "unigram:corpus=FILE; repeatable, see --compose. Options follow the name, as "
        "in NAME:layers=8,below=0.4; the README lists them. By default the bundled "
        "draft for the bundled target and ngram for any other."
    ),
]
Compose = Annotated[
    str | None,
    typer.Option(help="How several drafts work together: staged, nested or tree."),
]
DraftNumLayers = Annotated[
    int | None,
    typer.Option(
        help="Keep that many layers of the draft; of the target where no draft is "
        "named."
    ),
]
NumDraftTokens = Annotated[
    str,
    typer.Option(
        help="Tokens drafted a round, K; of several drafts all together, or one number "
        "for each, as 4,2."
    ),
]
Branching = Annotated[
    str | None,
    typer.Option(
        help="Draft a tree instead of a chain: children of each node, level by level, "
        "as 3,2,1; or the parent of each node, as -1,-1,0. It takes the place of "
        "--num-draft-tokens."
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        help="rejection, block, coupled or multi_draft; by default rejection, and "
        "multi_draft for trees, which rejection and block do not judge. lenience and "
        "typical need --allow-lossy."
    ),
]
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Permit a rule whose text has not the target's distribution.",
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep only that many tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens up to that mass.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help='JSON lines: {"prompt": ...} or {"messages": [...]}; by default the '
        "bundled ones."
    ),
]
NumPrompts = Annotated[int | None, typer.Option(help="Use only the first that many.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Prompts are the user's turn in a chat.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Budget of each prompt.")]
BatchSize = Annotated[int, typer.Option(help="Prompts decoded together.")]
Seed = Annotated[int, typer.Option(help="Of the requests, from 0 to 2^32 - 1.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Mesh = Annotated[
    str | None,
    typer.Option(help="Devices to run on, as data=2,model=4; rows x tensors."),
]
DraftSharding = Annotated[
    str, typer.Option(help="The draft on the mesh: like the target, or data.")
]
CpuDevices = Annotated[
    int | None, typer.Option(help="Simulate that many devices on the CPU.")
]
Coordinator = Annotated[
    str | None, typer.Option(help="host:port of process 0, if there are several.")
]
NumProcesses = Annotated[int | None, typer.Option(help="How many processes there are.")]
ProcessId = Annotated[int | None, typer.Option(help="This one's number, from 0.")]
Distributed = Annotated[
    bool,
    typer.Option("--distributed", help="Join the processes of a TPU pod or of SLURM."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def simulate_devices(cpu_devices: int | None) -> None:
    """Makes JAX see that many CPU devices, if a number is given.

    Raises:
      ValueError: The number is below 1.
    """
    if cpu_devices is None:
        return
    if cpu_devices < 1:
        raise ValueError(f"cpu_devices is {cpu_devices}; it must be at least 1")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices)


def join_processes(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    distributed: bool,
) -> None:
    """Joins the other processes if there are any; all but the first print no answer."""
    given = (coordinator, num_processes, process_id)
    if not distributed and given == (None, None, None):
        return
    import jax

    from specdec_jax.processes import initialize

    initialize(*given)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def choose_draft(
    target: str, drafts: list[str] | None, draft_num_layers: int | None
) -> Any:
    """Returns what drafts: what was named, one or a list, else what suits the target.

    Example:
      >>> choose_draft("a", ["b"], None), choose_draft("a", ["b", "ngram"], None)
      ('b', ['b', 'ngram'])
    """
    if drafts:
        return drafts if len(drafts) > 1 else drafts[0]
    return default_draft(target, draft_num_layers)


def read_lengths(num_draft_tokens: str) -> Any:
    """Returns K, or the list of numbers that were given for several drafts.

    Raises:
      ValueError: One of them is not a whole number.

    Example:
      >>> read_lengths("4"), read_lengths("4,2")
      (4, [4, 2])
    """
    parts = num_draft_tokens.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens!r}; it must be a whole number, or "
            "one for each draft, as 4,2"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def read_tree(branching: str | None, num_draft_tokens: str) -> dict[str, Any]:
    """Returns what a config says of the draft's shape; a tree's K is its depth.

    Raises:
      ValueError: One of them is malformed.

    Example:
      >>> read_tree("3,2", "4")
      {'branching': [3, 2], 'num_draft_tokens': 2}
    """
    if branching is None:
        lengths = read_lengths(num_draft_tokens)
        return {"branching": None, "num_draft_tokens": lengths}
    from specdec_jax.drafters.tree import node_depths, read_parents

    parts = [part.strip() for part in branching.split(",")]
    if not all(part.removeprefix("-").isdecimal() for part in parts):
        raise ValueError(
            f"branching is {branching!r}; give whole numbers of at least 1, as 3,2,1, "
            "or the parents of a tree's nodes, as -1,-1,0"
        )
    numbers = [int(part) for part in parts]
    depth = max(node_depths(read_parents(numbers)))
    return {"branching": numbers, "num_draft_tokens": depth}


def check_lengths(config: Mapping[str, Any]) -> None:
    """Refuses a draft length below 1, for commands that need a draft.

    Raises:
      ValueError: Naming it.
    """
    lengths = config["num_draft_tokens"]
    for one in lengths if isinstance(lengths, list) else [lengths]:
        if one < 1:
            raise ValueError(f"num_draft_tokens is {one}; it must be at least 1")


def told_drafts(config: Mapping[str, Any]) -> str:
    """Returns what drafts, for a title.

    Example:
      >>> told_drafts({"draft": ["a", "ngram"], "compose": "staged"})
      'a, ngram (staged)'
    """
    draft, tree = config["draft"], config.get("branching")
    ways = [config["compose"]] if isinstance(draft, list) else []
    ways += [f"branching {','.join(map(str, tree))}"] if tree else []
    names = ", ".join(draft) if isinstance(draft, list) else str(draft)
    return f"{names} ({', '.join(ways)})" if ways else names


def rule_facts(
    rule: str | None, allow_lossy: bool, *, on_trees: bool = False
) -> dict[str, Any]:
    """Returns what a config says of the rule; the default for chains or trees of None.

    Example:
      >>> rule_facts("block", False)
      {'rule': 'block', 'allow_lossy': False, 'lossless': True}
    """
    if rule is None:
        rule = "multi_draft" if on_trees else "rejection"
    lossless = rule not in LOSSY
    return {"rule": rule, "allow_lossy": allow_lossy, "lossless": lossless}


def draft_facts(
    *,
    compose: str | None,
    draft_num_layers: int | None,
    num_draft_tokens: str,
    branching: str | None,
    rule: str | None,
    allow_lossy: bool,
) -> dict[str, Any]:
    """Returns what a config says of how drafts are made and judged.

    Raises:
      ValueError: A length or the branching is malformed.
    """
    on_trees = bool(branching) or compose == "tree"
    return {
        "compose": compose,
        "draft_num_layers": draft_num_layers,
        **read_tree(branching, num_draft_tokens),
        **rule_facts(rule, allow_lossy, on_trees=on_trees),
    }


def told_rule(config: Mapping[str, Any]) -> str:
    """Returns the rule in words, for people.

    Example:
      >>> told_rule({"rule": "typical", "lossless": False})
      'typical (lossy: not the distribution of the target)'
    """
    if config["lossless"]:
        return str(config["rule"])
    return f"{config['rule']} (lossy: not the distribution of the target)"


def load_decoder(config: Mapping[str, Any], **replaced: Any) -> Any:
    """Loads what a command's config names, through the compilation cache on disk.

    Args:
      config: Has target and draft, and what of the other arguments of
        `SpeculativeDecoder.from_pretrained` the command offers.
      **replaced: Arguments that the config does not decide.
    """
    from specdec_jax.compilation import enable_compilation_cache
    from specdec_jax.text import SpeculativeDecoder

    enable_compilation_cache()
    names = (
        "compose",
        "branching",
        "num_draft_tokens",
        "rule",
        "allow_lossy",
        "dtype",
        "draft_num_layers",
        "mesh",
        "draft_sharding",
    )
    options = {name: config[name] for name in names if name in config} | replaced
    with show.status(f"loading {config['target']}"):
        return SpeculativeDecoder.from_pretrained(
            config["target"], config["draft"], **options
        )
