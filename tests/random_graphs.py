"""Random graphs as builder code: pointwise nodes around the anchors of a theme."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from random_assignments import assign
from random_nodes import DTYPES, FLOATS, NodeAuthor

from fusegraph.errors import GradientError
from fusegraph.ops.convolution import smallest_sizes

_SIZES = (1, 2, 3, 5, 4, 7, 8, 16, 17, 33, 64, 130, 257, 1025)
_POOLS = (
    "max_pool", "max_pool_index", "avg_pool", "adaptive_max_pool", "adaptive_max_pool_index", "adaptive_avg_pool",
    "max_pool_backward", "max_pool_backward_index", "avg_pool_backward", "adaptive_max_pool_backward",
    "adaptive_max_pool_backward_index", "adaptive_avg_pool_backward", "global_max_pool", "global_avg_pool",
    "local_response_norm", "local_contrast_norm", "local_response_norm_backward", "local_contrast_norm_backward",
)  # fmt: skip


class GraphAuthor(NodeAuthor):
    """Writes a graph around the anchors of its theme."""

    # ---- the graph

    def write_graph(self) -> None:
        compute = ', compute_dtype="float64"' if self.chance(10) else ""
        compute = compute or (', compute_dtype="tf32"' if self.chance(10) else "")
        self.write(f'g = fg.Graph("{self.draw.pick(("fuzz", "relu", "size"))}"{compute})')
        self.dtypes = [self.draw.pick(FLOATS), self.draw.pick(FLOATS), self.draw.pick(DTYPES)]
        self.base = self.base_shape()
        for number in range(self.draw.integer(1, 4)):
            self.input(self.base if number == 0 else self.broadcastable(self.base))
        anchors = 0 if self.theme == "pointwise" else self.draw.pick((1, 1, 1, 2, *((2, 3) * (self.theme == "rows"))))
        steps = ["anchor"] * anchors + ["pointwise"] * self.draw.integer(1, 8)
        while steps:
            step = steps.pop(self.draw.integer(0, len(steps) - 1))
            if step == "anchor":
                getattr(self, self.theme)()
                if self.theme in ("matmul", "conv") and self.chance(15):
                    steps.append("reduction")  # of its result, more likely than of something else
            elif step == "reduction":
                self.rows()
            else:
                self.pointwise()
        for _ in range(self.draw.pick((0, 0, 0, 0, 0, 0, 1, 2))):
            assign(self)
        self.outputs()

    def base_shape(self) -> tuple[int, ...]:
        ranks = {"pointwise": (0, 6), "rows": (1, 5), "matmul": (2, 4), "conv": (3, 5), "pool": (3, 5)}
        low, high = ranks[self.theme]
        rank = max(low, min(self.draw.pick((2, 1, 3, 4, 0, 5, 6)), high))
        left = 4096
        shape = []
        for _ in range(rank):
            shape.append(self.draw.pick([s for s in _SIZES if s <= left]))
            left //= shape[-1]
        if self.theme == "pointwise" and rank and self.chance(2):
            shape[0] = 0
        order = self.draw.integer(0, 1)
        return tuple(shape if order else reversed(shape))

    def rows(self) -> None:
        if self.chance(40):
            self.composite()
            return
        x = self.number(self.any())
        tensor = self.tensor(x)
        if tensor.rank and self.chance(15):
            axis = self.draw.integer(0, tensor.rank - 1)
            if self.chance(50):
                self.sort(x, axis)
                return
            if not tensor.dtype.is_bool and self.chance(20):
                self.define(f"g.{self.draw.pick(('cummax_index', 'cummin_index'))}({x}, {axis}{self.name_argument()})")
                return
            running = ("cumsum", "cumprod", "cummax", "cummin", *(("logcumsumexp",) if tensor.dtype.is_float else ()))
            op = self.draw.pick(running)
            self.define(f"g.{op}({x}, {axis}, reverse={self.chance(50)}{self.name_argument()})")
            return
        axes = tuple(d for d in range(tensor.rank) if self.draw.integer(0, 1))
        modes = ("add", "max", "min", "amax", "norm1", "any", "all", "argmin", "argmax", "mul_no_zeros")
        mode = self.draw.pick((*modes, *(("avg", "norm2", "mul", "var") if tensor.dtype.is_float else ())))
        if mode.startswith("arg") and not axes:
            mode = "max"
        if mode.removeprefix("arg") in ("max", "min", "amax") and any(tensor.shape[d] == 0 for d in axes):
            mode = "add"
        keepdims = "" if self.chance(70) else ", keepdims=False"
        self.define(f"g.reduction({x}, {mode!r}, {axes}{keepdims}{self.name_argument()})")

    def sort(self, x: str, axis: int) -> None:
        k = self.draw.integer(0, self.tensor(x).shape[axis])
        what = self.draw.pick((f"sort({x}", f"sort_index({x}", f"topk({x}, {k}", f"topk_index({x}, {k}"))
        key = "largest" if "topk" in what else "descending"
        self.define(f"g.{what}, axis={axis}, {key}={self.chance(50)}{self.name_argument()})")

    def composite(self) -> None:
        if self.chance(15):
            self.attention()
            return
        x = self.real(self.any())
        shape = self.tensor(x).shape
        if not shape or 0 in shape:
            return
        axis = self.draw.integer(-len(shape), len(shape) - 1)
        if len(shape) >= 3 and self.chance(30):
            self.batch_norm(x)
            return
        if self.chance(25):
            self.row_gradient(x, axis)
            return
        op = self.draw.pick(("softmax", "log_softmax", "logsumexp", "layernorm", "rmsnorm", "adalayernorm"))
        if op in ("softmax", "log_softmax"):
            self.define(f"g.{op}({x}, {axis}{self.name_argument()})")
            return
        axes = (axis,) if self.chance(60) else tuple(range(len(shape) // 2, len(shape)))
        if op == "logsumexp":
            self.define(f"g.{op}({x}, {axes}, {self.chance(60)}{self.name_argument()})")
            return
        weights = ", ".join(self.input(self.broadcastable(shape)) for _ in range(1 if op == "rmsnorm" else 2))
        # Of a few equal numbers the variance is 0, and nothing would be known of what is divided by it.
        self.define(f"g.{op}({x}, {weights}, {axes}, epsilon=0.1{self.name_argument()})")

    def attention(self) -> None:
        """Adds attention of new tensors, possibly rotated, or its gradients, with some of the options."""
        op = self.draw.pick(("sdpa", "sdpa", "sdpa_backward", "sdpa_fp8"))
        dtypes = ("float8_e4m3", "float8_e5m2") if op == "sdpa_fp8" else ("bfloat16", "float16", "float32")
        dtype = self.draw.pick(dtypes)
        batch, shared, group = self.draw.pick((1, 2)), self.draw.pick((1, 2)), self.draw.pick((1, 1, 3))
        rows, keys, depth = self.draw.pick((1, 5, 17, 33)), self.draw.pick((1, 7, 33, 40)), self.draw.pick((8, 16, 24))
        width = self.draw.pick((depth, 8, 20))
        q = self.input((batch, shared * group, rows, depth), dtype)
        k, v = (self.input((batch, shared, keys, n), dtype) for n in (depth, width))
        if op != "sdpa_fp8" and self.chance(60):
            turned = self.draw.pick((0, 4))
            freqs = self.input((rows, 1, 1, turned or depth), "float32")
            q = self.define(f"g.{self.draw.pick(('rope', 'rope_backward'))}({q}, {freqs}, rope_dim={turned})")
        how = self.draw.pick(
            ("", ", use_causal_mask=True", ", diagonal_band_left_bound=3, diagonal_alignment='BOTTOM_RIGHT'",
             ", soft_cap=2.0", ", use_alibi_mask=True")
        )  # fmt: skip
        operands = []
        if self.chance(30):
            mask = self.input(self.broadcastable((batch, shared * group, rows, keys)), "bool")
            operands.append(f"mask={mask}")
        if self.chance(20):
            operands.append(f"seq_len_kv={self.whole((batch,), keys)}")
        if op == "sdpa_fp8":
            scales = [self.scale(n) for n in (0.5, 0.25, 2.0, 1 / 256, 256.0, 4.0)]
            how += self.draw.pick(("", ", dtype='bfloat16'", ", dtype='float32'"))
            self.define(f"g.sdpa_fp8({', '.join([q, k, v, *scales, *operands])}{how})")
            return
        if self.chance(20):
            operands += [f"seed={self.whole((1,), 9)}", f"offset={self.whole((1, 1, 1, 1), 9)}"]
            how += ", dropout_probability=0.25"
        if op == "sdpa":
            self.define(f"g.sdpa({', '.join([q, k, v, *operands])}{how})")
            return
        if self.chance(30):
            bias = self.input(self.broadcastable((batch, shared * group, rows, keys)), self.draw.pick(FLOATS[:3]))
            operands.append(f"bias={bias}")
        # The result and the statistics are of this attention: others would tell of probabilities above 1.
        forward = f"g.sdpa({', '.join([q, k, v, *operands])}{how}, generate_stats=True)"
        result, stats = (self.define(f"{forward}[{n}]") for n in range(2))
        loss = self.input(self.tensor(result).shape, dtype)
        gradients = f"g.sdpa_backward({', '.join([q, k, v, result, loss, stats, *operands])}{how})"
        for n in {self.draw.integer(0, 3 if operands else 2): None for _ in range(2)}:
            self.define(f"{gradients}[{n}]")

    def whole(self, shape: tuple[int, ...], most: int) -> str:
        """Adds a constant of non-negative integers."""
        seed = self.draw.integer(0, 9)
        return self.define(f"g.constant(np.random.default_rng({seed}).integers(0, {most + 1}, {shape}), dtype='int32')")

    def scale(self, usual: float) -> str:
        """Adds the factor by which tensors of 8-bit floats are multiplied: a usual one, or any."""
        if self.chance(30):
            return self.input((1, 1, 1, 1), "float32")
        return self.define(f"g.constant(np.full((1, 1, 1, 1), {usual}), dtype='float32')")

    def row_gradient(self, x: str, axis: int) -> None:
        """Adds the gradient of a softmax or a norm along an axis."""
        shape = self.tensor(x).shape
        loss = self.real(self.input(shape))
        op = self.draw.pick(("softmax", "log_softmax", "layernorm", "rmsnorm", "adalayernorm"))
        if op.endswith("softmax"):
            self.define(f"g.{op}_backward({loss}, {x}, {axis}{self.name_argument()})")
            return
        row = tuple(1 if d == axis % len(shape) else n for d, n in enumerate(shape))
        scale, count = self.real(self.input(self.broadcastable(shape))), 1 if op == "rmsnorm" else 2
        kept = ", ".join(self.input(row) for _ in range(count))
        self.define(f"g.{op}_backward({loss}, {x}, {scale}, {kept}, {axis})[{self.draw.integer(0, count)}]")

    def batch_norm(self, x: str) -> None:
        """Adds a norm of [N, C, ...], with or without its statistics and their gradients."""
        shape = self.tensor(x).shape
        one = (1, shape[1], *(1 for _ in shape[2:]))
        op = self.draw.pick(("groupnorm", "batchnorm", "instancenorm", "genstats", "batchnorm_inference"))
        if op == "genstats":
            self.define(f"g.genstats({x})[{self.draw.integer(0, 1)}]")
            return
        if op == "batchnorm_inference":
            self.define(f"g.batchnorm_inference({x}, {', '.join(self.input(one) for _ in range(4))})")
            return
        groups = f", groups={self.draw.pick([k for k in (1, 2, 3, 4) if shape[1] % k == 0])}" if op[0] == "g" else ""
        phase = ', norm_forward_phase="training"' if op != "batchnorm" else ""
        scale, bias = self.real(self.input(one)), self.input(one)
        if not self.chance(50):
            first = "[0]" if op == "batchnorm" else ""
            self.define(f"g.{op}({x}, {scale}, {bias}{groups}, epsilon=0.1){first}")
            return
        kept = [self.define(f"g.{op}({x}, {scale}, {bias}{groups}, epsilon=0.1{phase})[{k}]") for k in range(3)]
        loss = self.real(kept[0])
        self.define(f"g.{op}_backward({loss}, {x}, {scale}, {kept[1]}, {kept[2]}{groups})[{self.draw.integer(0, 2)}]")

    def pool(self) -> None:
        x, op = self.number(self.any()), self.draw.pick(_POOLS)
        if "max" not in op or op.endswith("_backward"):
            x = self.real(x)
        shape = self.tensor(x).shape
        if not shape or 0 in shape:
            return
        spatial = 3 <= len(shape) <= 5 and self.chance(70)
        axes = {self.draw.integer(0, len(shape) - 1) for _ in range(self.draw.integer(1, 2))}
        along = tuple(range(2, len(shape))) if spatial else tuple(sorted(axes))
        end = ("" if spatial else f", axes={along}") + (self.name_argument() if "backward" not in op else "")
        if op.startswith("global"):
            self.define(f"g.{op}({x}{end})")
        elif op.startswith("local"):
            operands = f"{x}, {x}" if "backward" in op else x
            if "response" in op:
                end, how = f", axis={along[0]}{self.name_argument()}", f"{self.draw.integer(1, 4)}, alpha=0.5"
            else:
                how = f"{self.draw.pick((3, 2))}, epsilon=0.1"
            self.define(f"g.{op}({operands}, {how}{end})")
        elif op.startswith("adaptive"):
            size = [self.draw.pick([1, 2, shape[a], min(shape[a] + 1, 40), max(shape[a] // 2, 1)]) for a in along]
            self.pooled(x, op, f"{size}{end}", end, along)
        else:
            self.pooled(x, op, f"{self.windows([shape[a] for a in along], 'avg' in op)}{end}", "", along)

    def pooled(self, x: str, op: str, how: str, adaptive: str, along: tuple[int, ...]) -> None:
        """Adds pooling, or the gradient of some pooling of a tensor."""
        backward = "_backward" in op
        forward = op.replace("_backward", "")
        result = self.define(f"g.{forward}({x}, {how})")
        if not backward:
            return
        loss = self.input(self.tensor(result).shape, self.draw.pick(FLOATS))
        size = [self.tensor(x).shape[a] for a in along]
        given = f"{loss}, {result}" if "index" in op else f"{loss}, {x}" if "max" in op else loss
        if op == "adaptive_max_pool_backward":
            self.define(f"g.{op}({given}{adaptive})")
        elif op.startswith("adaptive"):
            self.define(f"g.{op}({given}, {size}{adaptive})")
        else:
            self.define(f"g.{op}({given}, {how})" if op == "max_pool_backward" else f"g.{op}({given}, {size}, {how})")

    def windows(self, sizes: Sequence[int], average: bool) -> str:
        window, stride, padding, dilation = [], [], [], []
        for size in sizes:
            t, d = self.draw.pick((3, 2, 1, 5)), 1 if average else self.draw.pick((1, 1, 1, 2))
            before, after = self.draw.integer(0, 2), self.draw.integer(0, 2)
            window.append(1 if (t - 1) * d + 1 > size + before + after else t)
            dilation.append(d)
            stride.append(self.draw.pick((1, 2, 1, 3)))
            padding.append((before, after))
        how = f"{window}, stride={stride}, padding={padding}" + (", ceil_mode=True" if self.chance(20) else "")
        if average:
            return how + (", count_include_pad=False" if self.chance(50) else "")
        return f"{how}, dilation={dilation}"

    def matmul(self) -> None:
        found = [n for n in self.names if self.tensor(n).rank >= 2 and 0 not in self.tensor(n).shape]
        x = self.draw.pick(found[::-1]) if found else self.input((5, 7))
        self.consumed.add(x)
        shape = self.tensor(x).shape
        left = self.chance(20)
        inner = shape[-2] if left else shape[-1]
        other = self.draw.pick((3, 1, 8, 17, 32, 65))
        while prod(shape) * other > 200_000:
            other = max(other // 4, 1)
        own = (other, inner) if left else (inner, other)
        batch = self.broadcastable(shape[:-2])
        w = self.input((*batch, *own), self.draw.pick((self.tensor(x).dtype.name, *self.dtypes)))
        dtype = self.draw.pick(("", "", "", ', dtype="float32"'))
        result = self.define(f"g.matmul({w}, {x}{dtype})" if left else f"g.matmul({x}, {w}{dtype})")
        assert self.tensor(result).size <= 10**6
        if not left:
            self.gate(result, w)

    def conv(self) -> None:
        found = [n for n in self.names if 3 <= self.tensor(n).rank <= 5 and 0 not in self.tensor(n).shape]
        x = self.draw.pick(found[::-1]) if found else self.input((2, 3, 9))
        if self.chance(15):  # what Winograd's algorithm may be asked to do
            sizes = (
                self.draw.integer(1, 2),
                self.draw.pick((3, 1, 8)),
                self.draw.integer(1, 12),
                self.draw.integer(1, 9),
            )
            x = self.input(sizes, "float32")
        self.consumed.add(x)
        shape = self.tensor(x).shape
        channels, spatial = shape[1], shape[2:]
        groups = self.draw.pick([k for k in (1, 2, 3, channels) if channels % k == 0])
        per_group = self.draw.pick((1, 2, 3, 8) if groups < 64 else (1,))
        while prod(shape) // groups * groups * per_group > 100_000 and per_group > 1:
            per_group -= 1
        taps, stride, dilation, padding = [], [], [], []
        for size in spatial:
            t, d = self.draw.pick((1, 3, 2, 5)), self.draw.pick((1, 1, 1, 2))
            before, after = self.draw.integer(0, 2), self.draw.integer(0, 2)
            if (t - 1) * d + 1 > size + before + after or size * t > 600:
                t = 1
            taps.append(t)
            dilation.append(d)
            stride.append(self.draw.pick((1, 1, 2, 3)))
            padding.append((before, after))
        dtype = self.draw.pick((self.tensor(x).dtype.name, *self.dtypes))
        mode = ', mode="convolution"' if self.chance(20) else ""
        kind = self.draw.pick(("fprop", "fprop", "dgrad", "wgrad"))
        if len(spatial) == 2 and self.tensor(x).dtype.name == "float32" and kind != "wgrad" and self.chance(70):
            taps, stride, dilation, groups, dtype = [3, 3], [1, 1], [1, 1], 1, "float32"
            padding = [(1, 1) if size < 3 else pair for size, pair in zip(spatial, padding)]
            tile = self.draw.pick((2, 4))
            mode += f", compute_dtype='float32', algorithm='winograd_{tile}x{tile}'"
        filters = groups * per_group
        how = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}{mode}"
        if kind == "dgrad" and self.backward(x, per_group, groups, taps, how, dtype):
            return
        if kind == "wgrad":
            reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation)]
            out = [(n + sum(p) - r) // s + 1 for n, p, r, s in zip(spatial, padding, reach, stride)]
            loss = self.input((shape[0], filters, *out), dtype)
            self.define(f"g.conv_wgrad({x}, {loss}, taps={taps}, {how})")
            return
        w = self.input((filters, channels // groups, *taps), dtype)
        self.gate(self.define(f"g.conv_fprop({x}, {w}, {how})"), w)

    def gate(self, product: str, operand: str) -> None:
        """Sometimes adds the same product with another operand B, and a node that reads both."""
        if not self.chance(15):
            return
        expression = self.lines[-1].split(" = ", 1)[1]
        declared = next(line for line in self.lines if line.startswith(f"{operand} = "))
        other = self.define(f"g.tensor('factor{len(self.names)}', {declared.split(', ', 1)[1]}")
        self.consumed |= {product, other, operand}
        both = self.define(re.sub(rf"\b{operand}\b", other, expression))
        self.consumed.add(both)
        first, second = self.number(product), self.number(both)
        self.define(f"g.{self.draw.pick(('mul', 'mul', 'add', 'max', 'min'))}({first}, {second})")

    def backward(self, loss: str, per_group: int, groups: int, taps: Sequence[int], how: str, dtype: str) -> bool:
        """Returns a transposed convolution of a tensor, if the padding leaves a result that is not too large."""
        filters, *positions = self.tensor(loss).shape[1:]
        keys: dict[str, Any] = eval(f"dict({how})")
        smallest = smallest_sizes(positions, taps, keys["stride"], keys["padding"], keys["dilation"])
        size = [n + self.draw.integer(0, s - 1) for n, s in zip(smallest, keys["stride"])]
        if min(smallest) < 1 or self.tensor(loss).shape[0] * groups * per_group * prod(size) > 100_000:
            return False
        w = self.input((filters, per_group, *taps), dtype)
        self.define(f"g.conv_dgrad({loss}, {w}, size={size}, {how})")
        return True

    # ---- outputs

    def gradients(self) -> None:
        """Differentiates one tensor of floats by others; the gradients are outputs."""
        floats = [n for n in self.names if self.tensor(n).dtype.is_float]
        if not floats:
            return
        loss = floats[-1]
        alike = [n for n in floats if self.tensor(n).shape == self.tensor(loss).shape]
        seed = self.draw.pick((*alike, "1.0", "0.5"))
        for _ in range(self.draw.integer(1, 2)):
            x = self.draw.pick(floats)
            try:
                self.write(f"g.output(g.gradients({loss}, [{x}], {seed})[0])")
            except GradientError:  # bits have none
                return

    def outputs(self) -> None:
        leaves = [n for n in self.names if n not in self.consumed]
        extra = [self.names[self.draw.integer(0, len(self.names) - 1)] for _ in range(self.draw.integer(0, 2))]
        chosen = dict.fromkeys([self.names[-1], *leaves[-2:], *extra])
        for number, name in enumerate(chosen):
            tensor = self.tensor(name)
            how = f', name="y{number}"' if self.chance(70) else ""
            if self.chance(15):
                how += f", dtype={self.draw.pick(DTYPES)!r}"
            self.write(f"g.output({name}{how}{self.layout(tensor.shape, repeats=False)})")
