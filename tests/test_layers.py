"""layers: the rows of J of every kind of layer, against torch's own jacrev."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.checkpoint import checkpoint

from lmfit_gpu import layer_positions
from lmfit_gpu.layer_blocks import on_device
from lmfit_gpu.layer_positions import EmbeddingRows, PositionRows
from lmfit_gpu.layer_rows import ExplicitRows, OuterRows, SummedRows
from lmfit_gpu.layers import capture, joined, proven

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's

ROWS = 5
TOL = dict(rtol=1e-10, atol=1e-10)


class Problem:
    """Values of a module on some inputs, by rows of J: by layers, and by jacrev."""

    def __init__(self, module, *inputs, dtype=torch.float64):
        self.module, self.inputs = module.to(dtype), inputs
        self.theta = {name: parameter.detach() for name, parameter in module.named_parameters()}
        self.names = tuple(self.theta)
        self.n_rows = len(inputs[0])

    def values(self, theta):
        return functional_call(self.module, theta, tuple(x.clone() for x in self.inputs))

    def capture(self):
        return capture(self.module, self.names, lambda: self.values(self.theta), self.n_rows)

    def explicit(self, seeds=None):
        """J by name, each (m, n_t)."""

        def flat(theta):
            values = self.values(theta).reshape(self.n_rows, -1)
            return (values if seeds is None else torch.einsum("krq,rq->rk", seeds, values)).reshape(-1)

        return {name: J.reshape(len(J), -1) for name, J in jacrev(flat)(self.theta).items()}

    def proven(self):
        return proven(self.module, self.names, self.values, self.theta, self.n_rows)


class Flat(nn.Module):
    """A layer between elementwise functions, a value per output of a row: a position matters to several."""

    def __init__(self, layer, outputs=2):
        super().__init__()
        self.layer, self.outputs = layer, outputs

    def forward(self, x):
        z = torch.tanh(self.layer(x)).flatten(1)
        mixing = torch.linspace(-1, 1, z.shape[1] * self.outputs, dtype=z.dtype).sin().view(-1, self.outputs)
        return torch.sin(z @ mixing)


def standing(norm):
    """Give a normalisation layer a scale, shift and statistics that are not 1 and 0."""
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return norm.eval()


def images(channels=4, height=6, width=5):
    return torch.randn(ROWS, channels, height, width, dtype=torch.float64)


def lines(channels=4, length=7):
    return torch.randn(ROWS, channels, length, dtype=torch.float64)


def tokens(*shape):
    return torch.randint(0, 4, (ROWS, *shape))  # four tokens: they repeat


def conv2(**kw):
    return lambda: (Flat(nn.Conv2d(4, 6, **{"kernel_size": 3, **kw})), images())


def conv1(**kw):
    return lambda: (Flat(nn.Conv1d(4, 6, **{"kernel_size": 3, **kw})), lines())


class Sequence(nn.Module):
    """Positions in the second axis; or in the first, as code that flattens rows and positions has it."""

    def __init__(self, flattened):
        super().__init__()
        self.inner, self.out, self.flattened = nn.Linear(3, 4), nn.Linear(4, 2), flattened

    def forward(self, x):
        inner = self.inner(x.flatten(0, 1)).view(*x.shape[:2], -1) if self.flattened else self.inner(x)
        return self.out(torch.tanh(inner).cumsum(1).square().sum(1))


class FlattenedImages(nn.Module):
    """Two images a row, the convolution and the norm see them one by one."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Conv2d(2, 4, 3, groups=2), standing(nn.GroupNorm(2, 4))

    def forward(self, x):
        z = self.norm(self.inner(x.reshape(-1, 2, 6, 5))).view(len(x), 2, -1)
        return torch.stack([torch.tanh(z[:, 0]).sum(1), (z[:, 0] * z[:, 1]).sum(1)], 1)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Repeated(nn.Module):
    """A wide layer used again and again: its rows are better not formed; and once at two positions."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(30, 30), nn.Linear(30, 2)

    def forward(self, x):
        z = x
        for _ in range(2):
            z = torch.sin(self.inner(z))
        return self.out(torch.tanh(self.inner(torch.stack([x, z], 1))).sum(1))


class ConvolvedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(4, 4, 3, groups=2)

    def forward(self, x):
        return torch.tanh(self.inner(torch.tanh(self.inner(x)))).square().sum(2)


class TiedLayers(nn.Module):
    """One weight in two linear layers and the table of an embedding."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Embedding(3, 3)
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + self.third((x > 0).long()).sum(1).sin()


