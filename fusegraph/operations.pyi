"""Written by tools/stubs.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from fusegraph.calls import Call
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.engines.base import Executable
from fusegraph.ops.base import Op
from fusegraph.ops.scatter import Reduction
from fusegraph.resampling import Beyond, Mode
from fusegraph.tensor import Node, Tensor

Operand: TypeAlias = Tensor | float | np.ndarray[Any, Any] | np.generic

class _Known:
    """What else tensors, and the functions that methods are made of, know of a graph."""

    name: str
    compute_dtype: DType
    outputs: list[Tensor]
    losses: list[Tensor]
    tensors: dict[str, Tensor]
    calls: dict[Tensor, Call]
    _written: list[Node] | None
    _automatic: set[Tensor]
    def constant(self, array: Any, name: str | None = None, dtype: Any = None) -> Tensor: ...
    def apply(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Tensor: ...
    def apply_node(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Node: ...
    @property
    def nodes(self) -> list[Node]: ...
    def producer(self, tensor: Tensor) -> Node | None: ...
    def compile(self, engine: str | None = None, **options: Any) -> Executable:
        """Compiles the graph for an engine ("cuda", "cpu", "reference"; default: cuda if there is a GPU, else cpu).

        Options are those of `fusegraph.compile`."""
    def to_dot(self) -> str:
        """Returns the graph in DOT, which Graphviz draws."""
    def to_onnx(self, file: Any = None) -> Any:
        """Returns the graph as an ONNX model, and writes it to ``file`` if given.  Needs the package ``onnx``.

        Raises NotSupportedError for assignments, sizes that vary, and ops and dtypes that ONNX has not, by name."""
    def _repr_html_(self) -> str: ...
    def _own(self, tensor: object, label: str) -> None: ...
    def _unique(self, stem: str) -> str: ...
    def _rename(self, tensor: Tensor, name: str) -> None: ...

class Operations(_Known):
    def reduction(
        self,
        x: Operand,
        mode: Literal[
            "add",
            "mul",
            "min",
            "max",
            "amax",
            "avg",
            "norm1",
            "norm2",
            "logaddexp",
            "mul_no_zeros",
            "any",
            "all",
            "argmin",
            "argmax",
            "var",
        ] = "add",
        axes: int | Sequence[int] | None = None,
        keepdims: bool = True,
        dtype: Any = None,
        correction: float = 0,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Combines all elements along axes (None: along all of them), which stay as dimensions of size 1 or, with
        keepdims=False, go.

        mode is add, mul, mul_no_zeros (of those that are not 0), min, max, amax (the largest absolute value), avg,
        norm1 (sum of absolute values), norm2 (square root of the sum of squares), logaddexp (logarithm of the sum of
        exponentials), var (mean of squared differences from the mean; their sum is divided by the number of elements
        less correction), argmin or argmax (where the first smallest or largest is, NaN being both: along several axes
        counted in row-major order), any or all (whether one is, or all are, not 0).  Of no elements: add, norm1 and
        norm2 are 0, mul and mul_no_zeros are 1, any is False, all is True, logaddexp is minus infinity, avg and var are
        NaN; the others raise ShapeError, as NumPy does.  NaN where an element is NaN.

        Floats are summed in float32, or float64 for float64 and graphs that compute in it.  Integers are exact: min,
        max and amax (where -128 of int8 stays -128) in their own dtype; sums and products in 32 bits, or 64 if the
        operand or dtype has as many, wrapping around; avg, norm2, logaddexp and var take floats only.  dtype is that of
        the result: by default the operand's, but int32 for sums of integers of 8 and 16 bits and float32 for those of
        fp8; int64 for argmin and argmax, which may be int32; bool for any and all, which alone take bool."""
    def softmax(self, x: Operand, axis: int = -1, *, name: str | None = None) -> Tensor:
        """exp(x - max) / sum(exp(x - max)) along an axis.  NaN where a row holds NaN or plus infinity or nothing but minus
        infinity, as this formula gives in NumPy."""
    def log_softmax(self, x: Operand, axis: int = -1, *, name: str | None = None) -> Tensor:
        """The logarithm of softmax along an axis, without overflow or underflow; not finite where softmax is NaN."""
    def logsumexp(
        self, x: Operand, axes: int | Sequence[int] | None = -1, keepdims: bool = True, *, name: str | None = None
    ) -> Tensor:
        """log(sum(exp(x))) along axes (None: all), without overflow.  Minus infinity for rows of nothing else, and for rows
        of no elements.  keepdims as in a reduction."""
    def softmax_backward(self, loss: Operand, y: Operand, axis: int = -1, *, name: str | None = None) -> Tensor:
        """The gradient of softmax along an axis, y * (loss - sum(loss * y)): loss is that of the result, y the result."""
    def log_softmax_backward(self, loss: Operand, y: Operand, axis: int = -1, *, name: str | None = None) -> Tensor:
        """The gradient of log_softmax along an axis, loss - exp(y) * sum(loss): loss is that of the result, y the
        result."""
    def rng_uniform(
        self, x: Operand, seed: Operand, offset: Operand, dtype: Any = None, *, name: str | None = None
    ) -> Tensor:
        """Random numbers, multiples of 2^-24 uniform in [0, 1), by Philox4x32-10; x gives the shape and the dtype.

        seed and offset are integers, or tensors of one, so that a graph built once can be run with others.  The same ones
        give the same numbers on every engine, whatever x's layout and what the kernel does besides."""
    def rng_normal(
        self, x: Operand, seed: Operand, offset: Operand, dtype: Any = None, *, name: str | None = None
    ) -> Tensor:
        """Random numbers with the normal distribution of mean 0 and variance 1, by Box and Muller's method from the words
        of rng_uniform.  The same seed and offset give the same numbers, but for the last digits of sine and logarithm."""
    def dropout(
        self, x: Operand, seed: Operand, offset: Operand, probability: float = 0.5, *, name: str | None = None
    ) -> Tensor:
        """x / (1 - probability) where the element of rng_uniform(x, seed, offset) is at least probability, else 0 (also for
        an x that is infinite or NaN).  Give every dropout of a run another seed or offset."""
    def dropout_backward(
        self, loss: Operand, seed: Operand, offset: Operand, probability: float = 0.5, *, name: str | None = None
    ) -> Tensor:
        """The gradient of dropout with that seed, offset and probability: the mask is computed again, not kept."""
    @overload
    def sdpa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        seed: Operand | None = None,
        offset: Operand | None = None,
        ragged_offset_q: Operand | None = None,
        ragged_offset_kv: Operand | None = None,
        page_table_k: Operand | None = None,
        page_table_v: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        dropout_probability: float = 0.0,
        paged_attention_max_seq_len_kv: int | None = None,
        generate_stats: Literal[False] = False,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Scaled dot-product attention: softmax(q k^T * attn_scale, over keys) v for every batch and head.

        q is (B, H, Sq, D), k (B, Hk, Skv, D), v (B, Hk, Skv, Dv), in any layout; the result (B, H, Sq, Dv).  Hk divides
        H: neighbouring heads of q share those of k and v (grouped and multi-query attention).

        attn_scale (default 1 / sqrt(D)) multiplies the products of queries and keys; then come, in this order, if they
        are given: soft_cap * tanh(score / soft_cap), bias (added), alibi (the slope of the head times key - query, both
        counted from the first of their sequence), and the masks.  A query meets a key where mask is true, and in the
        band key <= query + right bound and key > query - left bound (use_causal_mask: right bound 0); with
        diagonal_alignment "BOTTOM_RIGHT" the band's positions count from the ends.  bias and mask broadcast to (B, H,
        Sq, Skv); seq_len_q and seq_len_kv, (B,) or (B, 1, 1, 1), say how many queries and keys a batch has; sink_token
        (1, H, 1, 1) is the score of one more key, whose value is 0.
        Paged caches: with page_table_k and page_table_v, (B, pages) or (B, 1, pages, 1), k and v are containers,
        (blocks, Hk, keys of a block, elements), and the keys of a batch those of the blocks whose numbers are in its
        row, one after the other (up to paged_attention_max_seq_len_kv); seq_len_kv says how many there are by now.

        A packed batch: q, k and v have B = 1 and as lengths the tokens of all sequences, of which those from
        ragged_offset_q[n] to ragged_offset_q[n + 1] - 1 (tokens, (sequences + 1,)) are the queries of sequence n, and
        likewise ragged_offset_kv for keys and values.  Queries meet the keys of their own sequence, positions count
        from its beginning; those of no sequence meet none.

        dropout_probability: a probability becomes 0 where the element of rng_uniform with this seed and offset, of the
        scores' shape, is less, and is divided by 1 - dropout_probability elsewhere (the softmax sums up all of them).
        generate_stats: also the logarithm of the sum of exponentials, (B, H, Sq, 1).
        A query that meets no key has the result 0, whatever the values are.  Its stats are -inf or, if the query
        exists, the sink_token; queries from seq_len_q on, and tokens of no sequence, do not exist.  Where a key is
        masked, the key and what is added to its score may be NaN or infinite.  Its value has to be finite: it is
        multiplied with 0, unless its whole tile is masked.  The probabilities are rounded to v's dtype before they are
        multiplied."""
    @overload
    def sdpa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        seed: Operand | None = None,
        offset: Operand | None = None,
        ragged_offset_q: Operand | None = None,
        ragged_offset_kv: Operand | None = None,
        page_table_k: Operand | None = None,
        page_table_v: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        dropout_probability: float = 0.0,
        paged_attention_max_seq_len_kv: int | None = None,
        *,
        generate_stats: Literal[True],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scaled dot-product attention: softmax(q k^T * attn_scale, over keys) v for every batch and head.

        q is (B, H, Sq, D), k (B, Hk, Skv, D), v (B, Hk, Skv, Dv), in any layout; the result (B, H, Sq, Dv).  Hk divides
        H: neighbouring heads of q share those of k and v (grouped and multi-query attention).

        attn_scale (default 1 / sqrt(D)) multiplies the products of queries and keys; then come, in this order, if they
        are given: soft_cap * tanh(score / soft_cap), bias (added), alibi (the slope of the head times key - query, both
        counted from the first of their sequence), and the masks.  A query meets a key where mask is true, and in the
        band key <= query + right bound and key > query - left bound (use_causal_mask: right bound 0); with
        diagonal_alignment "BOTTOM_RIGHT" the band's positions count from the ends.  bias and mask broadcast to (B, H,
        Sq, Skv); seq_len_q and seq_len_kv, (B,) or (B, 1, 1, 1), say how many queries and keys a batch has; sink_token
        (1, H, 1, 1) is the score of one more key, whose value is 0.
        Paged caches: with page_table_k and page_table_v, (B, pages) or (B, 1, pages, 1), k and v are containers,
        (blocks, Hk, keys of a block, elements), and the keys of a batch those of the blocks whose numbers are in its
        row, one after the other (up to paged_attention_max_seq_len_kv); seq_len_kv says how many there are by now.

        A packed batch: q, k and v have B = 1 and as lengths the tokens of all sequences, of which those from
        ragged_offset_q[n] to ragged_offset_q[n + 1] - 1 (tokens, (sequences + 1,)) are the queries of sequence n, and
        likewise ragged_offset_kv for keys and values.  Queries meet the keys of their own sequence, positions count
        from its beginning; those of no sequence meet none.

        dropout_probability: a probability becomes 0 where the element of rng_uniform with this seed and offset, of the
        scores' shape, is less, and is divided by 1 - dropout_probability elsewhere (the softmax sums up all of them).
        generate_stats: also the logarithm of the sum of exponentials, (B, H, Sq, 1).
        A query that meets no key has the result 0, whatever the values are.  Its stats are -inf or, if the query
        exists, the sink_token; queries from seq_len_q on, and tokens of no sequence, do not exist.  Where a key is
        masked, the key and what is added to its score may be NaN or infinite.  Its value has to be finite: it is
        multiplied with 0, unless its whole tile is masked.  The probabilities are rounded to v's dtype before they are
        multiplied."""
    @overload
    def sdpa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        seed: Operand | None = None,
        offset: Operand | None = None,
        ragged_offset_q: Operand | None = None,
        ragged_offset_kv: Operand | None = None,
        page_table_k: Operand | None = None,
        page_table_v: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        dropout_probability: float = 0.0,
        paged_attention_max_seq_len_kv: int | None = None,
        generate_stats: bool = False,
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scaled dot-product attention: softmax(q k^T * attn_scale, over keys) v for every batch and head.

        q is (B, H, Sq, D), k (B, Hk, Skv, D), v (B, Hk, Skv, Dv), in any layout; the result (B, H, Sq, Dv).  Hk divides
        H: neighbouring heads of q share those of k and v (grouped and multi-query attention).

        attn_scale (default 1 / sqrt(D)) multiplies the products of queries and keys; then come, in this order, if they
        are given: soft_cap * tanh(score / soft_cap), bias (added), alibi (the slope of the head times key - query, both
        counted from the first of their sequence), and the masks.  A query meets a key where mask is true, and in the
        band key <= query + right bound and key > query - left bound (use_causal_mask: right bound 0); with
        diagonal_alignment "BOTTOM_RIGHT" the band's positions count from the ends.  bias and mask broadcast to (B, H,
        Sq, Skv); seq_len_q and seq_len_kv, (B,) or (B, 1, 1, 1), say how many queries and keys a batch has; sink_token
        (1, H, 1, 1) is the score of one more key, whose value is 0.
        Paged caches: with page_table_k and page_table_v, (B, pages) or (B, 1, pages, 1), k and v are containers,
        (blocks, Hk, keys of a block, elements), and the keys of a batch those of the blocks whose numbers are in its
        row, one after the other (up to paged_attention_max_seq_len_kv); seq_len_kv says how many there are by now.

        A packed batch: q, k and v have B = 1 and as lengths the tokens of all sequences, of which those from
        ragged_offset_q[n] to ragged_offset_q[n + 1] - 1 (tokens, (sequences + 1,)) are the queries of sequence n, and
        likewise ragged_offset_kv for keys and values.  Queries meet the keys of their own sequence, positions count
        from its beginning; those of no sequence meet none.

        dropout_probability: a probability becomes 0 where the element of rng_uniform with this seed and offset, of the
        scores' shape, is less, and is divided by 1 - dropout_probability elsewhere (the softmax sums up all of them).
        generate_stats: also the logarithm of the sum of exponentials, (B, H, Sq, 1).
        A query that meets no key has the result 0, whatever the values are.  Its stats are -inf or, if the query
        exists, the sink_token; queries from seq_len_q on, and tokens of no sequence, do not exist.  Where a key is
        masked, the key and what is added to its score may be NaN or infinite.  Its value has to be finite: it is
        multiplied with 0, unless its whole tile is masked.  The probabilities are rounded to v's dtype before they are
        multiplied."""
    def sdpa_backward(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        o: Operand,
        dO: Operand,
        stats: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        seed: Operand | None = None,
        offset: Operand | None = None,
        ragged_offset_q: Operand | None = None,
        ragged_offset_kv: Operand | None = None,
        sink_token: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        dropout_probability: float = 0.0,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, ...]:
        """The gradients of sdpa by q, k and v, by a bias if any operand follows stats, and by a sink_token.

        o (B, H, Sq, Dv) and stats (B, H, Sq, 1) are what sdpa gave with generate_stats, dO is the gradient by o; q, k,
        v, the other operands and the attributes are those of sdpa.  The results have the shapes and dtypes of q, k, v
        and bias.  A query that meets no key has the gradient 0.  The stats contain what the other gradients need of a
        sink_token: it may be left out, and then there is no gradient by it.

        A packed batch is given as in sdpa; tokens of no sequence have the gradient 0.  Like all that is masked, they
        are multiplied with 0 unless their whole tile is masked: they have to be finite.

        Deterministic: the sums over queries, and over the heads of q that share those of k and v, have a fixed order.
        The gradients by scores are rounded to q's dtype, the probabilities to dO's, before they are multiplied."""
    @overload
    def sdpa_fp8(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_s: Operand,
        scale_s: Operand,
        scale_o: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        generate_stats: Literal[False] = False,
        dtype: Any = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """sdpa of queries, keys and values in 8-bit floats, with scales; shapes and other attributes as sdpa's.

        descale_q, descale_k, descale_v, descale_s, scale_s and scale_o are one float32 each: products of queries and
        keys are multiplied with descale_q * descale_k, probabilities with scale_s before they are rounded to v's dtype
        (at most its largest number), the result with descale_s * descale_v * scale_o before it is rounded to dtype
        (default: that of q).  In kernels the probabilities are rounded before they are divided by their sum, or kept in
        more bits."""
    @overload
    def sdpa_fp8(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_s: Operand,
        scale_s: Operand,
        scale_o: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        *,
        generate_stats: Literal[True],
        dtype: Any = None,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """sdpa of queries, keys and values in 8-bit floats, with scales; shapes and other attributes as sdpa's.

        descale_q, descale_k, descale_v, descale_s, scale_s and scale_o are one float32 each: products of queries and
        keys are multiplied with descale_q * descale_k, probabilities with scale_s before they are rounded to v's dtype
        (at most its largest number), the result with descale_s * descale_v * scale_o before it is rounded to dtype
        (default: that of q).  In kernels the probabilities are rounded before they are divided by their sum, or kept in
        more bits."""
    @overload
    def sdpa_fp8(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_s: Operand,
        scale_s: Operand,
        scale_o: Operand,
        bias: Operand | None = None,
        mask: Operand | None = None,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        sink_token: Operand | None = None,
        attn_scale: float | None = None,
        diagonal_alignment: Literal["TOP_LEFT", "BOTTOM_RIGHT"] = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_causal_mask: bool = False,
        use_alibi_mask: bool = False,
        soft_cap: float | None = None,
        generate_stats: bool = False,
        dtype: Any = None,
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """sdpa of queries, keys and values in 8-bit floats, with scales; shapes and other attributes as sdpa's.

        descale_q, descale_k, descale_v, descale_s, scale_s and scale_o are one float32 each: products of queries and
        keys are multiplied with descale_q * descale_k, probabilities with scale_s before they are rounded to v's dtype
        (at most its largest number), the result with descale_s * descale_v * scale_o before it is rounded to dtype
        (default: that of q).  In kernels the probabilities are rounded before they are divided by their sum, or kept in
        more bits."""
    def matmul(
        self,
        a: Operand,
        b: Operand,
        dtype: Any = None,
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Matrix product of a (..., M, K) and b (..., K, N): (..., M, N).  Batch dimensions broadcast as in NumPy.

        Accumulates in float32, for float64 in float64; integers in 64 bits if an operand or dtype has as many, else
        in 32, wrapping around.  dtype is that of the result: by default the promoted operand dtype, int32 for integers
        of 8 and 16 bits, float32 for fp8.  compute_dtype "tf32" lets float32 operands be rounded to the 11 significant
        bits of tf32 before they are multiplied; "fast_float_for_fp8" leaves sums of fp8 products to the tensor cores,
        some of which keep 14 bits, instead of adding them up in float32 after 128 products at most (default: what the
        graph says)."""
    def conv_fprop(
        self,
        x: Operand,
        w: Operand,
        stride: int | Sequence[int] | None = 1,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int | None = None,
        mode: Literal["cross_correlation", "convolution"] = "cross_correlation",
        dtype: Any = None,
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        algorithm: Literal[None, "direct", "winograd_4x4", "winograd_2x2"] = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Convolution of x (N, C, spatial...) with w (K, C / groups, taps...): (N, K, spatial...), 1-D to 3-D.

        stride, dilation: an integer, or one for each spatial dimension.  padding: an integer, one for each dimension,
        or (before, after) pairs; the padding is zero.  groups: by default C divided by the filter's channels.  mode
        "convolution" flips the filter, "cross_correlation" does not.  The result lies in memory as x does (NHWC in,
        NHWC out).  dtype, compute_dtype and the accumulator are as for matmul.

        algorithm: "direct" sums up the products as they are.  "winograd_2x2" and "winograd_4x4" are Winograd's for 3x3
        filters in float32, with a stride and dilation of 1 and one group: 2.25 and 4 times fewer products; errors are
        about half and twice those of the direct sum, and what is not finite may spread to all results of the tiles
        that it reaches.  None, the default, takes one of them where it is estimated to be faster, never in a strict
        graph."""
    def conv_dgrad(
        self,
        loss: Operand,
        filter: Operand,
        size: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = 1,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int | None = 1,
        mode: Literal["cross_correlation", "convolution"] = "cross_correlation",
        dtype: Any = None,
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        algorithm: Literal[None, "direct", "winograd_4x4", "winograd_2x2"] = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of a convolution's input, also known as transposed convolution: (N, C, size...), 1-D to 3-D.

        From the loss (N, K, positions...), the gradient of the convolution's result, and its filter (K, C / groups,
        taps...).  size: an integer, or one for each spatial dimension; by default the smallest over which the
        convolution has as many positions as the loss.  stride, padding, dilation, groups and mode are those of the
        convolution; groups is 1 if it is not given.  The loss counts as zero beyond its positions.  The result lies in
        memory as the loss does.  dtype, compute_dtype and the accumulator are as for matmul, algorithm as for
        conv_fprop."""
    def conv_wgrad(
        self,
        image: Operand,
        loss: Operand,
        taps: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = 1,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int | None = 1,
        mode: Literal["cross_correlation", "convolution"] = "cross_correlation",
        dtype: Any = None,
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of a convolution's filter: (K, C / groups, taps...), 1-D to 3-D.

        From the image (N, C, spatial...) and the loss (N, K, positions...), the gradient of the convolution's result.
        taps: an integer, or one for each spatial dimension; may be left out where only one fits, as with stride 1.
        stride, padding, dilation, groups and mode are those of the convolution; groups is 1 if it is not given.  The
        result lies in memory as the image does (a filter in KRSC from an image in NHWC).  dtype, compute_dtype and the
        accumulator are as for matmul."""
    def linear_cross_entropy(
        self,
        x: Operand,
        w: Operand,
        target: Operand,
        bias: Operand | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, ...]:
        """The cross entropy of the logits x w^T + bias, and the logsumexp of each row of these; the logits are not
        kept in memory.

        x [..., D] are rows of features, w [V, D] and bias [V] a linear layer, target [...] the class of each
        row, from 0 to V - 1, or ignore_index for rows that do not count.
        The loss of a row is logsumexp(logits) - logits[target]; with label_smoothing, the second term is (1 -
        label_smoothing) * logits[target] + label_smoothing * mean(logits).  It is 0 where a row does not count.
        reduction: "mean" over the rows that count (NaN if there are none), "sum", or "none", which gives one for each
        row.  Both results are float32, or float64 if an operand is; logsumexp is what the gradients need.  The loss of
        a row whose target is out of range is that of some other class.  compute_dtype as in `matmul`.

        Raises ShapeError (other shapes; no classes), DTypeError (x, w or bias not floats of 16 bits or more, target not
        integers), AttributeValueError (label_smoothing not between 0 and 1)."""
    def linear_cross_entropy_backward(
        self,
        loss: Operand,
        x: Operand,
        w: Operand,
        target: Operand,
        logsumexp: Operand,
        bias: Operand | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        compute_dtype: Literal[None, "float32", "tf32", "fast_float_for_fp8"] = None,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, ...]:
        """The gradients of linear_cross_entropy by x, w and, if it is given, bias; all logits are never in memory.

        x [..., D] are rows of features, w [V, D] and bias [V] a linear layer, target [...] the class of each
        row, from 0 to V - 1, or ignore_index for rows that do not count.
        loss is the gradient by the loss, of its shape: one number, or one for each row with reduction "none".
        logsumexp is what the op gave for the same operands and attributes.  The results have the shapes and dtypes of
        x, w and bias.  Rows that do not count, and rows whose target is out of range as to their class, add nothing.

        The logits are computed again, in some columns at a time if there are many; their gradients, before a scale that
        all rows share, are rounded to the promoted dtype of x and w before they are multiplied.  Deterministic.
        Raises ShapeError, DTypeError and AttributeValueError, as linear_cross_entropy does."""
    def transpose(self, x: Operand, perm: Sequence[int] | None = None, *, name: str | None = None) -> Tensor:
        """The dimensions in another order: dimension d of the result is dimension perm[d] of the operand (None: in
        reverse)."""
    def reshape(self, x: Operand, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """The same elements, in row-major order of the logical dimensions, in another shape; one size may be -1: as many
        as are left."""
    def broadcast(self, x: Operand, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """The tensor repeated to a shape: dimensions of size 1, and new ones in front."""
    def slice(
        self,
        x: Operand,
        starts: Sequence[int | None] | None = None,
        stops: Sequence[int | None] | None = None,
        steps: Sequence[int | None] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Every steps[d]-th element from starts[d] up to stops[d] of each dimension, as Python's slices: None is all there
        is, negative numbers count from the end, a negative step goes backwards."""
    def pad(
        self,
        x: Operand,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]],
        mode: Literal["constant", "reflect", "replicate"] = "constant",
        value: float = 0,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Elements around the tensor: padding is one number, or for each dimension one or (before, after).

        mode is constant (value, rounded to the tensor's dtype), reflect (as in a mirror on the outermost elements, which
        are not repeated; the padding is smaller than the dimension) or replicate (the outermost elements again)."""
    def concatenate(self, *x: Operand | Sequence[Operand], axis: int = 0, name: str | None = None) -> Tensor:
        """Tensors of one dtype behind one another along an axis; their other sizes are equal."""
    def gather(self, x: Operand, index: Operand, axis: int = 0, *, name: str | None = None) -> Tensor:
        """The elements of x at the positions along an axis that index says; the index's dimensions take the axis's place,
        as in `numpy.take`.  Positions outside of the axis are clamped to its ends (negative ones to 0)."""
    @overload
    def layernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance (of the numbers themselves, without
        Bessel's correction) along axes (None: all).  The variance is the mean of the squared differences from the mean, so
        that large offsets cost no digits.  scale and bias broadcast to x, whose dtype the result has.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def layernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        *,
        norm_forward_phase: Literal["training"],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance (of the numbers themselves, without
        Bessel's correction) along axes (None: all).  The variance is the mean of the squared differences from the mean, so
        that large offsets cost no digits.  scale and bias broadcast to x, whose dtype the result has.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def layernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference", "training"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance (of the numbers themselves, without
        Bessel's correction) along axes (None: all).  The variance is the mean of the squared differences from the mean, so
        that large offsets cost no digits.  scale and bias broadcast to x, whose dtype the result has.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def adalayernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor:
        """layernorm whose scale and bias are other ones for each sample, such as [N, 1, C] for an x of [N, T, C].

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def adalayernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        *,
        norm_forward_phase: Literal["training"],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """layernorm whose scale and bias are other ones for each sample, such as [N, 1, C] for an x of [N, T, C].

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def adalayernorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference", "training"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """layernorm whose scale and bias are other ones for each sample, such as [N, 1, C] for an x of [N, T, C].

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def instancenorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions of each channel of
        each image; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def instancenorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: float = 1e-05,
        *,
        norm_forward_phase: Literal["training"],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions of each channel of
        each image; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def instancenorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference", "training"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions of each channel of
        each image; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, 1 / sqrt(variance + epsilon), each of one
        element for all that share it."""
    @overload
    def rmsnorm(
        self,
        x: Operand,
        scale: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * scale, the mean along axes (None: all).  scale broadcasts to x, whose dtype the
        result has.

        With norm_forward_phase="training" there are more results, for the gradient: inv_variance, 1 / sqrt(mean(x^2) + epsilon), each of one
        element for all that share it."""
    @overload
    def rmsnorm(
        self,
        x: Operand,
        scale: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        *,
        norm_forward_phase: Literal["training"],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x / sqrt(mean(x^2) + epsilon) * scale, the mean along axes (None: all).  scale broadcasts to x, whose dtype the
        result has.

        With norm_forward_phase="training" there are more results, for the gradient: inv_variance, 1 / sqrt(mean(x^2) + epsilon), each of one
        element for all that share it."""
    @overload
    def rmsnorm(
        self,
        x: Operand,
        scale: Operand,
        axes: int | Sequence[int] | None = -1,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference", "training"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x / sqrt(mean(x^2) + epsilon) * scale, the mean along axes (None: all).  scale broadcasts to x, whose dtype the
        result has.

        With norm_forward_phase="training" there are more results, for the gradient: inv_variance, 1 / sqrt(mean(x^2) + epsilon), each of one
        element for all that share it."""
    @overload
    def groupnorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        groups: int | None,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions and channels of each
        group of each image; x is [N, C, ...], its channels groups of as many each, scale and bias are [1, C, 1, ...] as a
        rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, [N, groups, 1, ...], each of one
        element for all that share it."""
    @overload
    def groupnorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        groups: int | None,
        epsilon: float = 1e-05,
        *,
        norm_forward_phase: Literal["training"],
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions and channels of each
        group of each image; x is [N, C, ...], its channels groups of as many each, scale and bias are [1, C, 1, ...] as a
        rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, [N, groups, 1, ...], each of one
        element for all that share it."""
    @overload
    def groupnorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        groups: int | None,
        epsilon: float = 1e-05,
        norm_forward_phase: Literal["inference", "training"] = "inference",
        *,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over the positions and channels of each
        group of each image; x is [N, C, ...], its channels groups of as many each, scale and bias are [1, C, 1, ...] as a
        rule.

        With norm_forward_phase="training" there are more results, for the gradient: mean and inv_variance, [N, groups, 1, ...], each of one
        element for all that share it."""
    def batchnorm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        in_running_mean: Operand | None = None,
        in_running_var: Operand | None = None,
        epsilon: float = 1e-05,
        momentum: float = 0.1,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Training's (x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over all of a batch for each
        channel; x is [N, C, ...], scale and bias are [1, C, 1, ...] as a rule.

        Results: y, mean, inv_variance (1 / sqrt(variance + epsilon)) and, if the running statistics ([1, C, 1, ...]) are
        given, next_running_mean and next_running_var: (1 - momentum) * old + momentum * new, where the new variance is that
        of the batch times n / (n - 1), n being the elements a channel (as it is where n is 1)."""
    def batchnorm_inference(
        self,
        x: Operand,
        mean: Operand,
        inv_variance: Operand,
        scale: Operand,
        bias: Operand,
        *,
        name: str | None = None,
    ) -> Tensor:
        """(x - mean) * inv_variance * scale + bias, with statistics known before; all broadcast to x."""
    def genstats(self, x: Operand, *, name: str | None = None) -> tuple[Tensor, Tensor]:
        """(sum, sum of squares) over all of a batch for each channel; x is [N, C, ...]."""
    def layernorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        axes: int | Sequence[int] | None = -1,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of layernorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
        statistics that training kept; dscale and dbias have the shape of scale."""
    def adalayernorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        axes: int | Sequence[int] | None = -1,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of adalayernorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
        statistics that training kept; dscale and dbias have the shape of scale."""
    def instancenorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of instancenorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
        statistics that training kept; dscale and dbias have the shape of scale."""
    def batchnorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of batchnorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
        statistics that training kept; dscale and dbias have the shape of scale."""
    def groupnorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        groups: int | None,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of groupnorm: (dx, dscale, dbias).  loss is that of the result, mean and inv_variance are the
        statistics that training kept; dscale and dbias have the shape of scale."""
    def rmsnorm_backward(
        self,
        loss: Operand,
        x: Operand,
        scale: Operand,
        inv_variance: Operand,
        axes: int | Sequence[int] | None = -1,
        *,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of rmsnorm: (dx, dscale).  loss is that of the result, inv_variance is the statistic that training
        kept; dscale has the shape of scale."""
    def relu(
        self,
        x: Operand,
        negative_slope: float = 0.0,
        lower_clip: float = 0.0,
        upper_clip: float | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """x above lower_clip, lower_clip + negative_slope * (x - lower_clip) below, and at most upper_clip.

        An upper_clip of None is no limit.  With the defaults max(x, 0).  NaN stays NaN."""
    def relu_backward(
        self,
        loss: Operand,
        input: Operand,
        negative_slope: float = 0.0,
        lower_clip: float = 0.0,
        upper_clip: float | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of relu: loss where x > lower_clip, negative_slope * loss elsewhere, 0 where relu reaches upper_clip.

        So at lower_clip it is the gradient of the side below.  NaN in the input is not above lower_clip."""
    def leaky_relu(self, x: Operand, negative_slope: float, *, name: str | None = None) -> Tensor:
        """x above 0, negative_slope * x below."""
    def leaky_relu_backward(
        self, loss: Operand, input: Operand, negative_slope: float, *, name: str | None = None
    ) -> Tensor:
        """Gradient of leaky_relu: loss where x > 0, negative_slope * loss elsewhere, at 0 and for NaN too."""
    def elu(self, x: Operand, alpha: float = 1.0, *, name: str | None = None) -> Tensor:
        """x above 0, alpha * (exp(x) - 1) below."""
    def elu_backward(self, loss: Operand, input: Operand, alpha: float = 1.0, *, name: str | None = None) -> Tensor:
        """Gradient of elu: loss where x > 0, alpha * exp(x) * loss elsewhere (alpha * loss at 0)."""
    def sigmoid(self, x: Operand, *, name: str | None = None) -> Tensor:
        """1 / (1 + exp(-x))"""
    def sigmoid_backward(self, loss: Operand, input: Operand, *, name: str | None = None) -> Tensor:
        """Gradient of sigmoid."""
    def tanh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Hyperbolic tangent."""
    def tanh_backward(self, loss: Operand, input: Operand, *, name: str | None = None) -> Tensor:
        """Gradient of tanh, (1 - tanh(x)^2) * loss."""
    def softplus(self, x: Operand, beta: float = 1.0, *, name: str | None = None) -> Tensor:
        """log(1 + exp(beta * x)) / beta, for positive beta."""
    def softplus_backward(self, loss: Operand, input: Operand, beta: float = 1.0, *, name: str | None = None) -> Tensor:
        """Gradient of softplus."""
    def swish(self, x: Operand, beta: float = 1.0, *, name: str | None = None) -> Tensor:
        """x * sigmoid(beta * x)"""
    def swish_backward(self, loss: Operand, input: Operand, beta: float = 1.0, *, name: str | None = None) -> Tensor:
        """Gradient of swish."""
    def mish(self, x: Operand, *, name: str | None = None) -> Tensor:
        """x * tanh(log(1 + exp(x)))"""
    def gelu(self, x: Operand, *, name: str | None = None) -> Tensor:
        """x / 2 * (1 + erf(x / sqrt(2)))"""
    def gelu_backward(self, loss: Operand, input: Operand, *, name: str | None = None) -> Tensor:
        """Gradient of gelu."""
    def gelu_approx_tanh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))"""
    def gelu_approx_tanh_backward(self, loss: Operand, input: Operand, *, name: str | None = None) -> Tensor:
        """Gradient of gelu_approx_tanh."""
    def hardsigmoid(self, x: Operand, *, name: str | None = None) -> Tensor:
        """min(max(x + 3, 0), 6) / 6"""
    def hardswish(self, x: Operand, *, name: str | None = None) -> Tensor:
        """x * min(max(x + 3, 0), 6) / 6"""
    def quotient(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a / b of integers, rounded towards zero as C does; 0 where b is 0.  The quotient that belongs to mod."""
    def bitwise_and(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a & b, bit by bit."""
    def bitwise_or(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a | b, bit by bit."""
    def bitwise_xor(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a ^ b, bit by bit."""
    def bitwise_not(self, x: Operand, *, name: str | None = None) -> Tensor:
        """~x, every bit the other way."""
    def shift_left(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a << b without the bits that leave the type; 0 where b is negative or at least the number of bits."""
    def shift_right(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a >> b, which keeps the sign; where b is negative or at least the number of bits: 0, or -1 for negative a."""
    def bitcast(self, x: Operand, dtype: Any = None, source: Any = None, *, name: str | None = None) -> Tensor:
        """The number of another dtype that has the same bits as x: by default an unsigned integer.

        A NaN may become any other NaN of x's dtype first.  source is always x's dtype, whatever is given."""
    def add(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a + b"""
    def sub(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a - b"""
    def mul(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a * b"""
    def div(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a / b, for floats."""
    def bias(self, x: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """x + b"""
    def scale(self, x: Operand, s: Operand, *, name: str | None = None) -> Tensor:
        """x * s"""
    def add_square(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a + b * b, for floats rounded once."""
    def mod(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """Remainder with the sign of a (C's fmod and %).  Where b is 0: NaN for floats, 0 for integers."""
    def pow(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a to the power b, for floats; special cases as C's pow."""
    def max(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """The larger, NaN where either is NaN."""
    def min(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """The smaller, NaN where either is NaN."""
    def neg(self, x: Operand, *, name: str | None = None) -> Tensor:
        """-x"""
    def abs(self, x: Operand, *, name: str | None = None) -> Tensor:
        """|x|.  The most negative integer is its own absolute value."""
    def sign(self, x: Operand, *, name: str | None = None) -> Tensor:
        """-1, 0 or 1; NaN stays NaN."""
    def reciprocal(self, x: Operand, *, name: str | None = None) -> Tensor:
        """1 / x"""
    def sqrt(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Square root."""
    def rsqrt(self, x: Operand, *, name: str | None = None) -> Tensor:
        """1 / sqrt(x)"""
    def clamp(
        self, x: Operand, min: float | None = None, max: float | None = None, *, name: str | None = None
    ) -> Tensor:
        """x limited to [min, max]; either may be None, for no limit.  NaN stays NaN."""
    def ceil(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Smallest integer not below x."""
    def floor(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Largest integer not above x."""
    def trunc(self, x: Operand, *, name: str | None = None) -> Tensor:
        """The integer towards zero."""
    def round(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Nearest integer, halfway cases to even."""
    def identity(self, x: Operand, dtype: Any = None, saturate: bool = True, *, name: str | None = None) -> Tensor:
        """x, converted to dtype where one is given.

        Floats round to nearest even; floats to integers truncate and saturate, NaN gives 0; integers wrap around.  What an
        8-bit float does not hold, infinity included, becomes its largest number, as ONNX and cuDNN have it; with
        saturate=False infinity, or NaN where the dtype has no infinity, as torch has it."""
    def narrow(self, x: Operand, dtype: Any, *, name: str | None = None) -> Tensor:
        """x as a tensor of another float dtype, rounded only where it is stored.

        So are the results of all other ops: within a kernel they keep the precision that they are computed in.  A cast
        (`identity` with a dtype) rounds wherever it is."""
    def gen_index(self, x: Operand, axis: int, *, name: str | None = None) -> Tensor:
        """The position of each element along an axis, int32; x gives the shape only.

        It has no CUDA expression: the lowering supplies the index."""
    def exp(self, x: Operand, *, name: str | None = None) -> Tensor:
        """e to the power x."""
    def exp2(self, x: Operand, *, name: str | None = None) -> Tensor:
        """2 to the power x."""
    def expm1(self, x: Operand, *, name: str | None = None) -> Tensor:
        """exp(x) - 1, accurate for small x."""
    def log(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Natural logarithm."""
    def log2(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Logarithm to base 2."""
    def log1p(self, x: Operand, *, name: str | None = None) -> Tensor:
        """log(1 + x), accurate for small x."""
    def asin(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Arc sine in radians; NaN beyond [-1, 1]."""
    def acos(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Arc cosine in radians; NaN beyond [-1, 1]."""
    def atan(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Arc tangent in radians."""
    def sinh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Hyperbolic sine."""
    def cosh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Hyperbolic cosine."""
    def asinh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Inverse hyperbolic sine."""
    def acosh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Inverse hyperbolic cosine; NaN below 1."""
    def atanh(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Inverse hyperbolic tangent; NaN beyond [-1, 1]."""
    def erf(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Error function."""
    def sin(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Sine of x in radians."""
    def cos(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Cosine of x in radians."""
    def tan(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Tangent of x in radians."""
    def cmp_eq(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a == b, bool.  Comparisons with NaN are false."""
    def cmp_neq(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a != b, bool.  Comparisons with NaN are true."""
    def cmp_gt(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a > b, bool.  Comparisons with NaN are false."""
    def cmp_ge(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a >= b, bool.  Comparisons with NaN are false."""
    def cmp_lt(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a < b, bool.  Comparisons with NaN are false."""
    def cmp_le(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a <= b, bool.  Comparisons with NaN are false."""
    def logical_and(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a && b, bool.  Numbers count as true unless they are 0 (NaN is true)."""
    def logical_or(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a || b, bool.  Numbers count as true unless they are 0 (NaN is true)."""
    def logical_not(self, x: Operand, *, name: str | None = None) -> Tensor:
        """not x, bool.  Numbers count as true unless they are 0 (NaN is true)."""
    def isnan(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Whether x is NaN, bool."""
    def binary_select(self, input0: Operand, input1: Operand, mask: Operand, *, name: str | None = None) -> Tensor:
        """input0 where mask is true (not 0), input1 elsewhere."""
    def max_pool(
        self,
        x: Operand,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """The largest element of every window.

        Padding never wins; a window of nothing else gives minus infinity, or the dtype's least integer.  NaN wins.

        window is an integer or one for each of the axes; so is stride (default: the window's size).  padding is an
        integer, one an axis, or pairs (before, after).  Along n elements there are (n + before + after - window) //
        stride + 1 windows; ceil_mode adds one where elements are left that no window holds, if it starts inside the
        image or its padding.  axes are those of the window, by default the spatial ones of x (N, C, spatial...).
        The elements of a window are dilation apart (an integer or one an axis): it reaches over (window - 1) * dilation
        + 1 of them."""
    def max_pool_index(
        self,
        x: Operand,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        dtype: Any = int32,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Where the largest element of every window is: its position in the image, flattened over the axes.

        The first of equal elements counts, the last of those that are NaN, as in torch; -1 for a
        window of nothing but padding.  dtype is int32 or int64.

        window is an integer or one for each of the axes; so is stride (default: the window's size).  padding is an
        integer, one an axis, or pairs (before, after).  Along n elements there are (n + before + after - window) //
        stride + 1 windows; ceil_mode adds one where elements are left that no window holds, if it starts inside the
        image or its padding.  axes are those of the window, by default the spatial ones of x (N, C, spatial...).
        The elements of a window are dilation apart (an integer or one an axis): it reaches over (window - 1) * dilation
        + 1 of them."""
    def avg_pool(
        self,
        x: Operand,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """The mean of every window.

        With count_include_pad the padding counts as zeros (what hangs over it in ceil mode does not); else the mean is
        of the window's elements alone, NaN if it has none.  Floats only.

        window is an integer or one for each of the axes; so is stride (default: the window's size).  padding is an
        integer, one an axis, or pairs (before, after).  Along n elements there are (n + before + after - window) //
        stride + 1 windows; ceil_mode adds one where elements are left that no window holds, if it starts inside the
        image or its padding.  axes are those of the window, by default the spatial ones of x (N, C, spatial...)."""
    def adaptive_max_pool(
        self,
        x: Operand,
        size: int | Sequence[int] | None,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """The largest element of windows that share out the image to a result of a given size.

        size is the result's, an integer or one for each of the axes (default: the spatial ones of x (N, C,
        spatial...)).  As in torch, of n elements window p of m holds those from floor(p n / m) to before
        ceil((p + 1) n / m)."""
    def adaptive_max_pool_index(
        self,
        x: Operand,
        size: int | Sequence[int] | None,
        dtype: Any = int32,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Where the elements are that adaptive_max_pool takes: positions in the image, flattened over the axes.

        The first of equal elements counts, the last of those that are NaN, as in torch; -1 for a
        window of nothing but padding.  dtype is int32 or int64.

        size is the result's, an integer or one for each of the axes (default: the spatial ones of x (N, C,
        spatial...)).  As in torch, of n elements window p of m holds those from floor(p n / m) to before
        ceil((p + 1) n / m)."""
    def adaptive_avg_pool(
        self,
        x: Operand,
        size: int | Sequence[int] | None,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """The mean of windows that share out the image to a result of a given size.

        size is the result's, an integer or one for each of the axes (default: the spatial ones of x (N, C,
        spatial...)).  As in torch, of n elements window p of m holds those from floor(p n / m) to before
        ceil((p + 1) n / m)."""
    def max_pool_backward_index(
        self,
        loss: Operand,
        index: Operand,
        size: int | Sequence[int] | None,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of max_pool, given the result of max_pool_index: every element of the image sums the losses of the
        windows that chose it, in a fixed order.  An index outside of its window counts nowhere.

        size is that of the image along the axes; the other attributes are those of the forward op."""
    def avg_pool_backward(
        self,
        loss: Operand,
        size: int | Sequence[int] | None,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of avg_pool: every element of the image sums its share of the losses of the windows that hold it.

        size is that of the image along the axes; the other attributes are those of the forward op."""
    def adaptive_max_pool_backward_index(
        self,
        loss: Operand,
        index: Operand,
        size: int | Sequence[int] | None,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of adaptive_max_pool, given the result of adaptive_max_pool_index, as max_pool_backward_index.

        size is that of the image along the axes; the other attributes are those of the forward op."""
    def adaptive_avg_pool_backward(
        self,
        loss: Operand,
        size: int | Sequence[int] | None,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of adaptive_avg_pool.  size is that of the image along the axes; the other attributes are those of the forward op."""
    def max_pool_backward(
        self,
        loss: Operand,
        x: Operand,
        window: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] | Sequence[int | Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of max_pool: every element of the image sums the losses of the windows that chose it, in a fixed order.

        Where the maxima are is found anew; max_pool_backward_index takes what max_pool_index found.

        window is an integer or one for each of the axes; so is stride (default: the window's size).  padding is an
        integer, one an axis, or pairs (before, after).  Along n elements there are (n + before + after - window) //
        stride + 1 windows; ceil_mode adds one where elements are left that no window holds, if it starts inside the
        image or its padding.  axes are those of the window, by default the spatial ones of x (N, C, spatial...).
        The elements of a window are dilation apart (an integer or one an axis): it reaches over (window - 1) * dilation
        + 1 of them."""
    def adaptive_max_pool_backward(
        self, loss: Operand, x: Operand, axes: int | Sequence[int] | None = None, *, name: str | None = None
    ) -> Tensor:
        """Gradient of adaptive_max_pool: every element of the image sums the losses of the windows that chose it, in a
        fixed order.  The windows follow from the shapes of loss and x.

        size is the result's, an integer or one for each of the axes (default: the spatial ones of x (N, C,
        spatial...)).  As in torch, of n elements window p of m holds those from floor(p n / m) to before
        ceil((p + 1) n / m)."""
    def global_max_pool(
        self, x: Operand, axes: int | Sequence[int] | None = None, *, name: str | None = None
    ) -> Tensor:
        """The largest element of each channel of an image (N, C, spatial...), or along the axes: a reduction that keeps the
        dimensions.  NaN wins."""
    def global_avg_pool(
        self, x: Operand, axes: int | Sequence[int] | None = None, *, name: str | None = None
    ) -> Tensor:
        """The mean of each channel of an image (N, C, spatial...), or along the axes: a reduction that keeps the
        dimensions.  The result has x's dtype."""
    def local_response_norm(
        self,
        x: Operand,
        window: int | Sequence[int] = 5,
        alpha: float = 0.0001,
        beta: float = 0.75,
        k: float = 1.0,
        axis: int = 1,
        *,
        name: str | None = None,
    ) -> Tensor:
        """x / (k + alpha * m)^beta, m being the mean of the squares of the window elements around each along an axis (the
        channels), zeros beyond the ends included: torch's local_response_norm, Krizhevsky et al. 2012.  An even window
        reaches further back."""
    def local_response_norm_backward(
        self,
        loss: Operand,
        x: Operand,
        window: int | Sequence[int] = 5,
        alpha: float = 0.0001,
        beta: float = 0.75,
        k: float = 1.0,
        axis: int = 1,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of local_response_norm: loss is that of the result, x the operand.  With s = k + alpha * m it is
        loss / s^beta - 2 * alpha * beta * x * t, t being the sum of loss * x / s^(beta + 1) over the windows that an
        element is in, divided by their size."""
    def local_contrast_norm(
        self,
        x: Operand,
        window: int | Sequence[int],
        epsilon: float = 1e-05,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """d / max(sqrt(v), epsilon): d is x less the mean of the window around each element, v the mean of d^2 in the
        window; the windows' elements outside of x do not count.  Subtractive and divisive normalisation as by Jarrett et
        al. 2009, with windows of even weights.  axes are by default the spatial ones of x (N, C, spatial...)."""
    def local_contrast_norm_backward(
        self,
        loss: Operand,
        x: Operand,
        window: int | Sequence[int],
        epsilon: float = 1e-05,
        axes: int | Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Gradient of local_contrast_norm: loss is that of the result, x the operand.  Where sqrt(v) is at most epsilon,
        the divisor is a constant."""
    def rope(
        self, x: Operand, freqs: Operand, rope_dim: int = 0, output_scale: float = 1.0, *, name: str | None = None
    ) -> Tensor:
        """Rotary position embedding of queries or keys (batch, heads, length, elements): the last rope_dim elements of a
        row (0: all) are pairs, one of the first half and one of the second, which are turned by an angle; the others stay
        as they are.  All are multiplied with output_scale.

        freqs (length, 1, 1, rope_dim) are the angles in radians of each position; those of pairs are its first half.
        Raises ShapeError for other shapes, AttributeValueError for a rope_dim that is odd or larger than a row."""
    def rope_backward(
        self, loss: Operand, freqs: Operand, rope_dim: int = 0, output_scale: float = 1.0, *, name: str | None = None
    ) -> Tensor:
        """The gradient of rope: turns the loss back, by the same freqs, rope_dim and output_scale."""
    def cumsum(
        self, x: Operand, axis: int = -1, reverse: bool = False, dtype: Any = None, *, name: str | None = None
    ) -> Tensor:
        """The sums of each element and all before it along an axis; of all after it with reverse=True, which is the gradient of the other.

        What follows a NaN or infinity is as combining one by one makes it; what precedes it stays.  dtype is that of
        the result, as in a `reduction`: by default the operand's, int32 for 8-bit integers (which wrap around) and
        float32 for fp8."""
    def cumprod(
        self, x: Operand, axis: int = -1, reverse: bool = False, dtype: Any = None, *, name: str | None = None
    ) -> Tensor:
        """The products of each element and all before it along an axis; of all after it with reverse=True.

        What follows a NaN or infinity is as combining one by one makes it; what precedes it stays.  dtype is that of
        the result, as in a `reduction`: by default the operand's, int32 for 8-bit integers (which wrap around) and
        float32 for fp8."""
    def cummax(self, x: Operand, axis: int = -1, reverse: bool = False, *, name: str | None = None) -> Tensor:
        """The largest of each element and all before it along an axis; of all after it with reverse=True.  From a NaN on it is NaN."""
    def cummin(self, x: Operand, axis: int = -1, reverse: bool = False, *, name: str | None = None) -> Tensor:
        """The smallest of each element and all before it along an axis; of all after it with reverse=True.  From a NaN on it is NaN."""
    def logcumsumexp(self, x: Operand, axis: int = -1, reverse: bool = False, *, name: str | None = None) -> Tensor:
        """The logarithms of the sums of exponentials of each element and all before it along an axis; of all after it with reverse=True, without overflow.  x holds floats."""
    def cummax_index(self, x: Operand, axis: int = -1, dtype: Any = int64, *, name: str | None = None) -> Tensor:
        """Where along an axis the largest of each element and all before it is, as `cummax` has it: the last
        of equals, and the last NaN if there is one.  dtype is int64 or int32."""
    def cummin_index(self, x: Operand, axis: int = -1, dtype: Any = int64, *, name: str | None = None) -> Tensor:
        """Where along an axis the smallest of each element and all before it is, as `cummin` has it: the last
        of equals, and the last NaN if there is one.  dtype is int64 or int32."""
    def scatter(
        self,
        x: Operand,
        index: Operand,
        updates: Operand,
        axis: int = 0,
        reduction: Literal["none", "add", "mul", "max", "min", "mean"] = "none",
        include_self: bool = True,
        *,
        name: str | None = None,
    ) -> Tensor:
        """x with updates put at the positions in index along an axis: element [i, index[i, j, k], k] of the result
        is updates[i, j, k] for axis 1, as in ONNX's ScatterElements and torch's scatter.

        x and updates have one dtype and one rank, the index is of integers.  updates' other sizes are at most x's; the
        index has updates' shape, or 1 in other dimensions than the axis, where it is then the same for all.  An index
        that is not in [0, size of the axis) is left out: nothing is put.

        reduction says what becomes of several updates of a place: none, the last one in the order of their positions
        along the axis is put; add, mul, max, min or mean (of floats), all of them and, unless include_self is False,
        the element that is there are combined.  Where nothing is put x stays.  NaN where one is NaN.  For bool add and
        max are "or", mul and min "and"; sums and products of integers wrap around.

        Time and memory are linear in the numbers of updates and elements, and the same inputs give the same bits.
        Updates are combined by as many threads as there are, with integer atomics, for which a sum of floats needs 12
        bytes (of float64: 20) for each place or update, whichever are fewer; products, by one thread for those that
        share their other coordinates.  Raises DTypeError, ShapeError, AttributeValueError."""
    def sort(self, x: Operand, axis: int = -1, descending: bool = False, *, name: str | None = None) -> Tensor:
        """The elements of each row along an axis in ascending order, or descending.

        NaN counts as larger than everything, -0 equals 0; equal elements stay in their order.  `sort_index` tells where the
        elements come from."""
    def sort_index(
        self, x: Operand, axis: int = -1, descending: bool = False, dtype: Any = int32, *, name: str | None = None
    ) -> Tensor:
        """The positions along an axis that the elements of `sort` come from: NumPy's stable argsort.

        dtype is that of the positions, int32 or int64.  It is made in one kernel with the elements themselves."""
    def topk(self, x: Operand, k: float, axis: int = -1, largest: bool = True, *, name: str | None = None) -> Tensor:
        """The k largest elements of each row along an axis from the largest on, or the k smallest from the smallest on.

        They are the first of what `sort` makes, in descending or ascending order: NaN counts as larger than everything, and
        of equal elements the first ones are taken.  `topk_index` tells where they come from."""
    def topk_index(
        self, x: Operand, k: float, axis: int = -1, largest: bool = True, dtype: Any = int32, *, name: str | None = None
    ) -> Tensor:
        """The positions along an axis that the elements of `topk` come from.

        dtype is that of the positions, int32 or int64.  It is made in one kernel with the elements themselves."""
    def sparse_2_4(self, x: Operand, metadata: Operand | None = None, *, name: str | None = None) -> Tensor:
        """x with two of every four neighbours along the last axis, the others being 0.  A four keeps its elements of the largest magnitude; of elements that are alike, the first.  NaN counts as
        infinite.

            With metadata, x (..., K / 2) has only the two elements of each four that are kept, in order; metadata has
            the place from 0 to 3 of each, integers of any dtype, mostly uint2; those of a four ascend, which nothing
            checks: results are undefined for others.  The result is then (..., K), with zeros between.  x has floats or
            integers of 8 bits.  Raises ShapeError where the last axis has no whole fours, and for metadata of another shape
            than x; DTypeError.

            Products of 16-bit floats with such a parameter or constant run on the sparse tensor cores of Hopper, which
            leave out products with the zeros: NaN and infinity there do not make the sum NaN."""
    def sparse_2_4_mask(self, x: Operand, *, name: str | None = None) -> Tensor:
        """Which elements sparse_2_4 keeps: true for two of every four neighbours along the last axis.  A four keeps its elements of the largest magnitude; of elements that are alike, the first.  NaN counts as
        infinite.
            Raises ShapeError and DTypeError as sparse_2_4 does."""
    def sparse_2_4_compress(self, x: Operand, *, name: str | None = None) -> tuple[Tensor, Tensor]:
        """(values, metadata) of what sparse_2_4 makes of x (..., K), as sparse_2_4 takes them: the two elements of
        each four that are kept, in order, (..., K / 2), and their places, of uint2.  Raises ShapeError and DTypeError
        as sparse_2_4 does."""
    def split(self, x: Tensor, parts: int | Sequence[int], axis: int = 0) -> list[Tensor]:
        """Returns slices of the tensor along an axis: ``parts`` equal ones, or ones of these sizes.

        Raises ShapeError if the axis does not split evenly, or if the sizes do not add up to it."""
    def flip(self, x: Tensor, axes: int | Sequence[int] | None = None, *, name: str | None = None) -> Tensor:
        """Returns the elements in reverse order along axes (None: all)."""
    def squeeze(self, x: Tensor, axes: int | Sequence[int] | None = None, *, name: str | None = None) -> Tensor:
        """Removes dimensions of size 1: all of them, or those of ``axes``.  Raises ShapeError for one of another size."""
    def unsqueeze(self, x: Tensor, axes: int | Sequence[int], *, name: str | None = None) -> Tensor:
        """Inserts dimensions of size 1; ``axes`` are their positions in the result."""
    def space_to_depth(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Moves blocks of an image to channels: (N, C, *S) -> (N, C * block^n, *S / block), n spatial dimensions.

        Channel c and position p in its block (row-major) become channel c * block^n + p, as in torch's pixel_unshuffle.
        Any dtype.  Raises ShapeError unless every spatial size is a multiple of ``block``."""
    def depth_to_space(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Moves channels to blocks of an image: (N, C * block^n, *S) -> (N, C, *S * block), n spatial dimensions.

        The inverse of `space_to_depth`, as torch's pixel_shuffle.  Any dtype.  Raises ShapeError unless the channels are a
        multiple of block^n."""
    def where(self, mask: Tensor, x: Any, y: Any, *, name: str | None = None) -> Tensor:
        """Returns x where mask is true (not 0), y elsewhere; all broadcast."""
    def arange(
        self, count: int, start: float = 0, step: float = 1, dtype: Any = int64, *, name: str | None = None
    ) -> Tensor:
        """Returns ``count`` numbers: start, start + step, ...  They are computed where they are used, and take no memory.

        For an integer dtype, start and step must be integers that it holds.  Raises AttributeValueError if they are not."""
    def tril(self, x: Tensor, diagonal: int = 0, *, name: str | None = None) -> Tensor:
        """Returns x with 0 above a diagonal of its last two dimensions: 0 is the main one, positive ones are above it."""
    def triu(self, x: Tensor, diagonal: int = 0, *, name: str | None = None) -> Tensor:
        """Returns x with 0 below a diagonal of its last two dimensions: 0 is the main one, positive ones are above it."""
    def one_hot(
        self,
        index: Tensor,
        depth: int,
        axis: int = -1,
        on: Any = 1,
        off: Any = 0,
        dtype: Any = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Returns ``on`` at the positions in ``index``, ``off`` elsewhere, along a new axis of ``depth`` elements.

        index holds integers, of any shape; the result has its shape with the new axis inserted at ``axis``.  on and off are
        numbers, or tensors of one element; dtype is that of the result (default: index's).  An index out of range gives
        ``off`` everywhere.  Raises DTypeError (index not of integers), AttributeValueError (no such axis)."""
    def take_along_axis(self, x: Tensor, index: Tensor, axis: int = -1, *, name: str | None = None) -> Tensor:
        """Returns elements of x along an axis by index: for axis 1, [i, j, k] is x[i, index[i, j, k], k].

        That is NumPy's take_along_axis and torch's gather.  x has any dtype, index holds integers.  The result has index's
        shape, which has x's rank and, except along ``axis``, is no larger than x's.  Positions outside of the axis are
        clamped to its ends.  Raises DTypeError, ShapeError."""
    def searchsorted(
        self, sequence: Tensor, values: Tensor, right: bool = False, dtype: Any = int32, *, name: str | None = None
    ) -> Tensor:
        """Counts, for each value, the elements of a sorted sequence that are less (``right``: less or equal).

        sequence has rows in ascending order along its last axis, NaN last: one row for all values, or as many as values
        have, (..., n) for values (..., m).  The result has the shape of values, and is int32 or int64; comparisons are in
        the promoted dtype.  NumPy's searchsorted gives the same, with side left or right.  For rows that are not sorted,
        the result is some number from 0 to n.  Raises ShapeError (other dimensions), DTypeError."""
    def gather_nd(self, x: Tensor, index: Tensor, batch: int = 0, *, name: str | None = None) -> Tensor:
        """Returns slices x[b..., *index[b..., i..., :]], as ONNX's GatherND.

        x (B..., D1, ..., Dk, R...) of any dtype, index (B..., I..., k) of integers -> (B..., I..., R...).  The first
        ``batch`` dimensions, B..., are common to both; the last one of index has positions along the next k dimensions of
        x.  Positions outside of a dimension are clamped to its ends.  Raises DTypeError, ShapeError."""
    def scatter_nd(
        self, x: Tensor, index: Tensor, updates: Tensor, reduction: Reduction = "none", *, name: str | None = None
    ) -> Tensor:
        """Returns x with slices replaced, or combined as `scatter` does, as ONNX's ScatterND.

        x (D1, ..., Dk, R...), index (I..., k) of integers, updates (I..., R...) of x's dtype -> as x.  The last dimension
        of index has positions along the first k dimensions of x.  Updates at a position outside of a dimension are left
        out.  Raises DTypeError, ShapeError, AttributeValueError."""
    def einsum(self, equation: str, *operands: Tensor, name: str | None = None) -> Tensor:
        """Returns sums of products by Einstein's convention, as NumPy's einsum: "bij,bjk->bik" is a batched matmul.

        Operands are combined from left to right, each step a matrix product where something is summed.  "..." stands for
        dimensions that broadcast.  The result and all intermediate sums and products have the promoted dtype.  Raises
        AttributeValueError, ShapeError."""
    def block_scale_dequantize(
        self,
        x: Tensor,
        scale: Tensor,
        block_size: int | Sequence[int],
        dtype: Any = float32,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Returns elements times the scale of their block, rounded once to ``dtype``, as cuDNN's op of this name.

        x has any dtype but bool, mostly of 8 or 4 bits; scale has floats: float8_e8m0 in MX formats, float8_e4m3 in NVFP4.
        block_size has the sizes of a block along the last dimensions of x, an integer that along the last one; scale has
        x's shape divided by them, rounded up: the last blocks have what is left.  Raises ShapeError where scale has not one
        for each; DTypeError; AttributeValueError for sizes below 1."""
    def dequantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, dtype: Any = None, *, name: str | None = None
    ) -> Tensor:
        """Returns (x - zero_point) * scale, rounded once to ``dtype``, by default the scale's.

        scale has a number for each block of x; its shape, whose last dimensions are x's, says how large they are: [] is one
        for all elements, [N, 1] one for each row, [N, K / 64] one for 64 elements of a row.  zero_point has as many, or
        broadcasts to them.  x and zero_point have any dtype but bool, scale has floats.  Raises ShapeError for a scale that
        does not divide x into blocks; DTypeError."""
    def resample(self, x: Tensor, axis: int, index: Any, weights: Any = None, *, name: str | None = None) -> Tensor:
        """Returns sums over k of ``weights[i, k] * x[index[i, k]]`` along an axis; without weights, ``x[index[i]]``.

        index (n,) or (n, taps) holds positions on the axis; weights are finite numbers, as many as index has, and need an x
        of floats.  The result has x's dtype.  Raises AttributeValueError, ShapeError, DTypeError."""
    def interpolate(
        self, x: Tensor, size: Any, mode: Mode = "nearest", align_corners: bool = False, *, name: str | None = None
    ) -> Tensor:
        """Returns an image (N, C, spatial...) scaled to other spatial sizes, as torch's interpolate.

        mode is nearest (element floor(i * old / new)), linear or cubic (coefficient -0.75), along each spatial dimension.
        Linear and cubic are for floats; they align the edges of both images or, with align_corners, the centres of their
        outermost elements.

        size is one integer for all spatial dimensions, or one each; the result (N, C, *size) has x's dtype.  Raises
        AttributeValueError (size or mode), ShapeError (an axis without elements, or longer than `MAX_TABLE`), DTypeError."""
    def grid_sample(
        self,
        x: Tensor,
        grid: Tensor,
        mode: Mode = "linear",
        padding: Beyond = "zeros",
        align_corners: bool = False,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Returns an image sampled at the coordinates in a grid, as torch's grid_sample.

        x (N, C, spatial...), grid (N, positions..., dimensions), both floats -> (N, C, positions...) of x's dtype.  The
        last dimension of grid has a coordinate along each spatial dimension, the last one first, from -1 to 1: from edge to
        edge of the image or, with align_corners, from centre to centre of its outermost elements.  mode is nearest (halfway
        cases to even), linear or cubic (coefficient -0.75).  Beyond the image there are zeros, its border, or its
        reflection.  Raises AttributeValueError, ShapeError, DTypeError."""
    def sample(
        self,
        logits: Tensor,
        temperature: Any = 1.0,
        top_k: Any = None,
        top_p: Any = None,
        seed: Any = 0,
        offset: Any = 0,
        dtype: Any = int64,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Draws the position of an element along the last axis with probability softmax(logits / temperature).

        top_k leaves the k largest logits alone, and those that equal the last of them; top_p, of what is left, the fewest
        of the largest whose probabilities reach it, and those that equal the last of them.  A temperature of 0 takes the
        largest logit, the first of several.  Where there is NaN, the first of these is drawn.  temperature, top_k and top_p
        are numbers, or tensors that broadcast to logits with a last axis of 1; in tensors a temperature or top_p that is
        not positive leaves the largest logits, and a top_k below 1 is 1.  seed and offset are those of `rng_uniform`: the
        same ones give the same tokens.  The result has the shape of logits without the last axis, and dtype int32 or int64.

        Raises AttributeValueError, DTypeError (logits that are no floats), ShapeError (no elements to draw from, or tensors
        of other shapes)."""
    def cast(self, x: Tensor, dtype: Any, *, saturate: bool = True, name: str | None = None) -> Tensor:
        """Returns the tensor in another dtype: floats round to nearest even, or truncate and saturate to integers.

        NaN becomes the integer 0.  What an 8-bit float does not hold, infinity included, becomes its largest number, or
        with saturate=False infinity (NaN where the dtype has no infinity)."""
    def gradients(self, loss: Tensor, wrt: Tensor | Sequence[Tensor], seed: Any = None) -> list[Tensor]:
        """Adds the gradients of a loss to the graph, and returns them: one for each tensor of ``wrt``, of its type.

        loss is a tensor of floats of one element.  Any other needs a seed: a tensor or array of its shape, or a number, by
        which its elements are weighted.  wrt holds tensors of floats, inputs of the graph or not.  The gradient by a tensor
        is zeros if the loss does not depend on it, or only in jumps (by rounding, comparisons, positions).  Gradients are
        tensors like others, named "d x": fused with what is around them, and differentiable as far as their ops are.

        Gradients have the tensor's dtype, and losses of products that of the operands where it has 16 bits.  Raises
        GradientError (an op without a gradient), ShapeError (no seed, or one of another shape), DTypeError (no floats),
        GraphError (tensors of another graph)."""
