"""Tests as a user of cudnn-frontend writes them, for a GPU; `test_cudnn_frontend_plugin` has the plugin run them.

One compares with what is wrong on purpose, one asks for what is refused, one is too large for the bound it is run with.
"""

import cudnn
import pytest
import torch

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT


@pytest.fixture(scope="module")
def handle():
    made = cudnn.create_handle()
    cudnn.set_stream(handle=made, stream=torch.cuda.Stream().cuda_stream)
    yield made
    cudnn.destroy_handle(made)


def build(graph):
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)


def product(handle, m, n, k):
    """Returns a graph of a matrix product, its inputs by tensor, and its output."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    a = torch.randint(-2, 3, (1, m, k), generator=generator, device="cuda").half()
    b = torch.randint(-2, 3, (1, k, n), generator=generator, device="cuda").half()  # sums are exact in any order
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)
    x, w = graph.tensor_like(a), graph.tensor_like(b)
    y = graph.matmul(x, w)
    y.set_output(True).set_data_type(HALF)
    return graph, {x: a, w: b}, y


def test_matmul(handle):
    graph, given, y = product(handle, 8, 16, 24)
    workspace = build(graph)
    out = torch.empty(y.get_dim(), device="cuda", dtype=torch.float16).as_strided(y.get_dim(), y.get_stride())
    graph.execute({**given, y: out}, workspace, handle=handle)
    torch.cuda.synchronize()
    a, b = given.values()
    torch.testing.assert_close(out, a @ b, rtol=2e-3, atol=2e-3)


def test_a_wrong_result(handle):
    graph, given, y = product(handle, 8, 16, 24)
    workspace = build(graph)
    out = torch.empty(y.get_dim(), device="cuda", dtype=torch.float16)
    graph.execute({**given, y: out}, workspace, handle=handle)
    a, b = given.values()
    torch.testing.assert_close(out, a @ b + 1, rtol=2e-3, atol=2e-3)


def test_large(handle):
    graph, _, _ = product(handle, 512, 512, 512)
    build(graph)
    pytest.fail("is not reached")


def test_addresses_masks_and_channels_last(handle):
    a = torch.randn(2, 8, 5, 7, device="cuda").to(memory_format=torch.channels_last)
    graph = cudnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    x = graph.tensor_like(a)
    zero = graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True, data_type=FLOAT)
    mask = graph.cmp_gt(input=x, comparison=zero)
    y = graph.mul(a=x, b=mask)
    mask.set_output(True).set_data_type(cudnn.data_type.BOOLEAN)
    y.set_output(True)
    graph.build([cudnn.heur_mode.A])
    out, found = torch.empty_like(a), torch.empty_like(a, dtype=torch.uint8)
    assert tuple(y.get_stride()) == a.stride()
    pack = {x.get_uid(): a.data_ptr(), zero: torch.zeros(1, 1, 1, 1), mask: found, y: out.data_ptr()}
    graph.execute(pack, None, handle=handle)
    torch.testing.assert_close(out, torch.relu(a))
    assert torch.equal(found.bool(), a > 0)


def test_norm_and_its_gradient_in_torch(handle):
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() >= (9, 0)
    a = torch.randn(4, 1, 32, device="cuda", requires_grad=True)
    scale = torch.ones(1, 1, 32).cuda()
    epsilon = torch.full((1, 1, 1), 1e-3, device="cpu")
    graph = cudnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)
    x, s, e = graph.tensor_like(a.detach()), graph.tensor_like(scale), graph.tensor_like(epsilon)
    assert [t.get_is_pass_by_value() for t in (x, s, e)] == [False, False, True]
    y, inverse = graph.rmsnorm(
        input=x, scale=s, epsilon=e, norm_forward_phase=cudnn.norm_forward_phase.TRAINING, name="norm"
    )
    dx, _ = graph.rmsnorm_backward(grad=x, input=x, scale=s, inv_variance=inverse, has_dbias=False, name="gradient")[:2]
    y.set_output(True)
    dx.set_output(True)
    workspace = build(graph)
    out, gradient = torch.empty_like(a), torch.empty_like(a)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.execute({x: a.detach(), s: scale, e: epsilon, y: out, dx: gradient}, workspace)
    end.record()
    assert start.elapsed_time(end) > 0
    expected = torch.nn.functional.rms_norm(a, (32,), scale[0, 0], 1e-3)
    expected.backward(a.detach())
    assert a.grad.device == out.device == torch.device("cuda:0")
    assert not out.cpu().is_cuda
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(gradient.cpu(), a.grad.cpu(), rtol=1e-5, atol=1e-5)


def test_refused(handle):
    graph = cudnn.pygraph(intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)
    a = graph.tensor(dim=[1, 32, 32], data_type=FLOAT)
    y, scale = graph.block_scale_quantize(a, block_size=32, axis=2, transpose=False)
    y.set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
    scale.set_output(True).set_data_type(cudnn.data_type.FP8_E8M0)
    build(graph)