class Tied(nn.Module):
    """The table of an embedding is the weight of the output layer."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(4, 3), nn.Linear(3, 4)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(torch.tanh(self.table(x)).sum(1))


class Branches(nn.Module):
    """Paths that share their input; a layer that values do not depend on; a layer called by keyword."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.left, self.right, self.idle = nn.Linear(3, 4, bias=False), nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x):
        self.idle(x)
        return self.out(torch.tanh(self.right(input=x)) * torch.sigmoid(self.left(x))) + x[:, :2]


class InPlace(nn.Module):
    """Outputs of layers are written to, and views of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.spread, self.out = nn.Linear(1, 3), nn.Linear(4, 2)

    def forward(self, x):
        z = self.first(x)
        z += torch.tanh(self.second(x[:, [0, 1, 2, 0]]))
        z = F.leaky_relu_(z, 0.1)
        w = F.leaky_relu_(self.third(z), 0.2)
        spread = F.leaky_relu_(self.spread(w[:, :, None]), 0.3)  # the output is a view
        return self.out(spread.square().sum(2))


def inputs(*shape):
    return torch.randn(ROWS, *shape, dtype=torch.float64)


def mlp(q):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, q))


CASES = {
    "one-layer": lambda: (nn.Linear(3, 1), inputs(3)),
    "mlp": lambda: (mlp(1), inputs(3)),
    "three-outputs": lambda: (mlp(3), inputs(3)),
    "branches": lambda: (Branches(), inputs(3)),
    "sequence": lambda: (Sequence(False), inputs(6, 3)),
    "flattened-sequence": lambda: (Sequence(True), inputs(6, 3)),
    "short-sequence-wide-layer": lambda: (Flat(nn.Linear(30, 20)), inputs(2, 30)),
    "two-axes-of-positions": lambda: (Flat(nn.Linear(3, 2)), inputs(2, 3, 3)),
    "conv1d": conv1(),
    "conv1d-stride-padding": conv1(stride=2, padding=2),
    "conv1d-dilation-groups": conv1(dilation=2, groups=2, bias=False),
    "conv1d-same-even": conv1(padding="same", kernel_size=4, dilation=3),
    "conv1d-whole-input": conv1(kernel_size=7),
    "conv2d": conv2(),
    "conv2d-stride": conv2(stride=(2, 1)),
    "conv2d-padding": conv2(padding=(0, 2)),
    "conv2d-valid": conv2(padding="valid"),
    "conv2d-same-even": conv2(padding="same", kernel_size=(2, 4)),
    "conv2d-groups": conv2(groups=2, padding=1),
    "conv2d-depthwise": lambda: (Flat(nn.Conv2d(4, 4, 3, groups=4)), images()),
    "conv2d-dilation": conv2(dilation=(2, 1), padding=1),
    "conv2d-whole-input": conv2(kernel_size=(6, 5)),
    "conv2d-whole-input-groups": conv2(kernel_size=(6, 5), groups=2),
    "conv2d-many-channels-two-positions": lambda: (Flat(nn.Conv2d(8, 12, (6, 4))), images(8)),
    "conv2d-flattened": lambda: (FlattenedImages(), inputs(2, 2, 6, 5)),
    "embedding": lambda: (Flat(nn.Embedding(4, 3)), tokens(6)),
    "embedding-large-table": lambda: (Flat(nn.Embedding(400, 30)), tokens(2)),
    "embedding-one-token": lambda: (Flat(nn.Embedding(4, 3)), tokens()),
    "embedding-padding": lambda: (Flat(nn.Embedding(4, 3, padding_idx=2)), tokens(6)),
    "layer-norm": lambda: (Flat(standing(nn.LayerNorm(5))), images()),
    "layer-norm-two-axes-no-bias": lambda: (Flat(standing(nn.LayerNorm((6, 5), bias=False))), images()),
    "rms-norm": lambda: (Flat(standing(nn.RMSNorm(5))), images()),
    "group-norm": lambda: (Flat(standing(nn.GroupNorm(2, 4))), images()),
    "batch-norm-1d-features": lambda: (Flat(standing(nn.BatchNorm1d(4))), inputs(4)),
    "batch-norm-1d-positions": lambda: (Flat(standing(nn.BatchNorm1d(4))), lines()),
    "batch-norm-2d": lambda: (Flat(standing(nn.BatchNorm2d(4))), images()),
    "instance-norm-1d": lambda: (Flat(standing(nn.InstanceNorm1d(4, affine=True))), lines()),
    "instance-norm-2d": lambda: (Flat(standing(nn.InstanceNorm2d(4, affine=True))), images()),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            standing(nn.BatchNorm2d(6)),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 3, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6, 2),
        ),
        images(),
    ),
    "used-twice": lambda: (Twice(), inputs(3)),
    "used-three-times": lambda: (Repeated(), inputs(30)),
    "tied-layers": lambda: (TiedLayers(), inputs(3)),
    "convolution-used-twice": lambda: (ConvolvedTwice(), lines()),
    "tied": lambda: (Tied(), tokens(3)),
    "in-place": lambda: (InPlace(), inputs(3)),
}


def made(name, dtype=torch.float64):
    torch.manual_seed(1)
    module, x = CASES[name]()
    return Problem(module, x.to(dtype) if x.is_floating_point() else x, dtype=dtype)


def compare(found, J, **tol):
    """Every way to look at the rows of one tensor, against J (m, n_t)."""
    m, n = J.shape
    assert found.size == n
    u, v = torch.randn(m, dtype=J.dtype), torch.randn(n, dtype=J.dtype)
    torch.testing.assert_close(found.columns(), J.T, **tol)
    out = torch.full((n, m), torch.nan, dtype=J.dtype)
    assert found.columns(out) is out
    torch.testing.assert_close(out, J.T, **tol)
    gram = found.gram()
    torch.testing.assert_close(gram, J @ J.T, **tol)
    gram.zero_()  # it is the caller's own
    torch.testing.assert_close(found.gram(), J @ J.T, **tol)
    torch.testing.assert_close(found.squares(), J.square().sum(1), **tol)
    torch.testing.assert_close(found.transposed(u), J.T @ u, **tol)
    torch.testing.assert_close(found.along(v), J @ v, **tol)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_jacrev(name):
    problem = made(name)
    captured = problem.capture()
    assert captured.unsupported == ()
    torch.testing.assert_close(captured.values, problem.values(problem.theta), rtol=0, atol=0)
    rows, J = captured.rows(), problem.explicit()
    assert list(rows) == list(problem.names)
    for tensor in rows:
        compare(rows[tensor], J[tensor], **TOL)
    assert problem.proven() == problem.names


@pytest.mark.parametrize("name", ["three-outputs", "sequence", "conv2d-groups", "embedding", "group-norm", "tied"])
def test_seeds_combine_the_values_of_a_row(name):
    problem = made(name)
    q = problem.values(problem.theta).shape[1]
    captured = problem.capture()
    for k in (1, 3):
        seeds = torch.randn(k, ROWS, q, dtype=torch.float64)
        J = problem.explicit(seeds)
        for tensor, rows in captured.rows(seeds).items():
            compare(rows, J[tensor], **TOL)


@pytest.mark.parametrize("name", CASES)
def test_joined_blocks_are_the_whole(name):
    problem = made(name)
    J, shared, blocks = problem.explicit(), {}, []
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        blocks.append(Problem(problem.module, *(x[part] for x in problem.inputs)).capture().rows())
    for tensor in problem.names:
        whole = joined([block[tensor] for block in blocks], shared)
        assert type(whole) is type(blocks[0][tensor])
        compare(whole, J[tensor], **TOL)


def test_joined_blocks_of_several_lengths_and_kinds():
    problems = [Problem(Sequence(False), inputs(length, 3)) for length in (4, 2, 1)]
    rows = [Problem(problems[0].module, *problem.inputs).capture().rows() for problem in problems]
    J = [Problem(problems[0].module, *problem.inputs).explicit() for problem in problems]
    assert [type(block["inner.weight"]) for block in rows] == [PositionRows, PositionRows, OuterRows]
    for tensor in problems[0].names:
        whole = joined([block[tensor] for block in rows])
        compare(whole, torch.cat([block[tensor] for block in J]), **TOL)


def test_weight_and_bias_share_their_gram_matrix_joined_or_not():
    problem = made("mlp")
    rows, shared = problem.capture().rows(), {}
    assert rows["0.weight"].delta is rows["0.bias"].rows
    whole = {tensor: joined([part, part], shared) for tensor, part in rows.items()}
    assert whole["0.weight"].delta is whole["0.bias"].rows
    assert whole["0.weight"].a is not whole["2.weight"].a


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("mlp", "0.weight", OuterRows),
        ("mlp", "0.bias", ExplicitRows),
        ("conv2d-whole-input", "layer.weight", OuterRows),
        ("sequence", "inner.weight", PositionRows),
        ("embedding", "layer.weight", EmbeddingRows),
        ("used-twice", "inner.weight", PositionRows),
        ("used-twice", "inner.bias", ExplicitRows),
        ("tied", "table.weight", SummedRows),
    ],
)
def test_rows_are_kept_as_products(name, tensor, kind):
    assert type(made(name).capture().rows()[tensor]) is kind


@pytest.mark.parametrize("pairs", [True, False], ids=["by-pairs", "by-rows"])
@pytest.mark.parametrize("chunk", [1, 100, 2**20])
@pytest.mark.parametrize("name", ["sequence", "conv2d-groups", "conv2d-depthwise", "embedding", "used-twice"])
def test_every_way_to_the_gram_matrix_and_every_chunk_size(name, chunk, pairs, monkeypatch):
    monkeypatch.setattr(layer_positions, "CHUNK", chunk)
    monkeypatch.setattr(layer_positions, "_pairs_are_less", lambda *sizes: pairs)
    problem = made(name)
    rows, J = problem.capture().rows(), problem.explicit()
    for tensor in rows:
        compare(rows[tensor], J[tensor], **TOL)


def test_the_price_decides_between_pairs_and_rows():
    less = layer_positions._pairs_are_less
    assert less(512, 4, 700, 700, 700 * 700)
    assert not less(512, 100, 30, 30, 30 * 30)


@pytest.mark.parametrize("name", ["mlp", "sequence", "conv2d-groups", "embedding", "batch-norm-2d", "tied"])
def test_float32(name):
    problem = made(name, torch.float32)
    captured = problem.capture()
    rows, J = captured.rows(), problem.explicit()
    for tensor in rows:
        assert rows[tensor].gram().dtype == torch.float32
        compare(rows[tensor], J[tensor], rtol=1e-4, atol=1e-4)
    assert problem.proven() == problem.names


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_a_device(name):
    """Tensors of device meta have no numbers that could be read; they keep shape, dtype and device."""
    torch.manual_seed(1)
    module, x = CASES[name]()
    problem = Problem(module.to("meta"), x.to("meta"))
    captured = problem.capture()
    for found in captured.rows().values():
        u, v = captured.values.reshape(-1), torch.empty(found.size, dtype=torch.float64, device="meta")
        results = [found.squares(), found.gram(), found.transposed(u), found.along(v), found.columns()]
        m, n = u.numel(), found.size
        assert [tuple(result.shape) for result in results] == [(m,), (m, m), (n,), (m,), (n, m)]
        assert all(result.device.type == "meta" for result in results)


# ---- what is not by layers


class Overwriting(nn.Module):
    """An input is written to after its layer: no gradient of the weight could be made."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 1), nn.Linear(1, 1)

    def forward(self, x):
        z = self.inner(x)
        w = self.out(z)
        z += 1
        return torch.tanh(w) + z


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.inner(x)


