"""The kernels of a region are one library; what does not go into one, and what others compile meanwhile, is as torch has it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.compiled import inductor
from autopar.runtime.compiled.kernel_files import KernelFile, one_file

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++"),
    pytest.mark.filterwarnings("error::autopar.runtime.compiled.inductor.CompilerWarning"),
]
X = torch.randn(24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def three_kernels(rt: Any, x: Tensor) -> tuple[Tensor, ...]:
    product = torch.mm(x.sin(), x)
    again = torch.mm(product.cos(), x)
    return product, again, again.exp().sum(0)


def compiled() -> inductor.CompiledRegion:
    region = inductor.CompiledRegion("three kernels", lambda rt, given: three_kernels(rt, *given), None)
    region(None, [X])
    inductor.compile_met([region])
    assert region.compiled
    return region


def assert_as_written(region: inductor.CompiledRegion) -> None:
    for own, written in zip(region(None, [X]), three_kernels(None, X), strict=True):
        torch.testing.assert_close(own, written, rtol=1e-12, atol=1e-12)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def libraries(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*.main.so") if path.stat().st_size]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[KernelFile]:
    """The files of kernels that are started."""
    started: list[KernelFile] = []
    start = KernelFile.start
    monkeypatch.setattr(KernelFile, "start", lambda self: (started.append(self), start(self))[1])
    return started


def test_a_region_is_one_library_and_is_found_again(cache: Path, files: list[KernelFile]) -> None:
    assert_as_written(compiled())
    (library,) = libraries(cache)
    assert len(files[0].texts) == 3
    built = library.stat().st_mtime_ns
    assert_as_written(compiled())
    assert libraries(cache) == [library]
    assert library.stat().st_mtime_ns == built


@pytest.mark.slow
def test_kernels_that_do_not_go_into_a_file_are_as_torch_builds_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = KernelFile.start

    def unknown_type(self: KernelFile) -> None:
        self.texts.append("no_type_of_c kernel_of_nobody;")
        start(self)

    monkeypatch.setattr(KernelFile, "start", unknown_type)
    assert_as_written(compiled())
    assert not libraries(cache)


def test_a_source_that_is_not_one_kernel_is_refused() -> None:
    for source in ("", 'extern "C"  void  kernel(float* a) {}\nextern "C"  void  kernel(int64_t n) {}'):
        with pytest.raises(ValueError, match="definitions of `kernel`"):
            KernelFile().add(["float*"], source)


@pytest.mark.slow
def test_who_compiles_in_another_thread_waits_for_kernels_of_its_own(cache: Path) -> None:
    results: list[Tensor] = []
    with one_file() as file:
        other = threading.Thread(target=lambda: results.append(torch.compile(lambda x: x.sin() + 1)(X)))
        other.start()
        other.join()
    assert not file.texts
    assert not file.waits
    torch.testing.assert_close(results, [X.sin() + 1])
