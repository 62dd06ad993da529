"""A traced run as one HTML file: text coloured by origin, each decision on hover.

The file stands alone: no script, nothing to fetch. Rejected drafts are struck through
before the token that replaced them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import jax

from specdec_jax.text.detokenize import TextFollower, decode
from specdec_jax.text.results import Result
from specdec_jax.trace import Trace

_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #22252a; --soft: #6b7078;
  --line: #d9dbd6; --accepted: #c9ecd0; --corrected: #fbdf9d; --bonus: #bfe2f5;
  --rejected: #b3261e; --tip: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e5e6e3;
  --soft: #9a9fa7; --line: #383c42; --accepted: #1f4d2b; --corrected: #63480b;
  --bonus: #164560; --rejected: #ff8a80; --tip: #202327; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.15rem; } h2 { font-size: 1rem; margin: 2.2rem 0 .4rem; }
p, dl { margin: .3rem 0; } .soft, dt { color: var(--soft); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .8rem 0; padding: 1rem;
  border: 1px solid var(--line); border-radius: 6px;
  font: 14px/1.9 ui-monospace, monospace; }
.t, .r { border-radius: 3px; cursor: default; }
.t { padding: .1em 0; } .first { border-left: 2px solid var(--soft); }
.accepted { background: var(--accepted); } .corrected { background: var(--corrected); }
.bonus { background: var(--bonus); }
.r { color: var(--rejected); text-decoration: line-through; font-size: .85em; }
.mark { color: var(--soft); }
.tip { display: none; position: fixed; right: 1rem; top: 1rem; z-index: 1; width: 21rem;
  padding: .5rem .7rem; background: var(--tip); color: var(--ink); white-space: normal;
  border: 1px solid var(--line); border-radius: 6px; font: 13px/1.4 system-ui;
  box-shadow: 0 4px 14px #0003; text-decoration: none; }
.t:hover, .r:hover { outline: 1px solid var(--ink); }
.t:hover > .tip, .r:hover > .tip, .t:focus > .tip, .r:focus > .tip { display: block; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 .7rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.legend span { padding: .1em .4em; margin-right: .4em; }
#hide { margin-right: .4em; } body:has(#hide:checked) .r { display: none; }
"""


class _Node(NamedTuple):
    """A drafted node that the verdict looked at."""

    token: int
    p: float
    q: float
    draft_entropy: float
    residual_mass: float


class _Emitted(NamedTuple):
    """One emitted token, with the drafts that were tried at its place."""

    round: int
    is_first: bool
    origin: str
    p: float
    target_entropy: float
    node: _Node | None
    """The accepted draft."""
    rejected: list[_Node]


