"""Text in, text out: `SpeculativeDecoder` around the compiled loop.

A request's tokens depend on its prompt, its settings and its seed only: it gives one
text alone, in any batch, streamed or not. Programs are compiled once a bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specdec_jax.base import AcceptanceRule, Drafter, LanguageModel, Params
from specdec_jax.drafters import NoDrafter
from specdec_jax.sampling import Sampling
from specdec_jax.sharding import Placement, make_mesh
from specdec_jax.text import packing, requests
from specdec_jax.text.following import Piece, collect, texts
from specdec_jax.text.layouts import lay_out
from specdec_jax.text.packing import Plan
from specdec_jax.text.pairing import find_rule, load_pair
from specdec_jax.text.requests import Prompt
from specdec_jax.text.results import Result
from specdec_jax.text.running import Engine, compile_programs, pieces

ROUNDS_PER_LOOK = 4
"""Rounds between two looks of the host at stop strings; no result depends on it."""

_GREEDY = Sampling()


class SpeculativeDecoder:
    """A target, a drafter and a rule that decode text.

    `from_pretrained` makes one from names.

    Args:
      target: The model whose law the text has.
      params: Variables of the target and of the drafter.
      tokenizer: A transformers tokenizer; None leaves prompts and results as ids.
      drafter: Where proposals come from; None is plain decoding.
      rule: A name of `acceptance.RULES` or `LOSSY`, or a rule object; None is rejection
        for chains, multi_draft or coupled for trees.
      allow_lossy: Permits rules that change the text's distribution.
      eos_token_ids: Ids that end a text unless a call says otherwise.
      bos_token_id: What an empty prompt begins with.
      max_positions: The most tokens, prompt included, that the target is made for.
      mesh: What to run on, as `from_pretrained` takes it; the variables are put there.
      draft_sharding: As `from_pretrained` takes it.

    Raises:
      ValueError: There is no such rule or mesh, or the rule is lossy.
    """

    def __init__(
        self,
        target: LanguageModel,
        params: Params,
        tokenizer: Any = None,
        drafter: Drafter | None = None,
        *,
        rule: str | AcceptanceRule | None = None,
        allow_lossy: bool = False,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        max_positions: int | None = None,
        mesh: Any = None,
        draft_sharding: str = "target",
    ):
        drafter = NoDrafter() if drafter is None else drafter
        placement = _placement(mesh, draft_sharding)
        if placement is not None:
            params = placement.place_params(params, target, drafter)
        found = find_rule(rule, drafter, allow_lossy=allow_lossy)
        self.engine = Engine(params, target, drafter, found, tokenizer, placement)
        self._lies_well = jax.default_backend() != "tpu"
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.max_positions = max_positions

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.engine.tokenizer

    @property
    def drafter(self) -> Drafter:
        """Where proposals come from."""
        return self.engine.drafter

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: Any = None,
        *,
        compose: str | None = None,
        num_draft_tokens: int | Sequence[int] = 4,
        branching: Sequence[int] | None = None,
        rule: str | AcceptanceRule | None = None,
        allow_lossy: bool = False,
        dtype: Any = "float32",
        mesh: Any = None,
        draft_num_layers: int | None = None,
        draft_sharding: str = "target",
    ) -> "SpeculativeDecoder":
        """Loads a target and what drafts for it.

        Args:
          target: Name, folder or file of a checkpoint.
          draft: The same; "ngram" (prompt lookup) or another name of
            `makers.DRAFTS`; None or "none" (plain decoding); or a drafter that has no
            variables and its own K. Options may follow a name, as in "name:layers=8",
            see `free_drafts`. A list of drafts needs `compose`.
          compose: How several drafts work together: "staged", "nested" or "tree", see
            `drafters.Staged`, `Nested` and `JoinedTrees`.
          num_draft_tokens: Tokens drafted a round, K; 0 is plain decoding. Staged
            drafts share it evenly; of nested ones the outermost drafts K and each one
            inside a token less. A list has one number a draft.
          branching: Drafts a tree instead of a chain of K: the children of each node,
            level by level, as (3, 2, 1); or the parent of each node, breadth first, as
            (-1, -1, 0). With compose "tree" each draft grows one.
          rule: "rejection", "block", "coupled", "multi_draft" or a rule object. None is
            rejection for chains and multi_draft for trees.
          allow_lossy: Permits rules that change the text's distribution, such as
            "lenience" and "typical".
          dtype: Of the weights and the arithmetic of target and draft.
          mesh: Devices to run on: "data=2,model=4", a mapping of these sizes, or a
            `jax.sharding.Mesh` with the axes `data` and `model`. Rows of a batch are
            split over the first, weights over the second; see `sharding`. None leaves
            it to JAX, which takes its first device.
          draft_num_layers: Keeps that many layers of the draft. With the target's own
            name as `draft` this makes a drafter without any training.
          draft_sharding: How the draft lies on the mesh: like the "target", or split
            over "data" alone, with all of its weights on every device.

        Raises:
          ValueError: An argument is out of range, or target and draft do not fit.
          FileNotFoundError: There is no such checkpoint.
        """
        find_rule(rule, allow_lossy=allow_lossy)  # before anything is loaded
        placement = _placement(mesh, draft_sharding)
        loaded, drafter, variables = load_pair(
            target,
            draft,
            num_draft_tokens,
            dtype,
            draft_num_layers,
            placement,
            compose,
            branching,
            rule,
        )
        return cls(
            loaded.model,
            Params(loaded.params, variables),
            loaded.tokenizer,
            drafter,
            rule=rule,
            allow_lossy=allow_lossy,
            eos_token_ids=loaded.eos_token_ids,
            bos_token_id=loaded.bos_token_id,
            max_positions=loaded.max_positions,
            mesh=mesh,
            draft_sharding=draft_sharding,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling = _GREEDY,
        draft_sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        eos_token_id: int | Sequence[int] | None = None,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        trace: bool = False,
    ) -> list[Result]:
        """Decodes all prompts as one batch.

        Args:
          prompts: Text, lists of token ids, or one of either.
          max_new_tokens: Budget, at least 1; one for all or one a prompt.
          sampling: Settings of the target's policy, scalars or one value a prompt;
            greedy by default.
          draft_sampling: The draft's own policy; None uses the target's. It changes
            how much is accepted, never the law of the text.
          seed: An int: request i uses the key `fold_in(key(seed), i)`. A list with one
            int a prompt: request i uses `fold_in(key(seed[i]), 0)`, which is what the
            prompt uses alone with `seed=seed[i]`. From 0 to 2^32 - 1.
          eos_token_id: None takes the checkpoint's; an id or a list replaces them; ()
            means none, and only the budget ends a text.
          min_new_tokens: EOS ids are impossible before that many new tokens.
          stop: Strings that end a text. They are looked for in new text only, are no
            part of it, and may begin and end anywhere in a token.
          trace: Whether the results have a `trace` of their rounds; see `trace.Trace`.

        Returns:
          One result a prompt, in order.

        Raises:
          ValueError: Something asked for is impossible; nothing was decoded.
          NonFiniteLogitsError: The target's logits were not finite. It is a
            FloatingPointError, and all results are in its `results`.
        """
        plan = self.plan(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            draft_sampling=draft_sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            min_new_tokens=min_new_tokens,
            stop=stop,
        )
        looks = ROUNDS_PER_LOOK if plan.stop else None
        return collect(self.run(plan, rounds_per_look=looks, trace=trace))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = _GREEDY,
        draft_sampling: Sampling | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        rounds_per_look: int = 1,
    ) -> Iterator[str]:
        """Decodes one prompt and yields its text in pieces of whole characters.

        It takes what `generate` takes, and gives the same text for every
        `rounds_per_look`: more rounds on the device between two looks of the host make
        larger pieces. For origins, results or several prompts use `plan` and `run`.

        Raises:
          ValueError: Something asked for is impossible; raised before the first piece.
          NonFiniteLogitsError: After the last piece.
        """
        one = prompt if isinstance(prompt, str) else requests.as_token_ids(prompt)
        plan = self.plan(
            [one],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            draft_sampling=draft_sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            min_new_tokens=min_new_tokens,
            stop=stop,
        )
        return texts(self.run(plan, rounds_per_look=rounds_per_look))

    def plan(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling = _GREEDY,
        draft_sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        eos_token_id: int | Sequence[int] | None = None,
        min_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        indices: Sequence[int] | None = None,
    ) -> Plan:
        """Tokenises and checks requests, for `run` and `compile`; decodes nothing.

        It takes what `generate` takes. `indices` are the prompts' places in a larger
        data set, the i in "request i"; 0, 1, 2 and so on by default.

        Raises:
          ValueError: Something asked for is impossible.
        """
        return packing.make_plan(
            requests.as_prompts(prompts),
            encode=self.encode,
            tokenizer=self.tokenizer,
            vocab_size=self.engine.target.vocab_size,
            default_eos=self.eos_token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            draft_sampling=draft_sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            min_new_tokens=min_new_tokens,
            stop=stop,
            indices=indices,
        )

    def run(
        self,
        plan: Plan,
        *,
        batch_size: int | None = None,
        rounds_per_look: int | None = ROUNDS_PER_LOOK,
        trace: bool = False,
    ) -> Iterator[Piece]:
        """Decodes planned requests and yields pieces of their texts as they come.

        Args:
          plan: The requests.
          batch_size: Rows of a batch at the most; None makes one batch of all.
          rounds_per_look: Rounds on the device between two looks of the host. None
            runs each batch to its end in one go, with one piece a request.
          trace: Whether the results have a `trace` of their rounds.

        Yields:
          Pieces; the last one of each request has its result. Non-finite logits end a
          request with the finish reason "error"; nothing is raised.

        Raises:
          ValueError: A size is below 1, or stop strings come without looks.
        """
        if batch_size is None:
            batch_size = max(len(plan.requests), 1)
        self._lay_out(plan, batch_size)
        return pieces(
            self.engine,
            plan,
            batch_size=batch_size,
            rounds_per_look=rounds_per_look,
            traced=trace,
        )

    def compile(
        self, plan: Plan, *, batch_size: int | None = None, trace: bool = False
    ) -> None:
        """Compiles the programs that `run` needs; runs nothing."""
        size = batch_size or max(len(plan.requests), 1)
        self._lay_out(plan, size)
        compile_programs(self.engine, plan, batch_size=size, traced=trace)

    def _lay_out(self, plan: Plan, batch_size: int) -> None:
        """Lets a TPU's compiler choose the layouts of the weights, once."""
        if plan.requests and not self._lies_well:
            self.engine = lay_out(self.engine, plan, batch_size=batch_size)
            self._lies_well = True

    def encode(self, prompt: Prompt, max_new_tokens: int = 1) -> list[int]:
        """Returns the tokens of a prompt, as the target will read them.

        Raises:
          ValueError: It is empty and there is no BOS, has an unknown id, or does not
            fit into the target's positions with `max_new_tokens` new ones.
        """
        tokens = requests.encode(prompt, self.tokenizer, self.bos_token_id)
        vocab_size = self.engine.target.vocab_size
        requests.check_fits(tokens, max_new_tokens, vocab_size, self.max_positions)
        return tokens

    def chat_prompt(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the tokens of a conversation, up to where the answer begins.

        The tokenizer's template writes all special tokens; none is added to it.

        Args:
          messages: `{"role": ..., "content": ...}` each, or the text of one user turn.

        Raises:
          ValueError: The checkpoint has no chat template.
        """
        return requests.chat_tokens(messages, self.tokenizer)


def _placement(mesh: Any, draft_sharding: str) -> Placement | None:
    return None if mesh is None else Placement(make_mesh(mesh), draft_sharding)
