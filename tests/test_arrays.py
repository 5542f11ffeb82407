"""Views of arrays of every framework, DLPack in both directions, and new arrays in the caller's framework."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen.dtypes import ALL, bfloat16, bool_, float8_e4m3, float8_e5m2, float16, float32, int32
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import arrays, dlpack, driver, entry_points, views
from fusegraph.runtime.arrays import CPU, cuda_device, view

# --- NumPy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_numpy_dtypes(dtype):
    x = np.zeros((3, 4), dtype.numpy)
    seen = view(x, name="x")
    assert (seen.pointer, seen.shape, seen.strides, seen.dtype) == (x.ctypes.data, (3, 4), (4, 1), dtype)
    assert (seen.device, seen.framework, seen.readonly) == (CPU, "numpy", False)
    assert seen.owner is x


BASE = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
LAYOUTS = {
    "offset": BASE[1, 1:],
    "steps": BASE[:, ::2, 1::3],
    "transposed": BASE.transpose(0, 3, 1, 2),
    "broadcast": np.broadcast_to(BASE[0, 0, 0], (7, 5)),
    "scalar": BASE[1, 2, 3, 4, ...],
    "empty": BASE[:, :0],
    "fortran": np.asfortranarray(BASE),
    "backwards of one": BASE[:1, :1][::-1, ::-1],
    "backwards of none": BASE[:, :0][::-1, ::-1],
    "subclass": BASE[0, 0].view(type("Labelled", (np.ndarray,), {})),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_layouts_address_the_same_elements(layout):
    x = LAYOUTS[layout]
    for _ in range(2):  # the second time from the remembered layout
        seen = view(x, name="x")
        assert seen.pointer == x.ctypes.data
        assert min((0, *seen.strides)) == 0
        again = arrays.to_numpy(seen)
        np.testing.assert_array_equal(again, x)
        assert again.size == 0 or np.shares_memory(again, x)


def test_numpy_readonly_and_lifetime():
    x = np.ones(4)
    x.flags.writeable = False
    seen = view(x, name="x")
    assert seen.readonly
    with pytest.raises(ValueError, match="read-only"):
        arrays.to_numpy(seen)[0] = 2
    kept = weakref.ref(x)
    copy = arrays.to_numpy(seen)
    del x, seen
    gc.collect()
    assert kept() is not None
    del copy
    gc.collect()
    assert kept() is None


def packed(dtype: str) -> np.ndarray[Any, Any]:
    """Returns a field behind one byte in a packed record: its strides are not a multiple of its size."""
    return np.zeros(6, np.dtype([("a", "i1"), ("b", dtype)], align=False))["b"]


REFUSED = {
    "negative": (np.zeros((3, 4))[:, ::-1], r"negative stride \(-8 bytes\) on axis 1"),
    "big-endian": (np.zeros(3, ">f4"), r"dtype >f4, of foreign byte order"),
    "object": (np.zeros(3, object), "dtype object, Python objects"),
    "complex": (np.zeros(3, np.complex64), "dtype complex64, which fusegraph does not have; it has float64, float32"),
    "text": (np.zeros(3, "U4"), "dtype <U4"),
    "wide": (np.zeros(3, np.longdouble), "which fusegraph does not have"),
    "other fp8": (np.zeros(3, ml_dtypes.float8_e4m3), "which fusegraph does not have"),
    "packed": (packed("f4"), "stride of 5 bytes on axis 0, not whole 4-byte elements"),
    "unaligned": (np.zeros(9, np.uint8)[1:].view(np.float32), "not a multiple of its 4-byte elements"),
    "masked": (np.ma.masked_array(np.zeros(3), mask=True), "masked array"),
    "list": ([1.0, 2.0], r"builtins.list, which is not an array; pass a NumPy"),
    "number": (3.0, "builtins.float, which is not an array"),
    "none": (None, "NoneType"),
    "buffer": (array.array("f", [1.0]), "array.array, which is not an array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    x, message = REFUSED[case]
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message) as error:
            view(x, name="weight")
        assert "'weight'" in str(error.value)


def test_layouts_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(views, "_LAYOUTS", 3)
    for size in list(range(1, 12)) * 2:
        assert view(np.zeros((size, 2)), name="x").shape == (size, 2)


def test_the_slow_way_to_an_address_agrees(monkeypatch):
    monkeypatch.setattr(views.sys.implementation, "name", "other")
    slow = views._VIEWER_MAKERS["numpy", "ndarray"](np)
    x = BASE[1, 1:, ::2]
    assert slow(x, "x", 0)[:6] == view(x, name="x")[:6]


# --- protocols -----------------------------------------------------------------------------------------------------


class Producer:
    """Host memory available through DLPack only, as in a library without a NumPy interface."""

    def __init__(self, x: np.ndarray[Any, Any], *, versioned: bool = True, readonly: bool = False) -> None:
        self.x, self.versioned, self.readonly = x, versioned, readonly
        self.change: dict[str, int] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.change.get("device_type", dlpack.K_CPU), 0)

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        assert stream is None
        x, dtype = self.x, {d.numpy: d for d in ALL}[self.x.dtype]
        strides = tuple(s // x.itemsize for s in x.strides)
        versioned = self.versioned and max_version is not None
        capsule = dlpack.export(
            x.ctypes.data, x.shape, strides, dtype, CPU, x, versioned=versioned, readonly=self.readonly
        )
        if self.change:
            managed = dlpack._struct_of(capsule)
            for field, value in self.change.items():
                setattr(managed if hasattr(managed, field) else managed.tensor, field, value)
        return capsule


class OldProducer(Producer):
    """A producer from before DLPack 1.0: ``__dlpack__`` takes no version."""

    def __dlpack__(self, stream: int | None = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_dlpack_round_trip(dtype, versioned):
    x = np.arange(24).reshape(2, 3, 4).astype(dtype.numpy)
    seen = view(Producer(x, versioned=versioned), name="x")
    assert seen[:6] == (x.ctypes.data, (2, 3, 4), (12, 4, 1), dtype, CPU, "dlpack")
    np.testing.assert_array_equal(arrays.to_numpy(seen), x)


@pytest.mark.parametrize("x", [BASE.T, np.array(3, np.int32), BASE[:, :0], BASE[1:, ::2]])
def test_dlpack_layouts(x):
    seen = view(Producer(x), name="x")
    np.testing.assert_array_equal(arrays.to_numpy(seen), x)
    assert x.size == 0 or seen.pointer == x.ctypes.data


def test_dlpack_deleter_runs_when_the_view_dies():
    x = np.ones(1000)
    kept = weakref.ref(x)
    seen = view(Producer(x), name="x")
    host = arrays.to_numpy(seen)
    del x, seen
    gc.collect()
    assert kept() is not None
    assert host.sum() == 1000
    del host
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_capsules_nobody_consumes_are_released(versioned):
    x = np.ones(1000)
    kept = weakref.ref(x)
    capsule = Producer(x).__dlpack__(max_version=(1, 0) if versioned else None)
    del x
    gc.collect()
    assert kept() is not None  # still in our hands
    del capsule
    gc.collect()
    assert kept() is None


def ignore(*_: object) -> None: ...


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_dlpack_deleter_may_run_while_an_exception_passes(module):
    """The consumer's array is a temporary that dies as the exception unwinds the call."""
    from_dlpack = pytest.importorskip(module).from_dlpack
    x = np.ones(1000, np.float32)
    kept = weakref.ref(x)
    with pytest.raises(ZeroDivisionError):
        ignore(from_dlpack(Producer(x)), 1 / 0)
    del x
    gc.collect()
    assert kept() is None


