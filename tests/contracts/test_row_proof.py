"""The proof of `row_proof`: ordinary forwards have one, and nothing that can mix rows does.

Each mixing forward is also run by the engine, which must refuse it or keep one record's effect within C.
"""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.isolation import each_row_alone, keeps_rows_apart
from dpcert.losses import cross_entropy
from dpcert.models.resnet import ResNet
from dpcert.privacy.clipping import Flat
from dpcert.row_proof import prove, proven_forward, reason_for_no_proof
from dpcert.row_rules import Rows

SHAPE, CLASSES, C = (1, 6, 6), 3, 0.1


class Custom(nn.Module):
    """A small classifier with `step` between two linear layers; it gets the module and rows ``[n, 8]``."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.first, self.last, self.norm = nn.Linear(36, 8), nn.Linear(8, CLASSES), nn.LayerNorm(8)
        self.attention, self.pool = nn.MultiheadAttention(8, 2, batch_first=True), nn.AvgPool2d((3, 1), 1, (1, 0))
        self.batch_norm, self.in_place, self.conv = nn.BatchNorm2d(1), nn.ReLU(inplace=True), nn.Conv1d(8, 8, 1)
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.rand(8))
        self.plain_tensor, self.calls = torch.rand(8), 0
        self.eval()

    def forward(self, x):
        return self.last(self.step(self, torch.tanh(self.first(x.flatten(1)))))


def made(step):
    torch.manual_seed(0)
    return Custom(step)


def trained(step):
    """The same with only the parameters trained that every `step` uses."""
    model = made(step).requires_grad_(False)
    for part in (model.first, model.last):
        part.requires_grad_(True)
    return model


class Doubled(torch.autograd.Function):
    """Its backward pass looks at the whole batch; the forward pass does not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


def counted(self, x):
    self.calls += 1
    return x * self.calls


def in_place_addition(self, x):
    y = x * 1
    y.add_(x)
    return y


def buffer_in_place(self, x):
    self.shift.mul_(0.9)
    return x + self.shift


def by_index(x):
    return x * torch.arange(1, x.shape[0] + 1)[:, None]


STATE = {"scale": 1.0}


def global_state(self, x):
    STATE["scale"] += 1.0
    return x * STATE["scale"]


def cached(self, x):
    self.plain_tensor = x
    return x + self.plain_tensor.mean(0)


