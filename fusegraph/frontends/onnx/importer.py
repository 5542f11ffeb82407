"""Imports the nodes of an ONNX graph one after another.

Every body (the model's graph, a branch of If, a function) is a scope of its own, which maps names to tensors.
Everything unsupported is collected, so that one error names all of it; nodes that depend on it are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto

from codegen.declined import Declined
from fusegraph.errors import DTypeError, FusegraphError, ModelError
from fusegraph.frontends.onnx import functions
from fusegraph.frontends.onnx.control import CONTROL
from fusegraph.frontends.onnx.functions import domain_of
from fusegraph.frontends.onnx.table import TABLE, Call, Result, Unknown
from fusegraph.frontends.onnx.tensors import DTYPES, MAX_RANK, to_array, type_name
from fusegraph.frontends.onnx.values import Values
from fusegraph.graph import Graph, Tensor
from fusegraph.origins import Origin, written_for

#: How many nodes a model may have, including those of functions and iterations.
MAX_NODES = 50_000
#: How deep bodies may be nested.
MAX_DEPTH = 32


def short(text: str, most: int = 80) -> str:
    """Returns a text from the file, quoted and shortened for messages."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


class Missing(Tensor):
    """Stands for the result of something unsupported."""

    def __init__(self) -> None:
        pass


MISSING = Missing()


@dataclass(frozen=True)
class Scope:
    """The names that nodes of a body see.

    values      name -> tensor, for this body; outer: the scope of the body around it, for branches.
    opsets      domain -> version.
    attributes  those of a function's call, to which its nodes may refer.
    depth       how many bodies are around this one.
    """

    values: dict[str, Tensor]
    opsets: Mapping[str, int]
    outer: Scope | None = None
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    depth: int = 0

    def find(self, name: str) -> Tensor | None:
        """Returns the tensor of a name, here or in an outer scope; None if there is none."""
        if name in self.values or self.outer is None:
            return self.values.get(name)
        return self.outer.find(name)