def test_dlpack_capsule_is_consumed_once():
    capsule = Producer(np.ones(3)).__dlpack__()
    dlpack.consume(capsule)
    with pytest.raises(ValueError, match="not an unused DLPack capsule"):
        dlpack.consume(capsule)
    with pytest.raises(ValueError, match="not an unused DLPack capsule"):
        dlpack.consume("capsule")


def test_dlpack_readonly_and_old_producers():
    assert view(Producer(np.ones(3), readonly=True), name="x").readonly
    assert not view(Producer(np.ones(3)), name="x").readonly
    assert view(OldProducer(np.ones(3), versioned=False), name="x").shape == (3,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": 5, "bits": 128}, "code 5, 128 bits"),
        ({"lanes": 4}, "4 lanes"),
        ({"device_type": 10}, "device of DLPack type 10"),
        ({"major": 2}, "DLPack version 2"),
        ({"byte_offset": 3}, "not a multiple of its 8-byte"),
    ],
)
def test_dlpack_refused(change, message):
    producer = Producer(np.ones((3, 4)))
    producer.change = change
    with pytest.raises(ArgumentError, match=message):
        view(producer, name="x")


def test_dlpack_negative_strides_are_refused():
    x = np.ones((3, 4))[::-1]
    numpy_itself = type("Foreign", (), {"__dlpack__": x.__dlpack__, "__dlpack_device__": x.__dlpack_device__})()
    with pytest.raises(ArgumentError, match="negative stride"):
        view(numpy_itself, name="x")


def test_numpy_takes_our_capsules():
    x = np.arange(6.0).reshape(2, 3).T
    for versioned in (False, True):
        again = np.from_dlpack(Producer(x, versioned=versioned))
        np.testing.assert_array_equal(again, x)
        assert np.shares_memory(again, x)


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.interface = {"version": 3, "shape": (2, 3), "typestr": "<f4", "data": (0x1000, False)} | interface


