"""Arrays recognised all at once: torch tensors (on the CPU), CuPy's (a stand-in), DeviceArrays; and what is not."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.engines import frameworks
from fusegraph.engines.arguments import Argument
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime.arrays import CPU, Device, DeviceArray, cuda_device
from fusegraph.runtime.streams import stream_query

SHAPES = {"a": (4, 6), "b": (6,), "c": (4, 1)}


def arguments(device: Device) -> list[Argument]:
    graph = fg.Graph("read")
    tensors = [graph.tensor(name, shape) for name, shape in SHAPES.items()]
    return [Argument(t, "input", "cpu", device) for t in tensors]


# ---- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def read(request: pytest.FixtureRequest, torch: Any, monkeypatch: pytest.MonkeyPatch) -> frameworks.Reader:
    """Returns a reader that has seen valid tensors before: with torch's guards it has learned what they look like."""
    if not request.param:
        monkeypatch.setattr(frameworks, "_guards", lambda _: None)
    reader = frameworks.reader("torch", arguments(CPU), CPU)
    assert addresses(reader, tensors(torch)) is not None
    return reader


def tensors(torch: Any) -> list[Any]:
    return [torch.zeros(shape) for shape in SHAPES.values()]


def addresses(reader: frameworks.Reader, arrays: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the addresses that a reader finds, checked against torch."""
    found = reader(arrays, 0)
    assert found is None or found == tuple(x.data_ptr() for x in arrays)
    return found


def test_torch_has_guards_that_work(torch: Any) -> None:
    """Without them calls are right but slower; a release that changes them should be noticed."""
    assert frameworks._guards(torch) is not None


def test_guards_are_used(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    guards = frameworks._guards(torch)
    assert guards is not None

    def counted(*arrays: Any, **how: Any) -> Any:
        made.append(len(arrays))
        return guards(*arrays, **how)

    monkeypatch.setattr(frameworks, "_guards", lambda _: counted)
    reader = frameworks.reader("torch", arguments(CPU), CPU)
    for _ in range(5):
        assert addresses(reader, tensors(torch)) is not None
    assert made == [3]
    x, b, c = tensors(torch)
    b.requires_grad_()
    with torch.no_grad():
        for number in range(100):  # others to torch's guards each time, but right
            x.requires_grad_(number % 2 == 0)
            assert addresses(reader, (x, b, c)) is not None
            assert addresses(reader, tensors(torch)) is not None
    assert len(made) == frameworks._LESSONS
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_torch_tensors_that_are_not_as_declared(torch: Any, read: frameworks.Reader) -> None:
    a, b, c = tensors(torch)
    for wrong in (
        torch.zeros(6, 4),
        torch.zeros(4, 6, 1),
        torch.zeros(24),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 12)[:, ::2],
        torch.zeros(6).expand(4, 6),
        torch.zeros(4, 6, dtype=torch.int32),
        torch.zeros(4, 6, dtype=torch.float64),
        torch.zeros(4, 6, device="meta"),
        torch._neg_view(a),
        torch.zeros(4, 6).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(6)] * 4),
        torch.nested.nested_tensor([torch.zeros(6)] * 4, layout=torch.jagged),
        torch.zeros(4, 6, requires_grad=True),
        np.zeros((4, 6), np.float32),
        None,
        1.0,
        [a],
    ):
        assert addresses(read, (wrong, b, c)) is None
        assert addresses(read, (a, b, c)) is not None
        assert read((a, b, wrong), 0) is None

    class Subclass(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    assert read((a.as_subclass(Subclass), b, c), 0) is None


def test_torch_tensors_that_are(torch: Any, read: frameworks.Reader) -> None:
    a, b, c = tensors(torch)
    whole = torch.zeros(100)
    with torch.inference_mode():
        of_inference = torch.zeros(4, 6)
        assert addresses(read, (of_inference, b, c)) is not None
        assert addresses(read, (a, b, c)) is not None
    for right in (a, torch.nn.Parameter(a), whole[3:27].view(4, 6), a.detach(), of_inference, torch.zeros(8, 6)[2:6]):
        with torch.no_grad():
            for _ in range(2):
                assert addresses(read, (right, b, c)) is not None
        assert (addresses(read, (right, b, c)) is None) == right.requires_grad
        right = right.detach()
        for _ in range(2):
            assert addresses(read, (right, b, c)) is not None
    odd = torch.zeros(40).as_strided((4, 1), (1, 7))  # the stride of a dimension of one
    for column in (odd, c, odd):
        assert addresses(read, (a, b, column)) is not None
    two = frameworks.reader("torch", arguments(CPU)[:1] * 2, CPU)
    for _ in range(3):
        assert addresses(two, (a, a)) is not None


def test_tensors_that_change_in_place(torch: Any, read: frameworks.Reader) -> None:
    """The very same objects are given again after each change."""
    a, b, c = tensors(torch)
    before = addresses(read, (a, b, c))
    assert before is not None
    a.set_(torch.ones(50)[5:29].view(4, 6))
    after = addresses(read, (a, b, c))
    assert after is not None
    assert after[0] != before[0]
    a.data = torch.ones(4, 6)
    assert addresses(read, (a, b, c)) is not None
    for change, undo in (
        (lambda: a.t_(), lambda: a.t_()),
        (lambda: a.resize_(6, 4), lambda: a.resize_(4, 6)),
        (lambda: b.resize_(7), lambda: b.resize_(6)),
        (
            lambda: setattr(a, "data", torch.ones(4, 6, dtype=torch.float64)),
            lambda: setattr(a, "data", torch.ones(4, 6)),
        ),
        (lambda: a.unsqueeze_(0), lambda: a.squeeze_(0)),
        (lambda: a.as_strided_((4, 6), (1, 4)), lambda: a.as_strided_((4, 6), (6, 1))),
    ):
        change()
        assert addresses(read, (a, b, c)) is None
        undo()
        assert addresses(read, (a, b, c)) is not None


def test_executables_refuse_torch_tensors_as_ever(torch: Any) -> None:
    """After calls that went well, and through torch's guards, errors say what they always say."""
    graph = fg.Graph("two")
    a, b = graph.tensor("a", (4, 6)), graph.tensor("b", (6,))
    graph.output(a + b, name="y")
    executable = graph.compile("cpu")
    x, v, y = torch.ones(4, 6), torch.arange(6.0), torch.empty(4, 6)
    for _ in range(3):
        assert executable(x, v, out=y) is y
        assert torch.equal(y, x + v)
        assert torch.equal(executable(x, v), x + v)
        assert torch.equal(executable(b=v, a=x), x + v)
    shared = torch.ones(30)
    for message, arrays, out in (
        (r"input 'a' of graph 'two' has shape \[6, 4\]", (torch.ones(6, 4), v), None),
        (r"input 'b' of graph 'two' has dtype float64", (x, v.double()), None),
        (r"input 'a' of graph 'two' has strides \[1, 4\]", (torch.ones(6, 4).t(), v), None),
        (r"output 'y' of graph 'two' overlaps input 'a'", (shared[:24].view(4, 6), v), shared[6:].view(4, 6)),
        (r"output 'y' of graph 'two' has shape \[6\]", (x, v), v),
        (r"input 'a' is a Tensor without memory", (_emptied(torch), v), None),
        (r"input 'b' lies at address", (x, torch.from_numpy(np.zeros(25, np.uint8)[1:].view(np.float32))), None),
    ):
        with pytest.raises(ArgumentError, match=message):
            executable(*arrays, out=out)
        assert torch.equal(executable(x, v, out=y), x + v)
    own = x.clone()
    assert executable(own, v, out=own) is own
    assert torch.equal(own, x + v)
    whole = torch.ones(60)
    misaligned = whole[1:25].view(4, 6)  # no multiple of 16 bytes: another variant
    for _ in range(2):
        assert torch.equal(executable(misaligned, v, out=y), misaligned + v)
        assert torch.equal(executable(x, v, out=y), x + v)
    assert set(executable._built) == {16, 1}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these features beta or deprecated
@pytest.mark.parametrize("first", [True, False], ids=["first", "after others"])
def test_torch_tensors_of_other_kinds(torch: Any, first: bool) -> None:
    """Each is an error that says what is wrong, as an input and as an output, whether or not guards have been made."""
    graph = fg.Graph("one")
    graph.output(graph.tensor("a", (3, 3)) + 1, name="y")
    executable = graph.compile("cpu")
    plain = torch.ones(3, 3)
    for _ in range(0 if first else 3):
        executable(plain)
        executable(plain, out=torch.empty(3, 3))

    class Derived(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    wrapped = torch._subclasses.FakeTensorMode().from_tensor(plain)
    batched, tracked = [], []
    torch.vmap(lambda x: batched.append(x) or x)(torch.ones(2, 3, 3))
    torch.func.grad(lambda x: tracked.append(x) or x.sum())(plain)
    with torch.autograd.forward_ad.dual_level():
        kinds = {
            "is a nested torch tensor; pass": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
            "NestedTensor without memory": torch.nested.nested_tensor([plain[0]] * 3, layout=torch.jagged),
            "layout torch.sparse_coo": torch.eye(3).to_sparse(),
            "layout torch.sparse_csr": torch.eye(3).to_sparse_csr(),
            "layout torch.sparse_bsr": torch.eye(4).to_sparse_bsr((2, 2)),
            "layout torch._mkldnn": plain.to_mkldnn() if torch.backends.mkldnn.is_available() else plain.to_sparse(),
            "quantised": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
            "torch device meta": plain.to("meta"),
            "FakeTensor": wrapped,
            "without memory of its own": torch._to_functional_tensor(plain),
            "without memory": torch._efficientzerotensor((3, 3)),
            "cannot be reached": torch.nn.parameter.UninitializedParameter(),
            "memory": batched[0],
            "cannot be reached|without memory": tracked[0],
            "dtype torch.complex64": torch.ones(3, 3, dtype=torch.complex64).conj(),
            "pending negation": torch.ones(3, 3, dtype=torch.complex64).conj().imag,
            "without memory.*storage": _emptied(torch),
            r"requires a gradient.*\.detach\(\).*no_grad": torch.ones(3, 3, requires_grad=True),
            r"requires a gradient.*a\.detach|y\.detach": torch.nn.Parameter(plain),
            "with a tangent": torch.autograd.forward_ad.make_dual(plain, plain),
        }
        for message, x in kinds.items():
            for arguments in ({"a": x}, {"a": plain, "out": x}):
                with pytest.raises((ArgumentError, DeviceError), match=message):
                    executable(**arguments)
        assert torch.equal(executable(plain), plain + 1)
    with torch.no_grad():
        assert torch.equal(executable(torch.nn.Parameter(plain)), plain + 1)
    result = executable(plain.as_subclass(Derived))
    assert type(result) is torch.Tensor
    assert torch.equal(result, plain + 1)


def _emptied(torch: Any) -> Any:
    x = torch.ones(4, 6)
    x.untyped_storage().resize_(0)
    return x


# ---- CuPy, in a stand-in: an array has what the reader looks at


class Memory:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class ndarray:
    def __init__(self, shape: tuple[int, ...], ptr: int = 0x1000, dtype: str = "f4", device_id: int = 0) -> None:
        like = np.empty(shape, dtype)
        self.shape, self.strides, self.dtype, self.data = like.shape, like.strides, like.dtype, Memory(ptr, device_id)


def test_cupy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=ndarray))  # type: ignore[arg-type]
    read = frameworks.reader("cupy", arguments(cuda_device(1)), cuda_device(1))
    a, b, c = (ndarray(shape, 256 * k, device_id=1) for k, shape in enumerate(SHAPES.values(), 1))
    assert read((a, b, c), 0) == (256, 512, 768)
    transposed = ndarray((4, 6), device_id=1)
    transposed.strides = (4, 16)
    for wrong in (
        ndarray((6, 4), device_id=1),
        ndarray((4, 6), device_id=0),
        ndarray((4, 6), dtype="i4", device_id=1),
        transposed,
        np.zeros((4, 6), np.float32),
    ):
        assert read((wrong, b, c), 0) is None
    assert frameworks.reader("cupy", arguments(CPU), CPU)((a, b, c), 0) is None