class Importer:
    """Writes bodies to a graph.

    functions  the model's own.
    folder     where the model's external data is.
    shapes     those of results whose sizes depend on values, by name.
    """

    def __init__(
        self, graph: Graph, functions: Iterable[FunctionProto], folder: Path | None, shapes: Mapping[str, Any]
    ) -> None:
        functions = list(functions)
        check_text(*(text for f in functions for text in (f.name, f.domain, f.overload, *f.input, *f.output)))
        self.graph = graph
        self.values = Values(graph)
        #: What is unsupported -> descriptions of the nodes that need it.
        self.refused: dict[str, list[str]] = {}
        #: Values that must be known but are not -> the inputs that they depend on.
        self.unknown: dict[str, tuple[str, ...]] = {}
        self._functions = {(domain_of(f.domain), f.name, f.overload): f for f in functions}
        self._folder = folder
        self._shapes = shapes
        self._nodes = 0
        self._names: set[str] = set()
        self._uses: Counter[str] = Counter()

    # ---- bodies

    def body(self, graph: GraphProto, scope: Scope) -> None:
        """Imports the initializers and nodes of a graph; its inputs are in the scope already."""
        if not scope.depth:
            self._uses = uses(graph)
        for tensor in graph.initializer:
            check_text(tensor.name)
            if tensor.name not in scope.values:  # an input that has a default, and was given
                self._define(scope, tensor.name, self.initialiser(tensor))
        for sparse in graph.sparse_initializer:
            check_text(sparse.values.name)
            self.refuse("sparse tensors", f"initialiser {short(sparse.values.name)}")
            self._define(scope, sparse.values.name, MISSING)
        self.nodes(graph.node, scope)

    def initialiser(self, tensor: TensorProto) -> Tensor:
        """Returns an initializer as a constant of the graph."""
        what = f"initialiser {short(tensor.name)}"
        if tensor.data_type not in DTYPES:
            return self.refuse(f"type {type_name(tensor.data_type)}", what)
        return self.graph.constant(to_array(tensor, what, self._folder), name=self.free_name(tensor.name))

    def nodes(self, nodes: Sequence[NodeProto], scope: Scope) -> None:
        """Imports nodes in their order, which must be topological.  Raises ModelError that names the node."""
        for node in nodes:
            check_text(node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
            check_text(*(name for a in node.attribute for name in (a.name, a.ref_attr_name)))
            self._count_node()
            outputs = list(node.output)
            while outputs and not outputs[-1]:
                outputs.pop()
            try:
                inputs = [self._input(scope, name) for name in node.input]
                with written_for(partial(_origin, node)) if node.name else nullcontext():
                    results = self._results(node, inputs, len(outputs), scope)
                if len(results) < len(outputs):
                    results += [self.refuse(f"{node.op_type}: output {len(results)}", label(node))] * len(outputs)
                for name, tensor in zip(outputs, results):
                    if name:
                        self._define(scope, name, self._named(tensor, name))
            except (FusegraphError, OverflowError) as error:  # from its attributes, its inputs or the graph
                raise ModelError(f"{label(node)}: {str(error)[:1000]}") from None

    def _input(self, scope: Scope, name: str) -> Tensor | None:
        if not name:
            return None
        found = scope.find(name)
        if found is None:
            raise ModelError(
                f"its input {short(name)} is no input of the graph, no initialiser and no output of a node before it"
            )
        return found

    def _define(self, scope: Scope, name: str, tensor: Tensor) -> None:
        if name in scope.values:
            raise ModelError(f"{short(name)} is defined twice")
        scope.values[name] = tensor

    def _once(self, scope: Scope, tensor: Tensor) -> bool:
        """Tells whether at most one node of the model, or output, takes a tensor; False within functions and branches.

        All of its names but one are those of nodes that return what they take.
        """
        names = [name for name, value in scope.values.items() if value is tensor]
        return not scope.depth and sum(self._uses[name] for name in names) <= len(names)

    # ---- nodes

    def _results(self, node: NodeProto, inputs: list[Tensor | None], wanted: int, scope: Scope) -> list[Tensor]:
        """Returns the outputs of a node, or MISSING for each if it is unsupported."""
        try:
            if MISSING in inputs:
                if self._handled(node, scope):
                    return [MISSING] * wanted
                raise Declined(f"operator {operator_name(node)}")
            return self._written(node, inputs, wanted, scope)
        except Declined as refusal:
            if str(refusal):  # if empty, the reason was noted within a body
                self.refuse(str(refusal), label(node))
        except Unknown as unknown:
            self.unknown[f"{label(node)}: {unknown}"] = unknown.inputs
        return [MISSING] * wanted

    def _handled(self, node: NodeProto, scope: Scope) -> bool:
        """Tells whether an operator is supported for some inputs."""
        domain = domain_of(node.domain)
        key = (domain, node.op_type)
        if key in TABLE or (not domain and node.op_type in CONTROL) or (*key, node.overload) in self._functions:
            return True
        schema = functions.schema_of(node, scope.opsets.get(domain, 0))
        return schema is not None and functions.has_body(schema)

    def _written(self, node: NodeProto, inputs: list[Tensor | None], wanted: int, scope: Scope) -> list[Tensor]:
        node = functions.resolved(node, scope.attributes)
        domain = domain_of(node.domain)
        own = self._functions.get((domain, node.op_type, node.overload))
        if own is not None:
            return self._function(own, node, inputs, wanted, scope, {})
        if domain not in scope.opsets:
            raise ModelError(f"the model imports no operator set of domain {short(node.domain or 'ai.onnx')}")
        version = scope.opsets[domain]
        schema = functions.schema_of(node, version)
        if schema is None:
            raise Declined(f"operator {operator_name(node)}")
        if version < functions.OLDEST and not functions.same_since(schema, node):
            raise Declined(f"operator {operator_name(node)} as before operator set {functions.OLDEST}")
        attributes = self._attributes(node, schema)
        functions.check_counts(node, schema, wanted)
        call = Call(
            self.graph, node, version, attributes, wanted, self.values, self._shapes, partial(self._once, scope)
        )
        if domain == "" and node.op_type in CONTROL:
            return self._checked(self._control(call, inputs, scope))
        handler = TABLE.get((domain, node.op_type))
        refusal = Declined(f"operator {operator_name(node)}")
        if handler is not None:
            try:
                return [self.values.settled(t, inputs) for t in self._checked(handler(call, *inputs))]
            except Declined as refused:
                refusal = refused
            except DTypeError as refused:  # a dtype that an op does not take
                refusal = Declined(f"{operator_name(node)}: {str(refused).partition(' (')[0][:200]}")
        body = functions.body_of(node, schema, version, inputs)
        if body is None:
            raise refusal
        return self._function(body, node, inputs, wanted, scope, functions.defaults(schema))

    def _checked(self, result: Result) -> list[Tensor]:
        """Returns the result of a function of the table as a list.  Raises ModelError for too many dimensions."""
        results = [result] if isinstance(result, Tensor) else list(result)
        for tensor in results:
            if tensor.rank > MAX_RANK:
                raise ModelError(f"its result has {tensor.rank} dimensions; at most {MAX_RANK} are possible")
        return results

    def _attributes(self, node: NodeProto, schema: onnx.defs.OpSchema) -> dict[str, Any]:
        """Returns the attributes of a node by name, with the schema's defaults filled in."""
        given: dict[str, AttributeProto] = {}
        for attribute in node.attribute:
            if attribute.name in given:
                raise ModelError(f"attribute {short(attribute.name)} is given twice")
            given[attribute.name] = attribute
        functions.check_attributes(schema, given)
        return {name: self._attribute(a) for name, a in (functions.defaults(schema) | given).items()}

    def _attribute(self, attribute: AttributeProto) -> Any:
        """Returns an attribute's value as Python or NumPy objects; graphs as they are."""
        if attribute.type == AttributeProto.STRING:
            return decoded(attribute.s)
        if attribute.type == AttributeProto.STRINGS:
            return [decoded(s) for s in attribute.strings]
        if attribute.type == AttributeProto.TENSOR:
            if attribute.t.data_type not in DTYPES:
                raise Declined(f"type {type_name(attribute.t.data_type)}")
            return to_array(attribute.t, f"attribute {short(attribute.name)}", self._folder)
        value = onnx.helper.get_attribute_value(attribute)
        return list(value) if isinstance(value, Sequence) else value

    def _function(
        self,
        body: FunctionProto,
        node: NodeProto,
        inputs: list[Tensor | None],
        wanted: int,
        scope: Scope,
        defaults: Mapping[str, AttributeProto],
    ) -> list[Tensor]:
        """Writes a function's body; returns its first ``wanted`` outputs.  ``defaults`` are those of its attributes."""
        if len(inputs) > len(body.input):
            raise ModelError(f"function {short(body.name)} takes {len(body.input)} inputs, got {len(inputs)}")
        attributes = {**defaults, **{a.name: a for a in (*body.attribute_proto, *node.attribute)}}
        opsets = {**scope.opsets, **{domain_of(o.domain): o.version for o in body.opset_import}}
        values = {name: tensor for name, tensor in zip(body.input, inputs) if tensor is not None}
        inner = Scope(values, opsets, None, attributes, self._deeper(scope))
        self.nodes(functions.without_absent(body, inputs), inner)
        named = [name if node.output[number] else "" for number, name in enumerate(body.output[:wanted])]
        return [self._output(inner, name) if name else MISSING for name in named]

    def _control(self, call: Call, inputs: list[Tensor | None], scope: Scope) -> list[Tensor]:
        """Returns the outputs of a control flow node, whose attributes are bodies."""

        def written(graph: GraphProto, given: Sequence[Tensor]) -> list[Tensor]:
            if len(given) != len(graph.input):
                raise ModelError(f"its body takes {len(graph.input)} inputs, not {len(given)}")
            self._count_node()
            values = {value.name: tensor for value, tensor in zip(graph.input, given)}
            inner = Scope(values, scope.opsets, scope, scope.attributes, self._deeper(scope))
            self.body(graph, inner)
            results = [self._output(inner, value.name) for value in graph.output]
            if MISSING in results:
                raise Declined("")
            return results

        return CONTROL[call.node.op_type](call, written, *inputs)

    def _output(self, scope: Scope, name: str) -> Tensor:
        found = scope.find(name) if name else None
        if found is None:
            raise ModelError(f"no node makes the output {short(name)}")
        return found

    def _count_node(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ModelError(f"there are more than {MAX_NODES} nodes, those of functions and iterations included")

    def _deeper(self, scope: Scope) -> int:
        if scope.depth >= MAX_DEPTH:
            raise ModelError(f"functions and branches are more than {MAX_DEPTH} deep, or call themselves")
        return scope.depth + 1

    # ---- helpers

    def refuse(self, what: str, where: str) -> Tensor:
        self.refused.setdefault(what, []).append(where)
        return MISSING

    def _named(self, tensor: Tensor, name: str) -> Tensor:
        """Renames a result after the model's value, unless it has a name from the model already; returns it."""
        if tensor is not MISSING and tensor.name not in self._names:
            self.graph.rename(tensor, self.free_name(name))
        return tensor

    def free_name(self, name: str) -> str:
        """Turns the name of a value into a valid name that no tensor of the graph has, and reserves it."""
        stem = valid_name(name)
        result, count = stem, len(self._names)
        while result in self._names:
            count += 1
            result = f"{stem}_{count}"
        self._names.add(result)
        return result


def _origin(node: NodeProto) -> Origin:
    """Returns where a node with a name comes from: torch's exporters put modules' paths, and lines of source, there."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    return Origin(node.name.rpartition("/")[0], node.name, node.op_type, notes.get("pkg.torch.onnx.stack_trace", ""))


def uses(graph: GraphProto) -> Counter[str]:
    """Returns how often nodes and outputs of a graph, and of the graphs in its nodes, take each name."""
    found = Counter(name for node in graph.node for name in node.input)
    found.update(value.name for value in graph.output)
    for attribute in (a for node in graph.node for a in node.attribute):
        for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
            found.update(uses(body))
    return found


def valid_name(name: str) -> str:
    """Returns the name of a value with what names of tensors cannot have replaced."""
    allowed = (c if c.isascii() and (c.isalnum() or c in "_.:/[](),+@#-") else "_" for c in name[:120].lstrip("/"))
    return "".join(allowed) or "value"


def check_text(*texts: object) -> None:
    """Raises ModelError for names that are not UTF-8, which protocol buffers give as bytes."""
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"a name is no UTF-8: {str(text)[:80]}")


def decoded(text: bytes) -> str:
    """Decodes a string attribute.  Raises ModelError if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise ModelError("a string attribute is no UTF-8") from None


def operator_name(node: NodeProto) -> str:
    """Returns an operator's name for messages, with its domain if that is not the default one."""
    domain = domain_of(node.domain)
    return f"{domain[:80]}.{node.op_type[:80]}" if domain else node.op_type[:80]


def label(node: NodeProto) -> str:
    """Describes a node for messages by its name or, if that is empty, its first output."""
    named = f"node {short(node.name)}" if node.name else f"the node of {short(next(iter(node.output), ''))}"
    return f"{named} ({operator_name(node)})"