class CudaInterface(Interface):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


@pytest.fixture
def fake_pointers(monkeypatch):
    """Simulates device memory: every address belongs to cuda:1, and stream synchronizations are recorded."""
    orders: list[tuple[int, ...]] = []
    monkeypatch.setattr(entry_points, "pointer_device", lambda pointer: 1 if pointer >= 0x1000 else None)
    monkeypatch.setattr(driver, "order", lambda *streams: orders.append(streams))
    return orders


def test_cuda_array_interface(fake_pointers):
    x = CudaInterface()
    seen = view(x, name="x", stream=9)
    assert seen == (0x1000, (2, 3), (3, 1), float32, cuda_device(1), "cuda_array_interface", x, False)
    assert fake_pointers == []
    seen = view(CudaInterface(strides=(4, 8), data=(0x2000, True), stream=7, typestr="|b1"), name="x", stream=9)
    assert (seen.strides, seen.readonly, seen.dtype) == ((4, 8), True, bool_)
    assert fake_pointers == [(7, 9, 1)]
    assert view(CudaInterface(shape=(0, 3), data=(0, False)), name="x").pointer == 0


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ({"typestr": ">f4"}, "foreign byte order"),
        ({"typestr": "<c8"}, "complex64"),
        ({"typestr": "nonsense"}, "dtype nonsense"),
        ({"strides": (-12, 4)}, "negative stride"),
        ({"strides": (12, 3)}, "stride of 3 bytes on axis 1"),
        ({"mask": CudaInterface()}, "mask"),
        ({"data": (0x1002, False)}, "not a multiple"),
        ({"data": (0x10, False)}, "no device memory"),
    ],
)
def test_cuda_array_interface_refused(fake_pointers, interface, message):
    with pytest.raises(ArgumentError, match=message):
        view(CudaInterface(**interface), name="x")


def test_cuda_array_interface_without_driver(monkeypatch):
    monkeypatch.setattr(driver, "_cuda", None)
    monkeypatch.setattr(driver, "_reason", "no CUDA driver (libcuda.so.1); use engine='cpu'")
    with pytest.raises(DeviceError, match=r"libcuda.so.1\); use engine='cpu'"):
        view(CudaInterface(), name="x")


def test_array_interface():
    memory = (ctypes.c_float * 6)(*range(6))

    class Host(Interface):
        @property
        def __array_interface__(self) -> dict[str, Any]:
            return self.interface

    x = Host(data=(ctypes.addressof(memory), True))
    seen = view(x, name="x")
    assert seen[:6] == (ctypes.addressof(memory), (2, 3), (3, 1), float32, CPU, "array_interface")
    assert seen.readonly
    with pytest.raises(ArgumentError, match="foreign byte order"):
        view(Host(data=(ctypes.addressof(memory), True), typestr=">f4"), name="x")
    with pytest.raises(ArgumentError, match="unusable __array_interface__"):
        view(Host(shape="x"), name="x")
    scalar = view(np.float32(2.5), name="alpha")
    assert (scalar.shape, scalar.readonly, arrays.to_numpy(scalar)[()]) == ((), True, 2.5)


# --- torch and JAX on the CPU --------------------------------------------------------------------------------------


def test_torch_dtypes():
    torch = pytest.importorskip("torch")
    for dtype in ALL:
        x = torch.zeros(3, 4).to(views.torch_dtype(torch, dtype))
        seen = view(x, name="x")
        assert seen[:6] == (x.data_ptr(), (3, 4), (4, 1), dtype, CPU, "torch")
        assert seen.owner is x


def test_torch_layouts():
    torch = pytest.importorskip("torch")
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    channels_last = base.contiguous(memory_format=torch.channels_last)
    for x in (
        base[1, 1:],
        base[..., ::2],
        base.permute(3, 1, 0, 2),
        base[0, 0, 0].expand(7, 5),
        base[:, :0],
        base.sum(),
    ):
        np.testing.assert_array_equal(arrays.to_numpy(view(x, name="x")), x.numpy())
    assert view(channels_last, name="x").strides == (60, 1, 15, 3)


def test_torch_tensors_with_gradient_and_parameters():
    torch = pytest.importorskip("torch")
    x = torch.ones(3, requires_grad=True)
    assert view(x, name="x").pointer == x.data_ptr()
    parameter = torch.nn.Parameter(torch.ones(3))
    assert view(parameter, name="w").pointer == parameter.data_ptr()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these features beta or deprecated
