"""State that eager has and a trace does not carry is found and named, and the user's module stays as it was."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks

import autopar
from autopar.errors import CaptureError, InputError
from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import Forward, X, capture, plain, refusal, squares, with_attributes

# --- before forward runs -----------------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[Net], Any]] = {
    "register_hook": lambda m: m.first.weight.register_hook(lambda g: g * 2),
    "register_post_accumulate_grad_hook": lambda m: m.first.weight.register_post_accumulate_grad_hook(lambda p: None),
    "register_full_backward_hook": lambda m: m.first.register_full_backward_hook(lambda *a: None),
    "register_full_backward_pre_hook": lambda m: m.first.register_full_backward_pre_hook(lambda *a: None),
    "register_backward_hook": lambda m: m.first.register_backward_hook(lambda *a: None),
    "register_multi_grad_hook": lambda m: register_multi_grad_hook([m.first.weight], lambda g: None),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_gradients_are_refused_with_the_place(hook: str) -> None:
    model = plain()
    HOOKS[hook](model)
    message = refusal(model)
    assert "first" in message
    assert "hook" in message
    assert "not part of a program" in message


def test_a_backward_hook_for_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *a: None)
    try:
        assert "for all modules" in refusal(plain())
    finally:
        handle.remove()
    assert capture(plain()).training


def _shared() -> nn.Module:
    model = plain()
    model.last.weight = nn.Parameter(model.first.weight.data)
    return model


def _view_of_weight() -> nn.Module:
    model = plain()
    model.register_buffer("view", model.first.weight.data)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8)), r"0\.weight is not initialized.*run the model once"),
    "script": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8))),
        r"module 0 is a ScriptModule; pass the nn\.Module",
    ),
    "compiled": (lambda: torch.compile(nn.Linear(8, 8)), r"the model is a OptimizedModule.*_orig_mod"),  # type: ignore[dict-item,return-value]
    "data parallel": (lambda: nn.DataParallel(nn.Linear(8, 8)), r"the model is a DataParallel; pass model\.module"),
    "backslash": (lambda: _named("a\\b"), r"cannot be the name .* rename it"),
    "newline": (lambda: _named("a\nb"), r"cannot be the name .* rename it"),
    "sparse": (lambda: plain(w=nn.Parameter(torch.eye(4).to_sparse())), r"w is a sparse tensor"),
    "expanded": (lambda: plain(w=nn.Parameter(torch.zeros(1).expand(8))), r"w share memory \(it was expanded\)"),
    "shared memory": (_shared, r"first\.weight and last\.weight share memory.*tie them"),
    "buffer over a weight": (
        _view_of_weight,
        r"view and first\.weight share memory|first\.weight and view share memory",
    ),
}


def _named(name: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module(name, nn.Linear(8, 8))
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_no_trace_carries_are_refused_by_name(kind: str) -> None:
    make, says = MODELS[kind]
    with pytest.raises(CaptureError, match=says):
        capture(make())


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(0, 8), "(0, 8) is empty along dim 0; pass a batch with samples"),
        (torch.zeros(4, 0), "(4, 0) is empty along dim 1; a program computes for the sizes of its example: give one"),
        (X.to_sparse(), "sparse"),
        (torch.nested.nested_tensor([X[:2], X[:3]]), "nested"),
    ],
    ids=["no samples", "no columns", "sparse", "nested"],
)
def test_inputs_that_no_program_takes_are_refused_by_name(x: Tensor, says: str) -> None:
    assert says in refusal(plain(), (x,), kind=InputError)


def test_a_loss_with_parameters_of_its_own_is_refused_where_they_would_be_trained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, out: Tensor) -> Tensor:
            return (out * self.scale).sum()

    assert "parameter scale" in refusal(plain(), loss_fn=Scaled())
    assert_equal_to_eager(plain(), (X,), Scaled().requires_grad_(False))


def test_a_complex_loss_is_refused() -> None:
    assert "the loss is complex" in refusal(plain(), loss_fn=lambda out: out.sum() * 1j, kind=InputError)


# --- while forward runs --------------------------------------------------------------------------------------------------


def _tensor_hook(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    return net.last(h)


def _node_hook(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.grad_fn.register_hook(lambda *g: None)  # type: ignore[union-attr]
    return net.last(h)


def _multi_hook(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    register_multi_grad_hook([h], lambda g: None)
    return net.last(h)


def _saved_hooks(net: Net, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        return net.last(torch.sin(net.first(x)))


def _clamped_weight(net: Net, x: Tensor) -> Tensor:
    net.first.weight.data.clamp_(-1, 1)
    return net.last(net.first(x))


def _assigned_weight(net: Net, x: Tensor) -> Tensor:
    net.first.weight.data = net.first.weight.data.clamp(-1, 1)
    return net.last(net.first(x))


def _written_data(net: Net, x: Tensor) -> Tensor:
    h = torch.sigmoid(net.first(x))
    h.data.mul_(2)
    return net.last(h)


def _written_without_grad(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    other = h + 1
    with torch.no_grad():
        h.view(-1).mul_(2)
    return net.last(h) + other


def _written_detached(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.detach()[:, 0] = 0
    return net.last(h) + h


def _gradient_into_detached(net: Net, x: Tensor) -> Tensor:
    room = torch.zeros_like(x).detach()
    room[:, 1:] = net.first(x)[:, :-1]
    return net.last(room) + room


def _detached_in_place(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x).detach_())


def _gradient(net: Net, x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    return torch.autograd.grad(torch.sin(net.first(y)).sum(), y, create_graph=True)[0]


def _backward(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.sum().backward(retain_graph=True)
    return net.last(h)


def _reads_grad(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * (1 if net.first.weight.grad is None else 2)


def _freezes(net: Net, x: Tensor) -> Tensor:
    net.first.weight.requires_grad_(False)
    return net.last(net.first(x))


def _seeds(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return net.last(net.first(x)) * torch.rand(8)


def _forks(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return net.last(net.first(x)) * torch.rand(8)


def _own_generator(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * torch.rand(8, generator=torch.Generator().manual_seed(0))


def _memory(net: Net, x: Tensor) -> Tensor:
    return net.first(x) + torch.empty(0).set_(net.last(x).detach())


FORWARDS: dict[Forward, str] = {
    _tensor_hook: r"registers a hook on the gradient of a tensor at .*test_unsupported_state\.py:\d+ in _tensor_hook",
    _node_hook: "reads grad_fn at .* in _node_hook",
    _multi_hook: "reads grad_fn at .* in _multi_hook",
    _saved_hooks: "hooks on saved tensors.* in _saved_hooks",
    _clamped_weight: r"writes to the parameter first\.weight .* in _clamped_weight.*only the optimizer",
    _assigned_weight: r"assigns \.data at .* in _assigned_weight",
    _written_data: "writes to a tensor that carries a gradient.* in _written_data",
    _written_without_grad: "writes to a tensor that carries a gradient.* in _written_without_grad",
    _written_detached: "writes to a tensor that carries a gradient.* in _written_detached",
    _gradient_into_detached: "writes what carries a gradient to a tensor that was detached.* in _gradient_into_detached",
    _detached_in_place: r"detach_.* in _detached_in_place.*use x = x\.detach",
    _gradient: r"calls torch\.autograd\.grad at .* in _gradient",
    _backward: "calls backward at .* in _backward",
    _reads_grad: r"reads \.grad at .* in _reads_grad",
    _freezes: r"changes requires_grad of the parameter first\.weight at .* in _freezes",
    _seeds: "sets the state of torch's generator at .* in _seeds",
    _forks: "sets the state of torch's generator at .* in _forks",
    _own_generator: r"draws random numbers from a torch\.Generator at .* in _own_generator",
    _memory: r"the memory of another one \(set_\)",
}


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_what_forward_does_beside_computing_is_refused_with_its_line(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=FORWARDS[forward]):
        capture(Net(forward))


def test_a_parameter_that_is_used_past_its_module_is_refused_by_name() -> None:
    hidden = with_attributes(lambda net, x: F.linear(net.first(x), net.held[0]))
    hidden.held = [hidden.last.weight]
    assert "uses the parameter last.weight by another way" in refusal(hidden)
    model = plain()
    weight = model.first.weight
    assert "uses the parameter first.weight" in refusal(model, loss_fn=lambda out: out.sum() + weight.sum())
    foreign = nn.Parameter(torch.ones(8))
    assert "is no parameter of the model" in refusal(Net(lambda net, x: net.last(x) * foreign))
    assert len(capture(model, loss_fn=lambda out: out.sum() + model.first.weight.sum()).trained) == 4


def test_a_padded_encoder_in_eval_mode_is_refused_where_eager_would_zero_its_padding() -> None:
    class Padded(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    batch = torch.randn(4, 6, 8), torch.arange(6).expand(4, 6) > 3
    message = refusal(Padded(True).eval(), batch, None)
    assert "in forward" in message
    assert "enable_nested_tensor=False" in message
    assert "enable_nested_tensor=False" in refusal(Padded(True).eval().requires_grad_(False), batch, None)
    assert capture(Padded(True).eval(), batch, squares).training  # with gradients eager computes padded positions too
    assert_equal_to_eager(Padded(False).eval(), batch, training=False, seeds=())


# --- what is carried over ------------------------------------------------------------------------------------------------


def test_inference_mode_and_offloaded_activations_are_what_they_are_in_eager() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = net.last(x).mean()
        with save_on_cpu():
            return net.last(torch.sin(net.first(x))) * scale.clone()

    assert_equal_to_eager(Net(forward), (X,), squares, seeds=())


def test_a_forward_that_is_all_without_gradients_is_an_inference_program() -> None:
    model = Net(torch.no_grad()(lambda net, x: (net.last(net.first(x)), net.first(x))))
    assert_equal_to_eager(model, (X,), training=False, seeds=())


def test_names_that_python_keeps_for_itself_are_names_of_modules() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = (nn.ModuleDict({"class": nn.Linear(8, 8), "a/b #{x}": nn.Linear(8, 8)}) for _ in range(2))
            self.add_module("import", nn.ModuleList(blocks))
            self.register_parameter("def", nn.Parameter(torch.ones(8)))

        def forward(self, x: Tensor) -> Tensor:
            for block in self._modules["import"]:  # type: ignore[union-attr]
                x = block["a/b #{x}"](torch.sin(block["class"](x)))
            return x * self._parameters["def"]

    assert_equal_to_eager(Odd(), (X,), squares, seeds=())


def test_attributes_that_cannot_be_copied_do_not_stand_in_the_way() -> None:
    @autopar.register_op("n d!, d! -> n d!")
    def held_tanh(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * scale

    model = with_attributes(
        lambda net, x: net.last(net.op(net.first(x), net.last.bias)), op=held_tanh, lock=threading.Lock()
    )
    assert_equal_to_eager(model, (X,), squares, seeds=())


def test_a_function_under_torch_compile_is_traced_like_any_other() -> None:
    inner = torch.compile(lambda x: torch.sin(x) * 2)
    program = capture(Net(lambda net, x: net.last(inner(net.first(x)))))
    assert len(program.trained) == 4


def test_an_optimizer_with_a_step_hook_is_refused() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *a: None)
        return optimizer

    compile_ = functools.partial(autopar.compile, plain(), autopar.ClusterSpec.local(2), (X,), loss_fn=squares)
    with pytest.raises(InputError, match="SGD has a step hook"):
        compile_(optimizer=factory)
