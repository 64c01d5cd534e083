"""Every decoder-only text model that transformers can load, as a target: prefill, score a tree, commit, roll back.

It forks no modelling file: an explicit 4-D mask, explicit positions and a gather on the cache are enough.  It knows
neither drafts nor decoding options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import ConfigError, TargetError
from paceline.native.library import Library
from paceline.ops import masks
from paceline.records import Scores
from paceline.targets import _native
from paceline.targets import _transformers as tf
from paceline.targets._cache import TargetCache
from paceline.targets._trial import refuse_inexact

NATIVE_ROWS = 256  # rows of a call (batch times nodes) up to which the native forward is the faster one; measured
VIEW_STEP = 64  # slots shown to attention grow in steps, so that few shapes occur and short contexts stay cheap


class Target:
    """A frozen causal language model that scores proposals.

    model: a transformers causal LM in eval mode.  tokenizer: optional, for text in and out.
    taps: 0-based decoder layers whose outputs `prefill` and `score` return, side by side; `num_layers` stands for the
    last hidden state, after the final norm.
    compile: "auto" scores with the native forward where model and machine allow it (made once, at the first call, and
    compared with eager before it is used; if not, one line in the log says why); "off" always with torch eager.  A
    bfloat16 model on the processor stays eager, but attends natively where every row scores one token.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        taps: Sequence[int] = (),
        name: str = "",
        compile: Literal["auto", "off"] = "auto",
    ) -> None:
        if compile not in ("auto", "off"):
            raise ConfigError(f"compile is {compile!r}; expected 'auto' or 'off'")
        tf.refuse_headless(model)
        tf.refuse_recurrent(model)
        tf.refuse_own_masks(model)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name or type(model).__name__
        config = tf.text_config(model)
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.learned_positions: int | None = tf.learned_positions(model)
        self._layers = tf.decoder_layers(model)
        self._mask_kinds = tf.mask_kinds(model)
        self._cache_argument = tf.cache_argument(model)
        self._hooks: list[Any] = []
        self._is_eager = compile == "off"
        self._start_afresh()
        self.taps: tuple[int, ...] = ()
        refuse_inexact(self)
        self.set_taps(taps)

    def _start_afresh(self) -> None:
        """Nothing is recorded and nothing native is chosen: what a process makes for itself, and no copy inherits."""
        self._taping = _Taping()
        self._native: _native.NativeForward | None = None
        self._rows: _native.RowAttention | None = None
        self._is_chosen = self._is_rows_chosen = self._is_eager
        # A thread that needs the choice another is making waits for it, or its first steps would be torch's.
        self._choosing = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_taping", "_native", "_rows", "_is_chosen", "_is_rows_chosen", "_choosing")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_afresh()
        self.set_taps(self.taps)  # the copied hooks record for the original

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie; inputs are put there."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def engine(self) -> Literal["native", "eager"]:
        """What scores proposals of up to NATIVE_ROWS rows; asking makes the choice."""
        with self._choosing:
            if not self._is_chosen:
                self._is_chosen = True
                self._native = _native.choose(self.model, eager=self._score_eager, name=self.name)
        return "eager" if self._native is None else "native"

    @property
    def library(self) -> Library | None:
        """The compiled forward that small calls run on, which a draft may share; None on torch eager."""
        return self._native.library if self.engine == "native" and self._native is not None else None

    @property
    def embed_weight(self) -> Tensor:
        """[V, H] rows that the embedding looks up; some families scale them before the first layer."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[V, H] weight of the output head."""
        return self.model.get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        """[V] bias of the output head, where the model has one."""
        return self.model.get_output_embeddings().bias

    @property
    def head_scale(self) -> tuple[float, float | None]:
        """(factor, cap) that the model applies behind its head: logits * factor, then cap * tanh(logits / cap)."""
        return tf.head_scale(self.model)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings as the model feeds them to its first layer: [...] int64 -> [..., H]."""
        return self.model.get_input_embeddings()(ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of final-normed hidden states: [..., H] -> [..., V]."""
        factor, cap = self.head_scale
        logits = self.model.get_output_embeddings()(hidden) * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def set_taps(self, taps: Sequence[int]) -> None:
        """Choose the decoder layers whose outputs are returned; `num_layers` is the final norm's."""
        bad = [tap for tap in taps if not 0 <= tap <= self.num_layers]
        if bad:
            raise TargetError(
                f"taps {bad}: {self.name} has decoder layers 0 to {self.num_layers - 1}, and {self.num_layers} for the "
                "last hidden state"
            )
        for hook in self._hooks:
            hook.remove()
        self.taps = tuple(taps)
        places = [*self._layers, tf.decoder(self.model)]
        self._hooks = [places[tap].register_forward_hook(self._recorder(tap)) for tap in sorted(set(taps))]

    def new_cache(self, batch: int, *, capacity: int) -> TargetCache:
        """An empty cache for `batch` sequences of up to `capacity` slots (committed tokens plus one proposal)."""
        return TargetCache(batch, capacity=capacity)

    def prefill(self, cache: TargetCache, prompts: Sequence[Tensor]) -> Scores:
        """Run prompts of different lengths (each [T_b] int64) behind what the rows hold, and commit them.

        Returns logits [B, 1, V] after each row's last token, and taps [B, T_max, K*H] (rows behind T_b are padding).
        """
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        wanted, where = torch.unique(last, return_inverse=True)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(prompts), -1, -1)
        depths = torch.arange(longest).expand(len(prompts), -1)
        scores = self.score(cache, tokens, mask=causal, depths=depths, logit_rows=wanted)
        cache.commit([range(len(prompt)) for prompt in prompts])
        rows = torch.arange(len(prompts), device=scores.logits.device)
        return Scores(scores.logits[rows, where.to(rows.device)][:, None], scores.taps)

    @torch.no_grad()
    def score(
        self, cache: TargetCache, tokens: Tensor, *, mask: Tensor, depths: Tensor, logit_rows: Tensor | None = None
    ) -> Scores:
        """Score every node of a proposal in one call; nothing is committed.

        tokens: [B, N] int64.  mask: [B, N, N] bool, ancestors and self.  depths: [B, N] int64, 0 at the root.
        logit_rows: [M] int64, nodes whose logits are wanted (default all).  Returns logits [B, N or M, V], taps.
        """
        end = max(cache.lengths) + tokens.shape[1]
        if end > cache.capacity:
            raise TargetError(f"{end} cache slots are needed, {cache.capacity} were reserved")
        if tokens.numel() <= NATIVE_ROWS and self.engine == "native" and self._native is not None:
            try:
                return self._native.score(
                    cache, tokens, mask=mask, depths=depths, logit_rows=logit_rows, taps=self.taps
                )
            except _native.Unavailable as reason:  # the model was changed since
                self._native = None
                _native.say_eager(self.name, reason)
        if tokens.shape[1] == 1 and self._attends_rows() and bool(mask.all()):
            try:
                return self._score_eager(
                    cache, tokens, mask=mask, depths=depths, logit_rows=logit_rows, rows=self._rows
                )
            except _native.Unavailable as reason:  # the model was changed since
                self._rows = None
                _native.say_torch(self.name, reason)
        return self._score_eager(cache, tokens, mask=mask, depths=depths, logit_rows=logit_rows)

    def _attends_rows(self) -> bool:
        """Whether a step of one token per row has native attention; asking makes the choice."""
        with self._choosing:
            if not self._is_rows_chosen and self.dtype == torch.bfloat16 and self.device.type == "cpu":
                self._is_rows_chosen = True
                self._rows = _native.choose_rows(self.model, score=self._score_eager, name=self.name)
        return self._rows is not None and tf.attends_plainly(self.model)

    @torch.no_grad()
    def _score_eager(
        self,
        cache: TargetCache,
        tokens: Tensor,
        *,
        mask: Tensor,
        depths: Tensor,
        logit_rows: Tensor | None = None,
        rows: _native.RowAttention | None = None,
    ) -> Scores:
        """`score` by transformers' own modules: the slow twin of the native forward.

        rows: what the layers attend by where every row scores one token, instead of by torch.
        """
        device, count = self.device, tokens.shape[1]
        lengths = torch.tensor(cache.lengths)
        end = max(cache.lengths) + count
        view = min(cache.capacity, -(-end // VIEW_STEP) * VIEW_STEP)
        start = cache.lengths[0] if len(set(cache.lengths)) == 1 else None
        slots = lengths[:, None] + torch.arange(count)
        positions = lengths[:, None] + depths
        cache.place(slots.to(device), view=view, start=start)
        if rows is not None:
            step = rows.step(lengths + 1)
            try:
                cache.show_keys = step.show
                scores = self._forward(cache, tokens.to(device), positions.to(device), None, logit_rows)
            finally:
                cache.show_keys = None
            step.refuse_missed()
            return scores
        mask_4d = self._masks(lengths, mask, positions, slots, view)
        return self._forward(cache, tokens.to(device), positions.to(device), mask_4d, logit_rows)

    @torch.no_grad()
    def full_forward(self, tokens: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None) -> Scores:
        """One forward without a cache, for capture and training: taps [B, T, K*H] and last hidden [B, T, H]; no logits.

        tokens: [B, T] int64.  mask: [B, 1, T, T] bool, or None for causal.  positions: [B, T] or None for 0..T-1.
        """
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if positions is not None:
            arguments["position_ids"] = positions
        if mask is not None:
            arguments["attention_mask"] = masks.additive_mask(mask, dtype=self.dtype)
        with self._record() as captured:
            hidden = tf.decoder(self.model)(**arguments).last_hidden_state
        return Scores(hidden.new_zeros(0), self._side_by_side(captured), hidden)

    def _forward(
        self, cache: TargetCache, tokens: Tensor, positions: Tensor, mask: Any, logit_rows: Tensor | None
    ) -> Scores:
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": mask,
            self._cache_argument: cache,
            "use_cache": True,
        }
        if logit_rows is not None:
            arguments["logits_to_keep"] = logit_rows.to(tokens.device)
        with self._record() as captured:
            logits = self.model(**arguments).logits
        return Scores(logits, self._side_by_side(captured))

    def _masks(self, lengths: Tensor, tree: Tensor, positions: Tensor, slots: Tensor, view: int) -> Any:
        known = masks.prefix_slots(lengths, capacity=view)

        def build(window: int | None) -> Tensor:
            visible = masks.prefix_tree_mask(
                known, tree_mask=tree, tree_slots=slots, tree_positions=positions, window=window
            )
            return masks.additive_mask(visible.to(self.device), dtype=self.dtype)

        if isinstance(self._mask_kinds, dict):
            return {kind: build(window) for kind, window in self._mask_kinds.items()}
        return build(self._mask_kinds)

    def _recorder(self, tap: int) -> Callable[..., None]:
        def record(_module: Any, _inputs: Any, output: Any) -> None:
            if self._taping.captured is not None:
                self._taping.captured[tap] = tf.layer_output(output)

        return record

    @contextmanager
    def _record(self) -> Generator[dict[int, Tensor], None, None]:
        """Hooks record only while one of our own calls runs: the model may serve others in between."""
        captured: dict[int, Tensor] = {}
        before = self._taping.captured
        try:
            self._taping.captured = captured
            yield captured
        finally:
            self._taping.captured = before

    def _side_by_side(self, captured: dict[int, Tensor]) -> Tensor | None:
        return torch.cat([captured[tap] for tap in self.taps], dim=-1) if self.taps else None


class _Taping(threading.local):
    """Where hooks put what the layers return, by tap; each thread records its own calls."""

    captured: dict[int, Tensor] | None = None


PLUGIN = Target