def test_cupy_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(get_current_stream=lambda index: types.SimpleNamespace(ptr=100 + index))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setattr("fusegraph.runtime.streams._queries", {})
    query = stream_query("cupy")
    assert [query(0), query(1)] == [100, 101]


# ---- DeviceArray, and others


def device_array(shape: tuple[int, ...], /, **changes: Any) -> DeviceArray:
    like = np.empty(shape, np.float32)
    fields = {
        "pointer": 4096,
        "shape": shape,
        "strides": tuple(s // 4 for s in like.strides),
        "dtype": fg.float32,
        "device": cuda_device(0),
        "owner": None,
    }
    return DeviceArray(**{**fields, **changes})


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_any_number_of_arrays(count: int) -> None:
    shape = (3, 5)
    graph = fg.Graph("many")
    tensors = [graph.tensor(f"x{i}", shape) for i in range(count)]
    device = cuda_device(0)
    read = frameworks.reader("fusegraph", [Argument(t, "input", "cuda", device) for t in tensors], device)
    given = [device_array(shape, pointer=256 * k) for k in range(1, count + 1)]
    assert read(given, 0) == tuple(256 * k for k in range(1, count + 1))
    for wrong in range(count):
        changed = [*given]
        changed[wrong] = device_array((5, 3), pointer=256)
        assert read(changed, 0) is None


def test_device_arrays() -> None:
    read = frameworks.reader("fusegraph", arguments(cuda_device(0)), cuda_device(0))
    a, b, c = (device_array(shape, pointer=256 * k) for k, shape in enumerate(SHAPES.values(), 1))
    assert read((a, b, c), 0) == (256, 512, 768)
    assert read((a, b, c), 5) is None  # their contents are complete on another stream
    for changes in (
        {"shape": (6, 4)},
        {"strides": (1, 4)},
        {"dtype": fg.int32},
        {"device": cuda_device(1)},
        {"stream": 7},
    ):
        assert read((device_array((4, 6), **changes), b, c), 0) is None
    assert read((np.zeros((4, 6), np.float32), b, c), 0) is None


def test_other_frameworks_are_looked_at_one_by_one() -> None:
    given = [np.zeros(s, np.float32) for s in SHAPES.values()]
    for framework in ("numpy", "jaxlib", "somebody"):
        assert frameworks.reader(framework, arguments(CPU), CPU)(given, 0) is None