MIXING = {
    "batch mean": lambda self, x: x - x.mean(0),
    "batch mean, negative dimension": lambda self, x: x - x.mean(-2, keepdim=True),
    "mean of everything": lambda self, x: x - x.mean(),
    "sum over both dimensions": lambda self, x: x / x.sum((0, 1)),
    "norm of everything": lambda self, x: x / x.norm(),
    "largest of everything": lambda self, x: x / x.amax((0, 1)),
    "first row subtracted": lambda self, x: x - x[:1],
    "a constant row": lambda self, x: x + x[0],
    "all rows but one": lambda self, x: F.pad(x[1:], (0, 0, 0, 1)),
    "shifted by padding": lambda self, x: x + F.pad(x, (0, 0, 1, -1)),
    "rolled": lambda self, x: x + x.roll(1, 0),
    "flipped": lambda self, x: x + x.flip(0),
    "sorted": lambda self, x: x.sort(dim=0).values,
    "rows by value": lambda self, x: x[x.sum(1).argsort()],
    "rows by mask": lambda self, x: torch.where(x[:1] > 0, x, -x),
    "softmax over the batch": lambda self, x: F.softmax(x, dim=0),
    "softmax without a dimension": lambda self, x: F.softmax(x),
    "softmax of the transpose": lambda self, x: x.transpose(0, 1).softmax(-1).transpose(0, 1),
    "cumulative sum": lambda self, x: x.cumsum(0),
    "Gram matrix": lambda self, x: x + (x @ x.transpose(0, 1)).mean(1, keepdim=True),
    "product over the batch": lambda self, x: x @ (x.transpose(0, 1) @ x),
    "rows against rows": lambda self, x: x + (x.sum(1) * x.sum(1, keepdim=True)).mean(1, keepdim=True),
    "linear map by the rows": lambda self, x: F.pad(F.linear(x, x), (0, 8))[:, :8],
    "rows folded": lambda self, x: x + x.reshape(-1, 4).mean(0).sum(),
    "rows folded into two": lambda self, x: x.reshape(-1, 4).softmax(1).reshape(-1, 8).softmax(0),
    "rows exchanged with columns": lambda self, x: x.transpose(0, 1).reshape(x.shape[0], 8),
    "columns flattened into rows": lambda self, x: x.transpose(0, 1).flatten().reshape(-1, 8),
    "batch size": lambda self, x: x * x.shape[0],
    "batch size in a power": lambda self, x: x * x.size(0) ** -0.5,
    "batch size in a constant": lambda self, x: x + self.scale * x.shape[0],
    "by place in the batch": lambda self, x: by_index(x),
    "slice up to the batch size": lambda self, x: F.pad(x[:, : x.shape[0]], (0, 8))[:, :8],
    "joined along the batch": lambda self, x: torch.cat([x, 2 * x], dim=0).mean(1)[: x.shape[0], None] + x,
    "stacked, then the mean of rows": lambda self, x: torch.stack([x, 2 * x], dim=1).mean(0, keepdim=True).mean(1) + x,
    "split rows": lambda self, x: x + x.split(1, dim=0)[0],
    "first of all rows": lambda self, x: x + x.unbind(0)[0],
    "expanded first row": lambda self, x: x + x[:1].expand(x.shape[0], -1),
    "attention over the batch": lambda self, x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "attention layer over the batch": lambda self, x: self.attention(x[None], x[None], x[None], need_weights=False)[0][0],
    "pooling over the batch": lambda self, x: self.pool(x[None, None])[0, 0],
    "resized batch": lambda self, x: F.interpolate(x[None, None], scale_factor=(1.0, 1.0), mode="bilinear")[0, 0] + x.mean(0),
    "layer norm of the batch": lambda self, x: F.layer_norm(x, x.shape),
    "batch as channels": lambda self, x: self.conv(x.transpose(0, 1)[None])[0].transpose(0, 1),
    "einsum": lambda self, x: x + torch.einsum("ij,kj->ij", x, x),
    "only in large batches": lambda self, x: x - x.mean(0) if x.shape[0] > 5 else x,
    "branch on a value": lambda self, x: x / 2 if x.max() > 0.5 else x,
    "repeated batch": lambda self, x: x + x.repeat(2, 1)[:1],
    "cached on the module": cached,
}
UNKNOWN = {  # these keep rows apart, or act on no row at all, and yet are no part of the proof
    "a tensor of the module": lambda self, x: x + self.plain_tensor,
    "a fresh tensor": lambda self, x: x + torch.ones(8),
    "a fresh random tensor": lambda self, x: x + torch.rand(8),
    "random": lambda self, x: x + torch.randn_like(x),
    "active dropout": lambda self, x: F.dropout(x),
    "in-place function": lambda self, x: F.relu_(x * 1),
    "in-place option": lambda self, x: F.relu(x * 1, inplace=True),
    "in-place option by position": lambda self, x: F.relu(x * 1, True),
    "in-place layer": lambda self, x: self.in_place(x * 1),
    "in-place addition": in_place_addition,
    "in-place buffer": buffer_in_place,
    "counter": counted,
    "global state": global_state,
    "custom derivative": lambda self, x: Doubled.apply(x),
    "the first three rows": lambda self, x: x[:3],  # all rows of the two batches that the proof looks at
    "squeezed": lambda self, x: x.unsqueeze(1).squeeze(),
    "squeezed batch": lambda self, x: x.squeeze(0),
    "attention weights": lambda self, x: x + self.attention(x[:, None], x[:, None], x[:, None])[1].sum((1, 2))[:, None],
    "item": lambda self, x: x * self.scale.sum().item(),
    "detached in numpy": lambda self, x: x + torch.from_numpy(x.detach().numpy()),
}