def test_torch_refused():
    torch = pytest.importorskip("torch")
    complex_ = torch.ones(3, dtype=torch.complex64)
    unaligned = torch.frombuffer(bytearray(9), dtype=torch.float32, count=2, offset=1)
    for x, message in (
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
        (complex_, "dtype torch.complex64"),
        (complex_.conj(), "dtype torch.complex64"),
        (complex_.conj().imag, "pending negation"),
        (torch.zeros(3, device="meta"), "torch device meta"),
        (torch.zeros(3, dtype=torch.complex128), "dtype torch.complex128"),
        (unaligned, "not a multiple of its 4-byte"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
    ):
        with pytest.raises(ArgumentError, match=message):
            view(x, name="x")


def test_torch_takes_our_capsules_and_releases_them():
    torch = pytest.importorskip("torch")
    gc.freeze()  # or every collection looks at all of torch
    for dtype in ALL:
        for versioned in (False, True):
            x = np.arange(6).reshape(2, 3).astype(dtype.numpy).T
            kept = weakref.ref(x)
            tensor = torch.from_dlpack(Producer(x, versioned=versioned))
            assert (tensor.data_ptr(), tuple(tensor.stride())) == (x.ctypes.data, (1, 3))
            assert tensor.dtype == views.torch_dtype(torch, dtype)
            del x
            gc.collect()
            assert kept() is not None
            del tensor
            gc.collect()
            assert kept() is None


def test_jax_dtypes():
    jax = pytest.importorskip("jax")
    for dtype in (float32, float16, bfloat16, float8_e4m3, float8_e5m2, bool_, int32):
        x = jax.numpy.ones((3, 4), dtype.numpy, device=jax.devices("cpu")[0])
        seen = view(x, name="x")
        assert seen[1:6] == ((3, 4), (4, 1), dtype, CPU, "jax")
        assert seen.readonly
        np.testing.assert_array_equal(arrays.to_numpy(seen), np.asarray(x))


def test_jax_refused():
    jax = pytest.importorskip("jax")

    def traced(x: Any) -> Any:
        view(x, name="x")
        return x

    with pytest.raises(ArgumentError, match="traced JAX value"):
        jax.jit(traced)(np.ones(3, np.float32))
    deleted = jax.numpy.ones(3)
    deleted.delete()
    with pytest.raises(ArgumentError, match="deleted"):
        view(deleted, name="x")


# --- new arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "dlpack"])
@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6), (16, 5, 1), (0, 4, 1)])
def test_allocator(framework, strides):
    if framework in ("torch", "jax"):
        pytest.importorskip(framework)
    for dtype in (float32, bfloat16, float8_e4m3, bool_):
        x = arrays.allocator(framework, (2, 3, 4), strides, dtype, CPU)()
        seen = view(x, name="y")
        assert seen[1:5] == ((2, 3, 4), strides, dtype, CPU)
        assert not seen.readonly
        assert seen.framework == ("torch" if framework == "torch" else "numpy")
        arrays.to_numpy(seen)[...] = 1
        done = arrays.hand_over(x, framework)
        assert view(done, name="y").framework == (framework if framework in ("torch", "jax") else "numpy")
        np.testing.assert_array_equal(arrays.to_numpy(done).astype(np.float32), 1)


def test_allocator_of_no_elements_and_of_no_dimensions():
    assert arrays.allocator("numpy", (0, 3), (3, 1), float32, CPU)().shape == (0, 3)
    assert arrays.allocator("numpy", (), (), float32, CPU)().shape == ()


# --- streams -------------------------------------------------------------------------------------------------------


def stream_like(**attributes: Any) -> Any:
    return type("Stream", (), attributes)()


def test_as_stream():
    assert arrays.as_stream(None) == 0
    assert arrays.as_stream(17) == arrays.as_stream(np.int64(17)) == 17
    assert arrays.as_stream(stream_like(__cuda_stream__=lambda self: (0, 18))) == 18
    assert arrays.as_stream(stream_like(__cuda_stream__=(0, 19))) == 19
    assert arrays.as_stream(stream_like(cuda_stream=20)) == 20
    assert arrays.as_stream(stream_like(ptr=21)) == 21
    assert arrays.as_stream(stream_like(handle=stream_like(__int__=lambda self: 22))) == 22
    for bad in (True, -1, "stream", object(), 1.0):
        with pytest.raises(ArgumentError, match=r"stream"):
            arrays.as_stream(bad)
    with pytest.raises(ArgumentError, match="version 1"):
        arrays.as_stream(stream_like(__cuda_stream__=lambda self: (1, 18)))


def test_as_stream_takes_the_bindings_streams():
    bindings = pytest.importorskip("cuda.bindings.driver")
    assert arrays.as_stream(bindings.CUstream(23)) == 23


def test_current_stream_on_the_cpu():
    for framework in ("numpy", "torch", "cupy", "jax", "fusegraph"):
        assert arrays.current_stream(framework, CPU) == 0
    assert arrays.current_stream("dlpack", cuda_device(0)) == 0
