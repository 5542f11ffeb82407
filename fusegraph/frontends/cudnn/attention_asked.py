"""Reads what a cuDNN attention node asks for, in terms of the op table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

from fusegraph.dtypes import bool_, float32, int32, int64
from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.ops import attention as ops
from fusegraph.ops import attention_paged as paged
from fusegraph.ops import random
from fusegraph.ops.base import TensorType

#: cuDNN's names of the page tables -> those of the op table.
_TABLES = dict(zip(("paged_attention_k_table", "paged_attention_v_table"), paged.TABLES))
_DROPOUT = ("dropout_0", "dropout_1", "dropout_2")
#: Ports that all attention nodes may have.
PORTS = ("bias", "seq_len_q", "seq_len_kv", "sink_token", "attn_scale", *_DROPOUT)
#: The same with those of forward nodes alone.
FORWARD = (*PORTS, "block_mask", *_TABLES)
#: Parameters that do not affect the result here: the choice of cuDNN's kernel, its rounding, the size of its memory.
_INDIFFERENT = (
    "implementation",
    "is_inference",
    "softmax_precision",
    "unfuse_fma",
    "generate_stats",
    "use_deterministic_algorithm",  # they always are
    "max_total_seq_len_q",
    "max_total_seq_len_kv",
)
PARAMS = (
    "attn_scale",
    "use_alibi_mask",
    "use_padding_mask",
    "use_causal_mask",
    "use_causal_mask_bottom_right",
    "sliding_window_length",
    "sliding_window",
    "diagonal_alignment",
    "diagonal_band_left_bound",
    "diagonal_band_right_bound",
    "left_bound",
    "right_bound",
    "paged_attention_max_seq_len_kv",
    "score_mod",
    "score_mod_bprop",
    "fn",
    "_dropout_n",
    *_DROPOUT,
    *_INDIFFERENT,
)
#: How many queries, and keys, a block of a block_mask has.
_BLOCK = 128


@dataclass(frozen=True)
class Asked:
    """What a node asks for.

    operands  by their names in the op table; k and v have the same number of heads.
    heads     how many heads cuDNN's k and v have.
    scoring   attributes of `ops.attention.SCORES`; attn_scale may be a tensor.
    longest   the length of paged keys; None if they are not paged.
    dropout   (probability, seed, offset), (mask, scale), (mask, scale, its inverse), or ().
    modify    a function of the scaled scores that replaces them, or None.
    """

    operands: dict[str, Any]
    heads: tuple[int, int]
    scoring: dict[str, Any]
    longest: int | None
    dropout: tuple[Any, ...]
    modify: Callable[[Tensor], Tensor] | None

    @property
    def plain(self) -> bool:
        """Whether one op of the table does all of it."""
        numbers = not isinstance(self.scoring["attn_scale"], Tensor)
        return numbers and self.modify is None and (not self.dropout or self.probability is not None)

    @property
    def probability(self) -> float | None:
        """The probability of dropout by random numbers; None for others."""
        return self.dropout[0] if self.dropout and not isinstance(self.dropout[0], Tensor) else None

    @property
    def given(self) -> dict[str, Any]:
        """The optional operands that have an effect, by name."""
        rest = {key: t for key, t in self.operands.items() if key in ops.NEUTRAL and key not in ops.NUMBERS}
        return ops.present(list(rest.values()), list(rest))

    def keep(self, reading: Reading, p: Tensor) -> Tensor:
        """Returns a mask of the probabilities that dropout by random numbers keeps."""
        probability, seed, offset = self.dropout
        kept: Tensor = random.kept(reading.write, p, seed, offset, probability)
        return kept

    def factors(self, reading: Reading) -> dict[str, Any]:
        """Returns ``scoring`` as keywords of `ops.attention.scored`; a scale that is a tensor is cast to float32."""
        scale = self.scoring["attn_scale"]
        return {**self.scoring, "attn_scale": reading.cast(scale, float32) if isinstance(scale, Tensor) else scale}

    def dropped(self, reading: Reading, p: Tensor) -> Tensor:
        """Applies dropout to probabilities, or to their gradients."""
        if not self.dropout:
            return p
        if self.probability is not None:
            dropped: Tensor = random.drop(reading.write, p, self.keep(reading, p), self.probability)
            return dropped
        for factor in self.dropout[:2]:
            p = reading.write("mul", "", p, reading.cast(_headed(reading, factor, p.shape), p.dtype))
        return p


def asked_of(reading: Reading, node: Any, ports: tuple[str, ...] = ()) -> Asked:
    """Reads what a node asks for; ``ports`` are its required operands besides q, k and v.

    Raises ShapeError, AttributeValueError and others for what `Graph.sdpa` would refuse.
    """
    given = node.params
    padded = bool(given.get("use_padding_mask"))
    taken = [key for key in ("bias", "sink_token") if key in node.inputs]
    taken += [key for key in ("seq_len_q", "seq_len_kv") if padded and key in node.inputs]
    operands = {key: reading.operand(node, key) for key in ("q", "k", "v", *ports, *taken)}
    for port, key in (("q", "seq_len_q"), ("k", "seq_len_kv")):
        if key not in operands and reading.taken(node.inputs[port]) in reading.graph.ragged:
            operands[key] = reading.lengths(node, port)
    operands |= {ours: reading.operand(node, key) for key, ours in _TABLES.items() if key in node.inputs}
    longest = given.get("paged_attention_max_seq_len_kv") if paged.TABLES[0] in operands else None
    function = given.get("score_mod") or given.get("fn")
    heads = operands["k"].shape[1], operands["v"].shape[1]
    for key, count in zip("kv", heads):
        if not count or operands["q"].shape[1] % count:
            raise ShapeError(f"{operands['q'].shape[1]} heads of q are not shared evenly by {count} of {key}")
    wanted = operands["q"].shape[1] if function else lcm(*heads)
    operands |= {key: repeated(reading, operands[key], wanted) for key in "kv"}
    if "block_mask" in node.inputs:
        keys = paged.sizes(tuple(operands[n].type for n in "qkv"), {n: t.type for n, t in operands.items()}, longest)
        bits = reading.operand(node, "block_mask")
        operands["mask"] = _block_mask(reading, bits, operands["q"].shape[2], keys[0][2])
    dropout = _dropout(reading, node)
    if dropout and not isinstance(dropout[0], Tensor):
        operands |= dict(zip(ops.NUMBERS, dropout[1:]))
    scale = reading.number(node, "attn_scale") if "attn_scale" in node.inputs else given.get("attn_scale")
    values = {
        **{key: value for key, value in ops.SCORES.items() if key != "use_causal_mask"},
        **band(given),
        "use_causal_mask": False,
        "use_alibi_mask": bool(given.get("use_alibi_mask")),
        "attn_scale": scale if isinstance(scale, Tensor) else 1.0 if scale is None else float(scale),
    }
    _check(operands, values, longest)
    modify = None if function is None else (lambda scores: reading.modified(function, scores))
    return Asked(operands, heads, values, longest, dropout, modify)


def _check(operands: Mapping[str, Tensor], scoring: Mapping[str, Any], longest: int | None) -> None:
    """Raises the errors of the sdpa op for wrong operands and values, even if the node will be several nodes."""
    absent = {**dict.fromkeys(ops.INTEGERS, int32), "mask": bool_}
    types = tuple(
        operands[key].type if key in operands else TensorType((), absent.get(key, float32)) for key in ops.OPERANDS
    )
    told = {**scoring, "generate_stats": True, "paged_attention_max_seq_len_kv": longest}
    if isinstance(scoring["attn_scale"], Tensor):
        told["attn_scale"] = None
    ops.infer(types, {**told, **ops.normalize(types, told)})


def band(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of the band of keys that a query meets.

    cuDNN's flags of causal masks have precedence over its alignment and right bound.
    """
    bottom = bool(given.get("use_causal_mask_bottom_right"))
    causal = bottom or bool(given.get("use_causal_mask"))
    alignment = getattr(given.get("diagonal_alignment"), "name", "TOP_LEFT")

    def bound(*words: str) -> Any:
        return next((given[word] for word in words if given.get(word) is not None), None)

    return {
        "diagonal_alignment": ("BOTTOM_RIGHT" if bottom else "TOP_LEFT") if causal else alignment,
        "diagonal_band_left_bound": bound(
            "diagonal_band_left_bound", "left_bound", "sliding_window_length", "sliding_window"
        ),
        "diagonal_band_right_bound": 0 if causal else bound("diagonal_band_right_bound", "right_bound"),
    }