@pytest.mark.parametrize("second_check", [True, False])
@pytest.mark.parametrize("name", [*MIXING, *UNKNOWN])
def test_what_may_mix_has_no_proof(name, second_check, monkeypatch):
    """Without the comparison of values too: the rules are a proof by themselves."""
    if not second_check:
        monkeypatch.setattr("dpcert.row_rules.close", lambda a, b: True)
        monkeypatch.setattr("dpcert.row_proof.close", lambda a, b: True)
    assert prove(made({**MIXING, **UNKNOWN}[name]), SHAPE) is None


def batch_norm_in_training(model):
    model.batch_norm.train()
    model.step = lambda self, x: self.batch_norm(x[:, None, None])[:, 0, 0]


def hooked(model):
    model.first.register_forward_hook(lambda layer, inputs, output: output - output.mean(dim=0))


def hooked_backward(model):
    model.first.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0],))


def replaced_forward(model):
    model.first.forward = lambda x: F.linear(x - x.mean(0), model.first.weight)


class Odd(nn.Parameter):
    pass


def odd_parameter(model):
    model.last.weight = Odd(model.last.weight.detach())


def bias_by_position(model):
    model.last.bias = nn.Parameter(torch.randn(3, CLASSES))


class CalledDifferently(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) - x.mean(0).sum()


class ReadDifferently(nn.Linear):
    def __getattr__(self, name):
        return super().__getattr__(name)


def changed_call(model):
    model.first = CalledDifferently(36, 8)


def changed_read(model):
    model.first = ReadDifferently(36, 8)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.first)


def masked_attention(model):
    mask = nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    model.mask = mask
    model.step = lambda self, x: self.attention(x[:, None], x[:, None], x[:, None], attn_mask=self.mask)[0][:, 0]


def attention_with_dropout(model):
    model.attention.dropout = 0.5
    model.attention.train()
    model.step = lambda self, x: self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


ALTERED = (batch_norm_in_training, hooked, hooked_backward, replaced_forward, odd_parameter, bias_by_position, changed_call, changed_read, parametrized, masked_attention, attention_with_dropout)  # fmt: skip


@pytest.mark.parametrize("alter", ALTERED, ids=lambda alter: alter.__name__)
def test_an_altered_model_has_no_proof(alter):
    model = made(lambda self, x: x)
    assert prove(model, SHAPE) is not None
    alter(model)
    assert prove(model, SHAPE) is None


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_all_modules_undo_the_proof(kind):
    model = made(lambda self, x: x)
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *arguments: None)
    try:
        assert prove(model, SHAPE) is None and proven_forward(model, SHAPE) is None
    finally:
        handle.remove()
    assert prove(model, SHAPE) is not None and proven_forward(model, SHAPE) is not None


def worst_move(model):
    """Largest ‖S(D) - S(D without j)‖ of the engine."""
    generator = torch.Generator().manual_seed(1)
    views, labels = torch.rand(6, 2, *SHAPE, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    views[3], views[5] = 0.2 * views[3], 3.0

    def total(keep):
        return Layerwise()(model, cross_entropy, views[keep], labels[keep], Clip(Flat(), C)).value

    everyone = list(range(6))
    whole = total(everyone)
    return max(float((whole - total([i for i in everyone if i != j])).norm()) for j in everyone)


REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MIXING)
def test_a_mixing_forward_is_refused_or_one_record_moves_the_sum_by_at_most_c(name):
    try:
        worst = worst_move(trained(MIXING[name]))
    except REFUSALS:  # the reference cannot run it either: `choose` and `check_model` report that
        return
    assert worst <= C


