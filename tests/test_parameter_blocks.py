"""Which tensors share a Hessian approximation, with names and without, and the flat vectors they lie in."""

import itertools

import pytest
import torch

from lmfit_gpu import MLBFGS
from lmfit_gpu.optim.parameter_blocks import Block, Flat, Member, grouped, laid_out


class Sequence(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 5)
        self.head = torch.nn.Linear(5, 2)


class Own(torch.nn.Module):
    """A module with tensors of its own beside those of a layer, one of them without axes."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.layer = torch.nn.Linear(3, 2)
        self.shift = torch.nn.Parameter(torch.zeros(2))


def dense():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def convolutional():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3))


def normalised():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 6, 1))


def members(model, *, named=True):
    return [Member(p, name if named else None, i) for i, (name, p) in enumerate(model.named_parameters())]


def partition(optimizer):
    return [(h["name"], h["n_params"]) for h in optimizer.inverse_hessians()]


def sizes(optimizer):
    return [n_params for _, n_params in partition(optimizer)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (dense, [("0", 16), ("2", 5)]),
        (convolutional, [("0", 40), ("3", 51)]),
        (normalised, [("0.weight", 36), ("1", 8), ("2", 30)]),
        (Sequence, [("lstm", 20 * (3 + 5 + 2)), ("head", 12)]),
        (Own, [("gain to shift", 3), ("layer", 8)]),
    ],
)
def test_a_block_is_one_module_s_tensors_where_names_are_known(make, expected):
    model = make()
    assert partition(MLBFGS(model)) == expected
    assert partition(MLBFGS(model.named_parameters())) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (dense, [16, 5]),  # as with names
        (convolutional, [40, 51]),  # as with names
        (normalised, [36 + 8, 30]),  # scale and shift of the norm are as long as the weights of the layer before it
        (Sequence, [20 * 3, 20 * (5 + 2), 12]),  # both biases join the second weight: two axes begin a block
        (Own, [1, 2, 8]),  # nothing says that gain and shift, of one module, belong together
    ],
)
def test_without_names_a_bias_joins_the_tensor_before_it(make, expected):
    assert sizes(MLBFGS(make().parameters())) == expected


def test_blocks_of_one_tensor_and_of_the_whole_model():
    model = dense()
    assert sizes(MLBFGS(model, blocks="tensor")) == [12, 4, 4, 1]
    assert sizes(MLBFGS(model, blocks="model")) == [21]
    assert sizes(MLBFGS(model.parameters(), blocks="tensor")) == [12, 4, 4, 1]
    assert sizes(MLBFGS(model.parameters(), blocks="model")) == [21]


@pytest.mark.parametrize("kind", ["module", "model"])
def test_tensors_of_other_dtypes_are_blocks_of_their_own(kind):
    layer = torch.nn.Linear(3, 2)
    layer.bias = torch.nn.Parameter(layer.bias.detach().double())
    assert sizes(MLBFGS(layer, blocks=kind)) == [6, 2]


def test_blocks_do_not_reach_over_param_groups():
    model = dense()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = MLBFGS([{"params": weights}, {"params": [], "lr": 0.1}, {"params": biases, "blocks": "model"}])
    assert sizes(optimizer) == [12, 4, 5]


def test_every_tensor_is_in_one_block_once():
    for make, kind, named in itertools.product(
        (dense, normalised, Sequence, Own), ("module", "tensor", "model"), (True, False)
    ):
        every = members(make(), named=named)
        assert sorted(m.number for block in grouped(every, kind) for m in block) == [m.number for m in every]


def test_the_views_of_a_flat_vector_are_the_vector():
    flat = Flat(torch.arange(9.0), [torch.Size(shape) for shape in ((2, 3), (), (0, 4), (2,))])
    assert [tuple(view.shape) for view in flat.views] == [(2, 3), (), (0, 4), (2,)]
    flat.views[0].zero_()
    flat.views[1].fill_(-1)
    assert flat.vector.tolist() == [0, 0, 0, 0, 0, 0, -1, 7, 8]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_the_blocks_of_an_owner_lie_in_one_vector(n_ranks):
    model = dense()
    model[2].double()
    blocks = [Block(of_block) for of_block in grouped(members(model), "tensor")]
    vectors = laid_out(blocks, n_ranks)
    assert all(len(shares) == n_ranks for shares in vectors)  # one list for each dtype
    for number, block in enumerate(blocks):
        block.work.vector.fill_(number + 1)
        assert block.work.vector.dtype == block.like.dtype
    for shares in vectors:
        for owner, share in enumerate(shares):
            mine = [b for b in blocks if b.owner == owner and b.like.dtype == share.dtype]
            expected = [blocks.index(b) + 1 for b in mine for _ in range(b.n_params)]
            assert share.tolist() == expected