def _headed(reading: Reading, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshapes a tensor of rank 4 so that it broadcasts to scores, whose heads may have two dimensions."""
    if len(shape) == 4:
        return x
    split = (1, 1) if x.shape[1] == 1 else shape[1:3]
    return reading.write("reshape", "", x, shape=(x.shape[0], *split, *x.shape[2:]))


def repeated(reading: Reading, x: Tensor, heads: int) -> Tensor:
    """Returns keys or values with ``heads`` heads, by repeating each one consecutively."""
    batch, own, length, depth = x.shape
    if own == heads:
        return x
    write, times = reading.write, heads // own
    each = write("reshape", "", x, shape=(batch, own, 1, length, depth))
    every = write("broadcast", "", each, shape=(batch, own, times, length, depth))
    return write("reshape", "", every, shape=(batch, heads, length, depth))


def summed(reading: Reading, x: Tensor, heads: int) -> Tensor:
    """Returns the gradient of `repeated`: sums over the heads that were copies of one."""
    batch, every, length, depth = x.shape
    if every == heads:
        return x
    each = reading.write("reshape", "", x, shape=(batch, heads, every // heads, length, depth))
    total = reading.write("reduction", "", each, mode="add", axes=2)
    return reading.write("reshape", "", total, shape=(batch, heads, length, depth))


def _dropout(reading: Reading, node: Any) -> tuple[Any, ...]:
    """Returns `Asked.dropout` of a node.  Raises AttributeValueError for wrong counts and probabilities."""
    count = int(node.params.get("_dropout_n") or 0)
    found: list[Any] = []
    for key in _DROPOUT[:count]:
        if key in node.inputs:
            found.append(reading.operand(node, key))
        elif len(found) == 0:
            found.append(float(node.params[key]))
        else:
            found.append(reading.graph.constant(np.array([node.params[key]], np.int64), dtype=int64))
    if not found or found[0] == 0.0:
        return ()
    if not isinstance(found[0], Tensor) and count != 3:
        raise AttributeValueError(f"dropout is (probability, seed, offset) or (mask, scale), got {count} of them")
    if not isinstance(found[0], Tensor) and not 0 <= found[0] <= 1:
        raise AttributeValueError(f"a probability of dropout is between 0 and 1, got {found[0]!r}")
    return tuple(found)


def _block_mask(reading: Reading, bits: Tensor, rows: int, keys: int) -> Tensor:
    """Returns the boolean mask of a block_mask: a bit for each 128 queries and 128 keys, the lowest of a byte first."""
    write = reading.write
    batch, heads, tall, bytes_ = bits.shape
    if tall * _BLOCK < rows or bytes_ * 8 * _BLOCK < keys:
        raise ShapeError(f"block_mask {list(bits.shape)} has no bit for each 128 of {rows} queries and {keys} keys")
    wide = write("reshape", "", write("identity", "", bits, dtype="int32"), shape=(*bits.shape, 1))
    every = write("broadcast", "", wide, shape=(*bits.shape, 8))
    moved = write("shift_right", "", every, write("gen_index", "", every, axis=4))
    on = write("cmp_neq", "", write("bitwise_and", "", moved, 1), 0)
    on = write("reshape", "", on, shape=(batch, heads, tall, bytes_ * 8))
    for axis, size in ((2, rows), (3, keys)):
        numbers = reading.graph.constant((np.arange(size) // _BLOCK).astype(np.int32))
        on = write("gather", "", on, numbers, axis=axis)
    return on