class Renamed(nn.Linear):
    pass


class Borrowed(nn.Module):
    """A parameter of a layer, held by another module under a name of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(3, 3), None
        self.weight = self.inner.weight

    def forward(self, x):
        return self.inner(x) @ self.weight


class Shared(nn.Module):
    """A layer that sees no rows: positions, the same for all of them."""

    def __init__(self):
        super().__init__()
        self.places, self.out = nn.Embedding(7, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(torch.tanh(x + self.places(torch.arange(x.shape[1])))).sum(1)


class Unused(nn.Module):
    """A weight that is used without its layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(F.linear(x, self.inner.weight, self.inner.bias))


class Autocast(Unused):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            z = self.inner(x)
        return self.out(z.to(x))


class Sloped(nn.Module):
    """The network differentiated along its input by forward derivatives inside the module."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return torch.func.jvp(lambda x: self.out(torch.tanh(self.inner(x))), (x,), (torch.ones_like(x),))[1]


class OneByOne(Sloped):
    """Rows one by one in the module, in a batch by vmap."""

    def forward(self, x):
        return torch.func.vmap(lambda x: self.out(torch.tanh(self.inner(x[None])))[0])(x)


class SlopedByDuals(Sloped):
    def forward(self, x):
        with torch.autograd.forward_ad.dual_level():
            value = self.out(torch.tanh(self.inner(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))))
            return torch.autograd.forward_ad.unpack_dual(value).tangent


INNER = ("inner.weight", "inner.bias")
OUT = ("out.weight", "out.bias")
UNSUPPORTED = {
    "input-overwritten": (Overwriting, inputs, (3,), ("out.weight", "out.bias")),
    "own-parameter": (Scaled, inputs, (3,), ("scale",)),
    "subclass": (lambda: nn.Sequential(nn.Linear(3, 3), Renamed(3, 1)), inputs, (3,), ("1.weight", "1.bias")),
    "borrowed": (Borrowed, inputs, (3,), ("weight",)),
    "no-rows": (Shared, inputs, (7, 3), ("places.weight",)),
    "unused": (Unused, inputs, (3,), INNER),
    "batch-norm-in-training": (lambda: Flat(nn.BatchNorm1d(3)), inputs, (3,), ("layer.weight", "layer.bias")),
    "circular-padding": (
        lambda: Flat(nn.Conv1d(3, 2, 3, padding=1, padding_mode="circular")),
        inputs,
        (3, 4),
        ("layer.weight", "layer.bias"),
    ),
    "embedding-max-norm": (lambda: Flat(nn.Embedding(4, 3, max_norm=1.0)), tokens, (2,), ("layer.weight",)),
    # torch warns of its own torch.jit.script when forward mode is first used
    "jvp-inside": (Sloped, inputs, (3,), (*INNER, *OUT)),
    "vmap-inside": (OneByOne, inputs, (3,), (*INNER, *OUT)),
    "dual-numbers-inside": (SlopedByDuals, inputs, (3,), (*INNER, *OUT)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_no_layer_accounts_for_is_named(name):
    make, x, shape, expected = UNSUPPORTED[name]
    problem = Problem(make(), x(*shape))
    captured = problem.capture()
    assert set(captured.unsupported) == set(expected)
    torch.testing.assert_close(captured.values, problem.values(problem.theta), rtol=0, atol=0)
    rows = captured.rows()
    assert set(rows) == set(problem.names) - set(expected)
    problem.theta = {tensor: problem.theta[tensor] for tensor in rows}  # jacrev of the others may not be possible
    J = problem.explicit() if rows else {}
    for tensor in rows:
        compare(rows[tensor], J[tensor], **TOL)


def test_a_layer_in_another_dtype_is_unsupported():
    problem = Problem(Autocast(), torch.randn(ROWS, 3), dtype=torch.float32)  # float64 is not cast
    captured = problem.capture()
    assert captured.unsupported == INNER
    assert set(captured.rows()) == set(OUT)


def test_modules_of_other_kinds_are_unsupported():
    lstm = nn.LSTM(3, 4, batch_first=True)
    captured = capture(lstm, [name for name, _ in lstm.named_parameters()], lambda: lstm(torch.randn(2, 5, 3))[0], 2)
    assert len(captured.unsupported) == 4
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    names = [name for name, _ in attention.named_parameters()]
    x = torch.randn(2, 5, 4)
    assert set(capture(attention, names, lambda: attention(x, x, x)[0], 2).unsupported) == set(names)


# ---- what only the probe sees


class Decayed(Unused):
    def forward(self, x):
        return self.out(torch.tanh(self.inner(x))) + 1e-3 * self.inner.weight.square().sum()


class Both(Unused):
    def forward(self, x):
        return (torch.tanh(self.inner(x)) @ self.inner.weight)[:, :1]


class Coupled(Unused):
    def forward(self, x):
        z = torch.tanh(self.inner(x))
        return self.out(z - z.mean(0))


class PositionsFirst(Unused):
    """Positions in front of rows, as many as there are rows."""

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x.transpose(0, 1))).sum(0))


class InputSlope(Unused):
    """The slope of the network along its input, by a backward pass: the weights are used there as well."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.out(torch.tanh(self.inner(x))).sum(), x, create_graph=True)[0].sum(1)


