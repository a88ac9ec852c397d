"""The loss of accelerators on the CPU, by torch's compiler."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx, config, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from athanor.model import cross_entropy
from athanor.model.cross_entropy import Half, _CrossEntropy
from athanor.training.compiling import graphs

needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
LITTLE = ("aten.gather.", "aten.scatter", "aten.new_empty.")  # one element of each row, or none


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, config.patch(fx_graph_cache=False):  # what comes from it is not counted
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        torch._dynamo.reset()
        yield


class LargeBytes(TorchDispatchMode):
    """Bytes of tensors of `least` elements that are read and written; in compiled code as inductor counts them."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, before = kwargs or {}, metrics.num_bytes_accessed
        out = func(*args, **kwargs)
        tensors = (args, kwargs, () if "out" in kwargs else out)  # `out` is only written
        large = [x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.numel() >= self.least]
        if compiled := metrics.num_bytes_accessed - before:
            self.bytes += compiled + large[0]  # once for a kernel, which reads a row for its sum and again
        elif not func.is_view and not str(func).startswith(LITTLE):
            self.bytes += sum(large)
        return out


@needs_compiler
def test_bytes_for_each_logit_products_included(monkeypatch):
    """And no compilation for other numbers of targets, but for one outside of the mode that counts."""
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)
    N, D, V = 128, 16, 4800
    h, head = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with LargeBytes(N * V) as counted:
        _CrossEntropy.apply(h, head, torch.randint(0, V, (N,)), N, 1e-4, Half(torch.bfloat16))
    assert counted.bytes / (N * V) < 12.1
    made = graphs()
    with torch.no_grad():
        for rows in range(64, 564, 10):
            cross_entropy.fused_softmax(torch.zeros(rows, V).bfloat16(), 1e-4)
    assert graphs() <= made + 1


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rows", "V", "unit"),
    [(torch.float32, 3, 48000, 1e-6), (torch.bfloat16, 65, 4801, 2**-8), (torch.float16, 4097, 515, 2**-11)],
)
def test_gradient_of_logits(dtype, rows, V, unit):
    """Also where one is -inf, or 600 above the target."""
    logits, target = (10 * torch.randn(rows, V)).to(dtype), torch.randint(7, V, (rows,))
    logits[0], logits[0, 3], logits[1, :7] = -300.0, 300.0, -torch.inf
    x = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(x, target, reduction="none") + 1e-3 * x.logsumexp(1).square()
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    found, losses = cross_entropy._on_accelerator(logits, target, 1e-3)
    assert found is logits and not cross_entropy._compiler_fails
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.double(), gradient, rtol=unit, atol=1e-6)


def test_a_compiler_that_fails_costs_a_warning(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_compiler_fails", False)
    logits, target = torch.randn(64, 96), torch.randint(0, 96, (64,))
    with config.patch({"cpp.cxx": ("/nonexistent/compiler",)}), pytest.warns(UserWarning, match="not compiled"):
        first = cross_entropy._on_accelerator(logits.clone(), target, 0.0)
    again = cross_entropy._on_accelerator(logits.clone(), target, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and first[1].isfinite().all()