def page(
    results: Sequence[Result],
    tokenizer: Any,
    *,
    title: str = "",
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Returns an HTML document of traced results.

    Args:
      results: Of `SpeculativeDecoder.generate(..., trace=True)`.
      tokenizer: The target's.
      title: Heading.
      settings: What else to say of the run, by name.

    Raises:
      ValueError: A result has no trace.
    """
    title = title or "Speculative decoding, token by token"
    facts = " &middot; ".join(
        f"{escape(name)} {escape(str(value))}"
        for name, value in (settings or {}).items()
    )
    legend = "".join(
        f'<span class="t {name}">{name}</span>'
        for name in ("accepted", "corrected", "bonus")
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<h1>{escape(title)}</h1><p class="soft">{facts}</p>',
        f'<p class="legend">{legend}<span class="r">rejected</span>'
        '<label><input type="checkbox" id="hide">hide rejected drafts</label></p>',
        '<p class="soft">A bar opens each round. Point at a token for its decision: '
        "p is the target's policy, q the draft's.</p>",
        *(_section(result, tokenizer) for result in results),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _section(result: Result, tokenizer: Any) -> str:
    if result.trace is None:
        raise ValueError(
            f"result {result.index} has no trace; decode with trace=True to get one"
        )
    prompt = escape(result.prompt or decode(tokenizer, result.prompt_token_ids))
    tokens = "".join(_tokens(result, tokenizer))
    return (
        f"<h2>Prompt {result.index}</h2>"
        f'<p class="soft">{result.num_tokens} tokens, {result.rounds} rounds, mean '
        f"acceptance length {result.mean_acceptance_length:.2f}, "
        f"{result.num_accepted} of {result.num_drafted} drafted tokens accepted, ended "
        f"by {result.finish_reason}</p>"
        f'<div class="text"><span class="mark">{prompt}</span>{tokens}</div>'
    )


def _tokens(result: Result, tokenizer: Any) -> Iterator[str]:
    """Yields the markup of each emitted token and of the drafts rejected before it."""
    follower = TextFollower(tokenizer)
    last = result.num_tokens - 1
    for at, emitted in enumerate(_emitted(result)):
        token = result.token_ids[at]
        follower.push(token)
        text = follower.finish() if at == last else follower.take()
        if not text and at == last and result.finish_reason == "eos":
            text = _name(tokenizer, token)
        opening = " first" if emitted.is_first else ""
        for node in emitted.rejected:
            body = _visible(_name(tokenizer, node.token))
            yield _span("r" + opening, body, _refused(node))
            opening = ""
        kind = f"t {emitted.origin}{opening}"
        rows = {"token": f"{token} {_visible(_name(tokenizer, token))}"}
        rows |= _decision(emitted, result.logprobs[at])
        yield _span(kind, _marked(text), rows)


def _emitted(result: Result) -> Iterator[_Emitted]:
    """Yields what the trace says of each token of the text."""
    assert result.trace is not None
    at = 0
    for number in range(len(result.trace.start)):
        own: Trace = jax.tree.map(lambda leaf, n=number: leaf[n], result.trace)
        depth = _depths(own.parents.tolist())
        for place in range(int(own.num_emitted)):
            if at == result.num_tokens:
                return  # a stop string cut the round
            here = [i for i in range(len(depth)) if own.judged[i] and depth[i] == place]
            kept = [_node(own, i) for i in here if own.accepted[i]]
            yield _Emitted(
                round=number + 1,
                is_first=place == 0,
                origin=result.origins[at],
                p=kept[0].p if kept else math.exp(own.next_log_prob),
                target_entropy=float(own.target_entropy[place]),
                node=kept[0] if kept else None,
                rejected=[_node(own, i) for i in here if not own.accepted[i]],
            )
            at += 1


def _depths(parents: list[int]) -> list[int]:
    """Returns how many nodes precede each one on its path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _node(own: Trace, i: int) -> _Node:
    return _Node(
        token=int(own.tokens[i]),
        p=math.exp(own.target_log_prob[i]),
        q=math.exp(own.draft_log_prob[i]),
        draft_entropy=float(own.draft_entropy[i]),
        residual_mass=float(own.residual_mass[i]),
    )


def _decision(emitted: _Emitted, log_prob: float) -> dict[str, str]:
    """Returns what is said of an emitted token."""
    node, rows = emitted.node, {"round": str(emitted.round)}
    if node is not None:
        rows["decision"] = "drafted and accepted"
        rows |= _laws(node)
    else:
        rows["decision"] = (
            "the draft was rejected, this was drawn in its place"
            if emitted.rejected
            else "drawn from the target: nothing was drafted here"
        )
        rows["p(token)"] = _number(emitted.p)
    rows["target entropy"] = f"{emitted.target_entropy:.3f} nats"
    rows["raw model"] = f"{_number(math.exp(log_prob))} ({log_prob:.3f} nats)"
    return rows


def _refused(node: _Node) -> dict[str, str]:
    return {"decision": "drafted and rejected"} | _laws(node)


def _laws(node: _Node) -> dict[str, str]:
    return {
        "p(token)": _number(node.p),
        "q(token)": _number(node.q),
        "min(1, p/q)": _number(min(1.0, node.p / node.q) if node.q > 0 else 0.0),
        "residual mass": _number(node.residual_mass),
        "draft entropy": f"{node.draft_entropy:.3f} nats",
    }


def _number(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 or value == 0 else f"{value:.1e}"


def _span(kind: str, body: str, rows: Mapping[str, str]) -> str:
    tip = "".join(f"<dt>{escape(k)}</dt><dd>{v}</dd>" for k, v in rows.items())
    return (
        f'<span class="{kind}" tabindex="0">{body}'
        f'<span class="tip"><dl>{tip}</dl></span></span>'
    )


def _name(tokenizer: Any, token: int) -> str:
    """Returns a token's own text, special ones included; its id without a tokenizer."""
    if tokenizer is None:
        return f"[{token}]"
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return text or f"[{token}]"


def _visible(text: str) -> str:
    """Returns a token's text with its blanks to be seen."""
    for blank, sign in ((" ", "␣"), ("\n", "⏎"), ("\t", "⇥")):
        text = text.replace(blank, sign)
    return escape(text)


def _marked(text: str) -> str:
    """Returns text in which a line's end can be pointed at."""
    return escape(text).replace("\n", '<span class="mark">⏎</span>\n')