FOUND_OUT = {
    "decayed": (Decayed, (3,), ("inner.weight",)),
    "used-besides": (Both, (3,), ("inner.weight",)),
    "coupled": (Coupled, (3,), INNER),
    "positions-first": (PositionsFirst, (ROWS, 3), INNER),
    "slope": (InputSlope, (3,), ("inner.weight", "out.weight")),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FOUND_OUT)
def test_the_probe_finds_what_layers_do_not_show(name, dtype):
    make, shape, wrong = FOUND_OUT[name]
    problem = Problem(make(), inputs(*shape).to(dtype), dtype=dtype)
    captured = problem.capture()
    assert set(wrong).isdisjoint(captured.unsupported)
    assert set(problem.proven()) == set(captured.rows()) - set(wrong)


class Checkpointed(Unused):
    """Layers that are run again in the backward pass, when nobody watches them."""

    def forward(self, x):
        return self.out(checkpoint(lambda x: torch.tanh(self.inner(x)).square(), x, use_reentrant=False))


def test_checkpointed_layers_are_not_proven():
    assert Problem(Checkpointed(), inputs(3)).proven() == ()


def test_many_values_are_probed_by_combinations():
    assert Problem(mlp(20), inputs(3)).proven() == Problem(mlp(20), inputs(3)).names
    assert set(Problem(Both(), torch.randn(50, 3, dtype=torch.float64)).proven()) == {"inner.bias"}


