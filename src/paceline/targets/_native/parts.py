"""Recognise a Llama-shaped model and point at its weights, or say in a few words why it is not one.

It compiles and computes nothing.  Weights stay where the model keeps them; `Parts.is_current` tells whether anything
was moved, replaced, wrapped or hooked since.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from paceline.native import library
from paceline.native.build import Unavailable
from paceline.targets import _transformers as tf

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SILU = ("SiLU", "SiLUActivation")  # torch's, transformers' own
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary types whose angles change with the longest position so far
PRODUCTS = {
    "q": ("self_attn", "q_proj"), "k": ("self_attn", "k_proj"), "v": ("self_attn", "v_proj"),
    "o": ("self_attn", "o_proj"), "gate": ("mlp", "gate_proj"), "up": ("mlp", "up_proj"), "down": ("mlp", "down_proj"),
}  # fmt: skip
HEAD_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}
# Hooks from there only look: a target's taps, and what transformers leaves behind after output_hidden_states=True.
LOOKING_HOOKS = ("paceline.targets.generic", "transformers.utils.output_capturing")


class Parts:
    """Addresses of a model's weights, in the form the library takes.  Raises Unavailable with the reason."""

    def __init__(self, model: Any) -> None:
        self._modules: list[tuple[dict[str, Any], str, nn.Module]] = []  # (where it hangs, name, what hung there)
        self._weights: list[tuple[dict[str, Any], str]] = []
        self._hooks: list[dict[int, Any]] = []
        self._own: list[dict[str, Any]] = []  # attributes of every module that the native forward stands for
        self._decoder = model.get_decoder()
        config = tf.text_config(model)
        decoder = self._decoder
        _refuse_family(model, config)
        self.rotary = decoder.rotary_emb
        for name, module in (("model", model), ("decoder", decoder)):
            self._watch(module, name)
        self._hang(decoder, "rotary_emb")
        self._hang(decoder, "layers")
        self._hang(decoder, "norm")
        self._hang(decoder, "embed_tokens")
        self._hang(model, "lm_head")
        layers: Any = tf.decoder_layers(model)
        windows = _windows(model, len(layers))
        self._keep = (library.Layer * len(layers))(
            *(self._layer(layers, index, window) for index, window in enumerate(windows))
        )
        attention = layers[0].self_attn
        self.layers, self.hidden, self.width = len(layers), int(config.hidden_size), int(attention.head_dim)
        self.heads, self.key_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.vocab = int(model.lm_head.out_features)
        self.struct = library.Model(
            layers=self.layers, hidden=self.hidden, heads=self.heads, key_heads=self.key_heads, width=self.width,
            inner=int(config.intermediate_size), vocab=self.vocab, words=self.vocab,
            eps=float(decoder.norm.variance_epsilon), scale=float(attention.scaling),
            embed=self._weight(decoder.embed_tokens, (self.vocab, self.hidden)),
            norm=self._weight(decoder.norm, (self.hidden,)), head=self._matrix(model.lm_head),
            layer=ctypes.addressof(self._keep),
        )  # fmt: skip
        self._refuse_sizes()
        self._addresses = self._read_addresses()
        self._settings = self._read_settings()
        if len({layer.self_attn.scaling for layer in layers}) != 1:
            raise Unavailable("its layers scale their scores differently")

    def is_current(self) -> bool:
        """Whether modules, settings, weights and hooks are those that were found.

        A change of a weight's values in place is no change: they are read where they lie.
        """
        return (
            all(place.get(name) is module for place, name, module in self._modules)
            and not any("forward" in attributes for attributes in self._own)
            and self._read_addresses() == self._addresses
            and self._read_settings() == self._settings
            and not any(_foreign(hooks) for hooks in self._hooks if hooks)
        )

    def _layer(self, layers: Any, index: int, window: int) -> library.Layer:
        layer = layers[index]
        self._hang(layers, str(index))
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            self._hang(layer, name)
        self._hang(layer.mlp, "act_fn")
        activation = type(layer.mlp.act_fn).__name__
        if activation not in SILU:
            raise Unavailable(f"its activation is {activation}, not silu")
        fields: dict[str, Any] = {"window": window}
        for field, (block, name) in PRODUCTS.items():
            self._hang(getattr(layer, block), name)
            fields[field] = self._matrix(getattr(getattr(layer, block), name))
        hidden = layer.self_attn.q_proj.in_features
        fields["norm1"] = self._weight(layer.input_layernorm, (hidden,))
        fields["norm2"] = self._weight(layer.post_attention_layernorm, (hidden,))
        for field, name in HEAD_NORMS.items():
            norm = getattr(layer.self_attn, name, None)
            if norm is not None:
                self._hang(layer.self_attn, name)
                fields[field] = self._weight(norm, (layer.self_attn.head_dim,))
        return library.Layer(**fields)

    def _hang(self, parent: Any, name: str) -> None:
        module: Any = parent._modules[name]
        self._watch(module, name)
        self._modules.append((parent._modules, name, module))

    def _watch(self, module: Any, name: str) -> None:
        if "forward" in vars(module):
            raise Unavailable(f"the forward of its '{name}' was replaced")
        self._own.append(vars(module))
        found: list[dict[int, Any]] = [module._forward_hooks, module._forward_pre_hooks]
        if any(_foreign(hooks) for hooks in found):
            raise Unavailable(f"its '{name}' has a hook")
        self._hooks += found

    def _matrix(self, linear: Any) -> library.Matrix:
        kind: type = type(linear)
        if kind is not nn.Linear:
            raise Unavailable(f"a {kind.__name__} stands where a plain Linear was expected")
        shape = (linear.out_features, linear.in_features)
        bias = None if linear.bias is None else self._weight(linear, shape[:1], name="bias")
        return library.Matrix(self._weight(linear, shape), bias)

    def _weight(self, module: Any, shape: tuple[int, ...], *, name: str = "weight") -> int:
        weight: Tensor = module._parameters[name]
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise Unavailable(f"its weights are {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
        if type(weight) not in (nn.Parameter, Tensor) or not weight.is_contiguous() or tuple(weight.shape) != shape:
            raise Unavailable(f"a weight is {type(weight).__name__} of {tuple(weight.shape)}, expected plain {shape}")
        self._weights.append((module._parameters, name))
        return weight.data_ptr()

    def _read_settings(self) -> list[Any]:
        """What the native forward has read and a module does not keep as a weight: scales, eps, rotary frequencies."""
        attention = [layer.self_attn.scaling for layer in self._decoder.layers]
        frequencies = self.rotary.inv_freq
        return [*attention, self._decoder.norm.variance_epsilon, frequencies.data_ptr(), frequencies._version]

    def _read_addresses(self) -> list[int]:
        return [parameters[name].data_ptr() for parameters, name in self._weights]

    def _refuse_sizes(self) -> None:
        sizes = {"head width": self.width, "hidden size": self.hidden, "inner size": int(self.struct.inner)}
        for name, size in sizes.items():
            if size % 16:
                raise Unavailable(f"its {name} of {size} is not a multiple of 16")
        if self.heads % self.key_heads:
            raise Unavailable(f"its {self.heads} heads do not share {self.key_heads} key heads evenly")


def _refuse_family(model: Any, config: Any) -> None:
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        known = ", ".join(family.removesuffix("ForCausalLM") for family in FAMILIES)
        raise Unavailable(f"the native forward knows {known}, not {name}")
    if config.hidden_act != "silu":
        raise Unavailable(f"its activation is {config.hidden_act}, not silu")
    if tf.head_scale(model) != (1.0, None):
        raise Unavailable("its logits are scaled or capped")
    decoder = model.get_decoder()
    kind = getattr(decoder.rotary_emb, "rope_type", "default")
    if kind in LENGTH_DEPENDENT:
        raise Unavailable(f"its rotary type '{kind}' depends on the length")
    norms = {module.variance_epsilon for module in model.modules() if hasattr(module, "variance_epsilon")}
    if len(norms) != 1:
        raise Unavailable("its norms differ in eps")


def _windows(model: Any, count: int) -> list[int]:
    kinds = tf.mask_kinds(model)
    if isinstance(kinds, dict):
        return [kinds[kind] or 0 for kind in tf.text_config(model).layer_types]
    return [kinds or 0] * count


def _foreign(hooks: dict[int, Any]) -> bool:
    """Whether hooks are registered that do more than look: the native forward would not call them."""
    return any(getattr(hook, "__module__", "") not in LOOKING_HOOKS for hook in hooks.values())
