"""Mutated ONNX models: bytes of the file that are others, and parts of the model that are others.

python tests/onnx_mutations.py FIRST LAST loads the models of these seeds, made of the node tests of onnx; each must end
as a graph or as an error of ours, within its time, and all within a limit of memory.  Prints how many ended how.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import warnings
from collections import Counter

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto
from onnx_node_tests import cases, messages

from fusegraph.errors import FusegraphError
from fusegraph.onnx import InputValueError, Model, from_proto
from fusegraph.plan import plan

#: Bytes of addresses that the process may have, and seconds that one model may take.
MEMORY, SECONDS = 6 << 30, 20.0
#: Models of more elements are not run, of more bytes not mutated.
MAX_ELEMENTS, MAX_BYTES = 100_000, 4000
INTEGERS = (0, 1, -1, 2, 3, 7, 13, 64, 65, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"))
_INTEGER_TYPES = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT64)


def mutated(model: bytes, seed: int) -> bytes:
    """Returns a model with one or a few changes, which depend on the seed."""
    draw = random.Random(seed)
    if draw.random() < 0.3:
        return _other_bytes(model, draw)
    proto = ModelProto()
    proto.ParseFromString(model)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        _change(proto, draw)
    try:
        return proto.SerializeToString()
    except (ValueError, DecodeError):
        return model


def _other_bytes(model: bytes, draw: random.Random) -> bytes:
    data = bytearray(model)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data) + 1) if data else 0
        end = min(at + draw.choice((1, 1, 2, 8, 64)), len(data))
        kind = draw.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end]
        elif kind == 3:
            data[at:end] = draw.randbytes(end - at)
        else:
            del data[at:]
    return bytes(data)


def _change(model: ModelProto, draw: random.Random) -> None:
    """Changes, adds or removes a value of a field that is set; now and then sets another field."""
    message = draw.choice(list(messages(model)))
    present = [field for field, _ in message.ListFields()]
    every = list(message.DESCRIPTOR.fields)
    field = draw.choice(present if present and draw.random() < 0.9 else every)
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_MESSAGE or draw.random() < 0.1:
            message.ClearField(field.name)
        else:
            _assign(message, field, draw, getattr(message, field.name), model)
        return
    values = getattr(message, field.name)
    kind = draw.randrange(4)
    if len(values) and kind == 0:
        del values[draw.randrange(len(values))]
    elif len(values) and kind == 1 and field.type == FieldDescriptor.TYPE_MESSAGE:
        values.add().CopyFrom(draw.choice(list(values)))
    elif len(values) > 1 and kind == 2:
        first, second = draw.sample(range(len(values)), 2)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            kept = type(values[first])()
            kept.CopyFrom(values[first])
            values[first].CopyFrom(values[second])
            values[second].CopyFrom(kept)
        else:
            values[first], values[second] = values[second], values[first]
    elif field.type != FieldDescriptor.TYPE_MESSAGE:
        number = _value(field, draw, values[0] if len(values) else None, model)
        if number is not None and len(values) and kind == 3:
            values[draw.randrange(len(values))] = number
        elif number is not None:
            values.append(number)


def _assign(message: Message, field: FieldDescriptor, draw: random.Random, old: object, model: ModelProto) -> None:
    value = _value(field, draw, old, model)
    if value is not None:
        setattr(message, field.name, value)


def _value(field: FieldDescriptor, draw: random.Random, old: object, model: ModelProto) -> object:
    """Draws a value of a field's type: an extreme one, one close to the old one, or another name of the model."""
    if field.type in _INTEGER_TYPES:
        value = draw.choice(INTEGERS)
        if isinstance(old, int) and draw.random() < 0.4:
            value = old + draw.choice((-1, 1))
        if field.type == FieldDescriptor.TYPE_INT32:
            value = (value + 2**31) % 2**32 - 2**31
        return value % 2**64 if field.type == FieldDescriptor.TYPE_UINT64 else max(min(value, 2**63 - 1), -(2**63))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw.choice(field.enum_type.values).number
    if field.type == FieldDescriptor.TYPE_STRING:
        names = [name for node in model.graph.node for name in (*node.input, *node.output, node.op_type)]
        return draw.choice([*names, "", "x", "../x", "\n", "🙂" * 200])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice(
            (b"", b"\xff", draw.randbytes(8), (2**62).to_bytes(8, "little"), (-1).to_bytes(8, "little", signed=True))
        )
    return None


# ---- loading them


def outcome(data: bytes, seed: int) -> str:
    """Reads and runs a model; returns the name of the fusegraph error raised, or what was done with the graph."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return "no protocol buffer"
    try:
        built = graph_of(model)
    except FusegraphError as error:
        return type(error).__name__ if len(str(error)) < 3000 else "an error of pages"
    if sum(t.size for t in built.graph.tensors.values()) > MAX_ELEMENTS:
        return "built"
    try:
        built.compile("reference")(*(np.ones(t.shape, t.dtype.numpy) for t in built.inputs.values()))
    except FusegraphError as error:
        if built.by_size is None:
            raise
        return f"{type(error).__name__} of sizes"  # no graph is made before the sizes are known
    if seed % 8 or built.by_size is not None:
        return "run"
    plan(built.graph)
    return "run and planned"


def graph_of(model: ModelProto) -> Model:
    try:
        return from_proto(model)
    except InputValueError as error:
        return from_proto(model, values={name: np.array([2, 1]) for name in error.inputs})


def main(first: int, last: int) -> None:
    corpus = [test.model.SerializeToString() for test in cases()]
    corpus = [data for data in corpus if len(data) < MAX_BYTES]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    warnings.simplefilter("error", RuntimeWarning)
    ends: Counter[str] = Counter()
    slowest = 0.0
    for seed in range(first, last):
        start = time.process_time()
        try:
            ends[outcome(mutated(corpus[seed % len(corpus)], seed), seed)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        slowest = max(slowest, time.process_time() - start)
        assert slowest < SECONDS, f"seed {seed} took {slowest:.1f} s"
    print(json.dumps({"ends": ends, "slowest": slowest}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