class Cancels(nn.Module):
    """A part that is the same at all positions, before a normalisation over positions: no value depends on it."""

    def __init__(self):
        super().__init__()
        self.inner, self.shift = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(2, 3, 1)

    def forward(self, x):
        z = self.inner(x) + self.shift(x.mean(2, keepdim=True).expand_as(x))
        z = (z - z.mean(2, keepdim=True)) / z.std(2, keepdim=True)
        return torch.tanh(z).cumsum(2).sin().sum((1, 2))


def test_terms_that_cancel_are_judged_by_their_size():
    """The rows of J are 0 but for rounding, by autograd and by layers another rounding."""
    problem = Problem(Cancels(), inputs(2, 40))
    assert problem.explicit()["shift.weight"].abs().max() < 1e-12
    assert problem.proven() == problem.names


# ---- hooks and errors


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        self.inner(x)
        raise RuntimeError("in the middle")


def test_no_hook_is_left_behind():
    module = Raises()
    with pytest.raises(RuntimeError, match="in the middle"):
        capture(module, ["inner.weight"], lambda: module(torch.randn(2, 3)), 2)
    assert not module.inner._forward_hooks
    problem = made("in-place")
    problem.capture()
    assert not any(part._forward_hooks for part in problem.module.modules())


def test_the_users_own_hooks_see_and_change_what_they_did_before():
    problem = made("mlp")
    problem.module[0].register_forward_hook(lambda layer, inputs, z: 2 * z)
    problem.module[2].register_forward_pre_hook(lambda layer, inputs: (3 * inputs[0],))
    rows, J = problem.capture().rows(), problem.explicit()
    for tensor in rows:
        compare(rows[tensor], J[tensor], **TOL)