def test_twin_on_the_whole_batch_a_mixing_forward_exceeds_c(monkeypatch):
    """The bound above comes from the proof: an engine that believes in a false proof exceeds it."""
    monkeypatch.setattr("dpcert.row_rules.close", lambda a, b: True)
    monkeypatch.setattr("dpcert.row_proof.close", lambda a, b: True)
    monkeypatch.setattr("dpcert.row_rules._not_the_batch", lambda x, dims: [int(dims) % x.small.ndim])
    monkeypatch.setattr("dpcert.row_rules._as_rows", lambda small, large, dim: Rows(small, large, 0))
    assert worst_move(trained(lambda self, x: 30 * F.softmax(20 * x, dim=0))) > 1.01 * C


def unpacked(self, x):
    rows, width = x.shape
    q, k, v = torch.stack([x, 2 * x, self.scale * x], dim=1).reshape(rows, 3, 2, width // 2).permute(1, 0, 2, 3)
    return F.scaled_dot_product_attention(q, k, v).flatten(1)


def halves(self, x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first.sum(-1, keepdim=True) * second, second.amax(1)[:, None] * first], dim=1)


PROVEN = {
    "identity": lambda self, x: x,
    "residual": lambda self, x: x + F.gelu(self.norm(x)),
    "parameters and buffers": lambda self, x: x * self.scale + self.shift[None],
    "unpacked shape": unpacked,
    "class token": lambda self, x: torch.cat([self.scale[None, None].expand(x.shape[0], 1, -1), x[:, None]], dim=1).mean(1),
    "repeated token": lambda self, x: x + self.scale[None].repeat(x.shape[0], 1),
    "batch moved away and back": lambda self, x: x.transpose(0, 1).softmax(0).transpose(0, 1),
    "mean with the batch last": lambda self, x: x - x.transpose(0, 1).mean(0)[:, None],
    "reshaped": lambda self, x: x.view(x.size(0), 2, -1).flatten(1).reshape(-1, 8),
    "several products": lambda self, x: ((x[:, :, None] @ x[:, None]) @ self.scale[:, None])[..., 0],
    "attention layer": lambda self, x: self.attention(x.unflatten(1, (1, 8)), x[:, None], x[:, None])[0].squeeze(1),
    "chunks": halves,
    "split": lambda self, x: x.split([4, 4], -1)[0].unsqueeze(-1).expand(-1, -1, 2).flatten(1),
    "unbound": lambda self, x: torch.stack([x, 2 * x], dim=2).unbind(2)[1],
    "numbers": lambda self, x: x * x.shape[-1] ** -0.5 + x.ndim,
    "frozen batch norm": lambda self, x: self.batch_norm(x[:, None, None])[:, 0, 0],
    "pooled and resized": lambda self, x: F.avg_pool2d(F.interpolate(x[:, None, None], size=(2, 16)), 2).flatten(1),
    "padded": lambda self, x: F.pad(x, (1, 1))[:, 1:-1],
    "dropout in evaluation": lambda self, x: F.dropout(x, 0.5, False).float().contiguous(),
    "clamped": lambda self, x: torch.clamp(x, -0.5, 0.5) + x.clamp(min=0.1) + torch.maximum(x, self.shift),
    "convolution of positions": lambda self, x: self.conv(x.unsqueeze(-1))[..., 0],
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_ordinary_forwards_are_proven_and_keep_rows_apart(name):
    model = made(PROVEN[name])
    assert reason_for_no_proof(model, SHAPE) is None
    assert not keeps_rows_apart(model, SHAPE), "callers that run the model itself must not rely on the trace"
    rows = torch.rand(9, *SHAPE)
    with torch.no_grad():
        together = prove(model, SHAPE).module(rows)
        torch.testing.assert_close(together, torch.cat([model(row) for row in rows.split(1)]), rtol=1e-4, atol=1e-5)
        spoiled = rows.clone()
        spoiled[4] = torch.nan
        after = prove(model, SHAPE).module(spoiled)
    others = torch.arange(9) != 4
    assert torch.equal(after[others], together[others]) and after[4].isnan().any()


@pytest.mark.parametrize("name", PROVEN)
def test_gradients_on_the_trace_equal_the_reference(name):
    from dpcert.gradients.vmap import per_example_gradients

    model, views, labels = trained(PROVEN[name]), torch.rand(4, 2, *SHAPE), torch.tensor([0, 1, 2, 0])
    for parameter in (model.scale, model.norm.weight, model.batch_norm.bias, model.attention.in_proj_weight, model.conv.weight):
        parameter.requires_grad_()
        used = torch.autograd.grad(model(views[0]).sum(), parameter, allow_unused=True)[0] is not None
        parameter.requires_grad_(used)
    found, expected = (call(model, cross_entropy, views, labels) for call in (Layerwise().per_example, per_example_gradients))
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key].instantiate(), gradient.flatten(1), rtol=1e-3, atol=1e-6, msg=key)