def test_no_gradient_of_a_weight_is_made():
    """δ of the first layer costs no product with its weight, and no parameter is in the graph."""
    problem = made("mlp")
    captured = problem.capture()
    edges, found = [captured._graph.grad_fn], []
    while edges:
        node = edges.pop()
        found.append(type(node).__name__)
        edges += [follower for follower, _ in node.next_functions if follower is not None]
    assert found.count("AccumulateGrad") == 1  # the output of the first layer
    assert sum(name == "AddmmBackward0" for name in found) == 2  # of three layers


def test_some_names_only():
    problem = made("mlp")
    captured = capture(problem.module, ["2.bias", "0.weight"], lambda: problem.values(problem.theta), ROWS)
    rows, J = captured.rows(), problem.explicit()
    assert list(rows) == ["2.bias", "0.weight"]
    for tensor in rows:
        compare(rows[tensor], J[tensor], **TOL)


def test_values_that_depend_on_no_layer():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            with torch.no_grad():
                return self.inner(x)

    problem = Problem(Constant(), inputs(3))
    rows = problem.capture().rows()
    compare(rows["inner.weight"], torch.zeros(ROWS, 3, dtype=torch.float64), **TOL)
    assert problem.proven() == problem.names


def test_bad_input():
    problem = made("three-outputs")
    with pytest.raises(ValueError, match=r"names: 'nothing' is not a parameter of the module.*0\.weight"):
        capture(problem.module, ["nothing"], lambda: problem.values(problem.theta), ROWS)
    with pytest.raises(ValueError, match="n_rows: got 4 for 15 values"):
        capture(problem.module, problem.names, lambda: problem.values(problem.theta), 4)
    with pytest.raises(ValueError, match=r"seeds: got shape \(2, 3\); \(k, 5, 3\) is expected"):
        problem.capture().rows(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["mlp", "three-outputs"])
def test_blocks_travel_with_what_their_tensors_share(name):
    """On device meta there are no numbers: what has arrived there was sent, and a layer's δ only once."""
    problem = made(name)
    rows = problem.capture().rows()
    there = on_device(rows, torch.device("meta"))
    assert list(there) == list(rows)
    for tensor, found in there.items():
        gram = found.gram()
        assert gram.device.type == "meta"
        assert gram.shape == rows[tensor].gram().shape
    assert there["0.weight"].delta is there["0.bias"].rows