def test_each_row_alone_is_the_trace():
    model = made(PROVEN["residual"])
    rows = torch.rand(5, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(each_row_alone(model, SHAPE)(rows), model(rows))
    assert isinstance(each_row_alone(model, SHAPE), torch.fx.GraphModule)
    mixing = made(MIXING["batch mean"])
    with torch.no_grad():
        alone = torch.cat([mixing(row) for row in rows.split(1)])
        torch.testing.assert_close(each_row_alone(mixing, SHAPE)(rows), alone)


def test_a_kept_proof_follows_weights_modes_and_hooks():
    model, rows = made(PROVEN["frozen batch norm"]), torch.rand(4, *SHAPE)
    first = proven_forward(model, SHAPE)
    with torch.no_grad():
        model.last.weight.mul_(2.0)
        model.batch_norm.running_mean.add_(0.5)
        assert proven_forward(model, SHAPE) is first
        torch.testing.assert_close(first(rows), model(rows))
    model.batch_norm.train()
    assert proven_forward(model, SHAPE) is None
    model.batch_norm.eval()
    assert proven_forward(model, SHAPE) is not None
    model.first.register_forward_hook(lambda layer, inputs, output: output - output.mean(0))
    assert proven_forward(model, SHAPE) is None


def test_proofs_in_threads_disturb_no_one():
    """torch.fx patches nn.Module while it records: other threads must compute as before."""
    model, rows = made(PROVEN["residual"]), torch.rand(4, *SHAPE)
    with torch.no_grad():
        expected, wrong, stop = model(rows), [], threading.Event()

    def compute():
        with torch.no_grad():
            while not stop.is_set():
                found = model(rows)
                if type(found) is not torch.Tensor or not torch.equal(found, expected):
                    wrong.append(found)

    workers = [threading.Thread(target=compute) for _ in range(2)]
    for worker in workers:
        worker.start()
    proofs = [prove(made(PROVEN["attention layer"]), SHAPE) for _ in range(10)]
    stop.set()
    for worker in workers:
        worker.join()
    assert not wrong and all(proofs)


def test_a_failed_proof_leaves_pytorch_as_it_was():
    before = nn.Module.__call__, nn.Module.__getattr__, torch.autograd.Function.__dict__["apply"]
    for name in ("custom derivative", "only in large batches", "einsum"):
        assert prove(made({**MIXING, **UNKNOWN}[name]), SHAPE) is None
    assert (nn.Module.__call__, nn.Module.__getattr__, torch.autograd.Function.__dict__["apply"]) == before
    assert float(Doubled.apply(torch.tensor(2.0))) == 4.0


@pytest.mark.parametrize("changed", [False, True])
def test_a_look_up_does_not_disturb_a_backward_pass_of_another_thread(changed):
    """All threads of a step share the trace. Twin: a weight that is written again, as after a step of the optimizer."""
    model = ResNet((1, 16, 16), 3, 4).eval()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = math.nan  # not equal to itself, but not changed either
    x = torch.rand((2, 1, 16, 16), requires_grad=True)
    loss = proven_forward(model, (1, 16, 16))(x).sum()
    if changed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    again = proven_forward(model, (1, 16, 16))
    if changed:
        assert torch.equal(again(x).nan_to_num(), model(x).nan_to_num())  # with the weights of now
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(loss, x)
    else:
        assert torch.autograd.grad(loss, x)[0].shape == x.shape
