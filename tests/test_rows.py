"""Rows: tensors without copies, blocks, and the fixed tree of sums."""

import math

import numpy as np
import pytest
import torch

from lmfit_gpu.rows import LEAF_ROWS, ArrayRows, PairwiseTree, as_tensor, chunk_slices, leaf_slices

CPU = torch.device("cpu")


# ---- as_tensor


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.uint8, np.bool_, np.complex128])
def test_as_tensor_shares_memory(dtype):
    array = np.zeros((4, 3), dtype=dtype)
    shared = as_tensor(array)
    assert shared.data_ptr() == array.ctypes.data
    assert shared.shape == (4, 3)
    assert shared.numpy().dtype == dtype


def test_as_tensor_shares_the_memory_of_views():
    array = np.arange(24.0).reshape(6, 4)
    for view in (array[::2], array[:, 1:3], array.T, np.asfortranarray(array)):
        shared = as_tensor(view)
        assert shared.data_ptr() == view.ctypes.data
        np.testing.assert_array_equal(shared.numpy(), view)


def test_as_tensor_of_a_tensor_is_on_its_memory_without_gradient():
    given = torch.ones(3, requires_grad=True)
    shared = as_tensor(given)
    assert shared.data_ptr() == given.data_ptr()
    assert not shared.requires_grad


def test_as_tensor_of_a_read_only_array_does_not_copy_or_warn():
    array = np.arange(5.0)
    array.flags.writeable = False
    assert as_tensor(array).data_ptr() == array.ctypes.data


def test_as_tensor_of_a_read_only_memory_map(tmp_path):
    path = tmp_path / "rows.bin"
    np.arange(12.0).tofile(path)
    mapped = np.memmap(path, dtype=np.float64, mode="r", shape=(6, 2))
    shared = as_tensor(mapped)
    assert shared.data_ptr() == mapped.ctypes.data
    np.testing.assert_array_equal(shared.numpy(), np.arange(12.0).reshape(6, 2))


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4"])
def test_as_tensor_of_big_endian_numbers(dtype):
    shared = as_tensor(np.array([1, 2, 300], dtype=dtype))
    assert shared.tolist() == [1, 2, 300]
    assert shared.numpy().dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, 1:]], ids=str)
def test_as_tensor_of_negative_strides(view):
    array = np.arange(12.0).reshape(4, 3)[view]
    np.testing.assert_array_equal(as_tensor(array).numpy(), array)


def test_as_tensor_of_long_doubles_and_of_lists():
    assert as_tensor(np.array([1.5], dtype=np.longdouble)).dtype == torch.float64
    assert as_tensor([1.0, 2.5]).tolist() == [1.0, 2.5]
    assert as_tensor(3.0).shape == ()


# ---- slices


@pytest.mark.parametrize("n_rows", [0, 1, 9, 10, 11, 4096])
@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 5000])
def test_chunk_slices_cover_the_rows_once(n_rows, chunk_rows):
    slices = chunk_slices(n_rows, chunk_rows)
    assert [i for part in slices for i in range(n_rows)[part]] == list(range(n_rows))
    sizes = [part.stop - part.start for part in slices]
    assert sizes == [chunk_rows] * (n_rows // chunk_rows) + ([n_rows % chunk_rows] if n_rows % chunk_rows else [])


@pytest.mark.parametrize("per_row", [1, 3])
def test_leaf_slices_hold_whole_rows(per_row):
    n = (2 * LEAF_ROWS + 7) * per_row
    sizes = [part.stop - part.start for part in leaf_slices(n, per_row)]
    assert sizes == [LEAF_ROWS * per_row, LEAF_ROWS * per_row, 7 * per_row]


# ---- the tree


def joined(leaves):
    tree = PairwiseTree(lambda left, right: f"({left}{right})")
    for leaf in leaves:
        tree.push(leaf)
    return tree.result()


@pytest.mark.parametrize(
    ("leaves", "shape"),
    [
        ("a", "a"),
        ("ab", "(ab)"),
        ("abc", "((ab)c)"),
        ("abcd", "((ab)(cd))"),
        ("abcdef", "(((ab)(cd))(ef))"),
        ("abcdefg", "(((ab)(cd))((ef)g))"),
        ("abcdefgh", "(((ab)(cd))((ef)(gh)))"),
    ],
)
def test_the_shape_of_the_tree(leaves, shape):
    assert joined(leaves) == shape


@pytest.mark.parametrize("n", range(1, 70))
def test_the_tree_keeps_the_order_and_its_height_is_the_logarithm(n):
    leaves = [(str(i), 0) for i in range(n)]
    tree = PairwiseTree(lambda left, right: (f"{left[0]} {right[0]}", 1 + max(left[1], right[1])))
    for leaf in leaves:
        tree.push(leaf)
    text, height = tree.result()
    assert text == " ".join(str(i) for i in range(n))
    assert height == math.ceil(math.log2(n))


def test_a_tree_of_nothing_is_none():
    assert PairwiseTree(lambda left, right: left + right).result() is None


def test_result_may_be_asked_for_in_between():
    tree = PairwiseTree(lambda left, right: left + right)
    for i in range(1, 12):
        tree.push(i)
        assert tree.result() == i * (i + 1) // 2


def test_the_tree_holds_the_logarithm_of_what_was_pushed():
    live = []

    class Leaf:
        def __init__(self):
            live.append(self)

    def combine(left, right):
        live.remove(left)
        live.remove(right)
        return Leaf()

    tree = PairwiseTree(combine)
    for _ in range(1000):
        tree.push(Leaf())
        assert len(live) <= 11


def test_sums_of_the_tree_lose_little(rng):
    values = rng.standard_normal(2**14).astype(np.float32)
    tree = PairwiseTree(lambda left, right: left + right)
    for value in values:
        tree.push(value)
    error = abs(float(tree.result()) - math.fsum(map(float, values)))
    assert error <= 14 * np.finfo(np.float32).eps * float(np.abs(values).sum())


# ---- ArrayRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64, torch.int32, torch.bool])
def test_read_casts_to_the_arithmetic_of_the_model(given, dtype):
    rows = ArrayRows(torch.ones(5, 2).to(given), torch.ones(5).to(given))
    x, y = rows.read(slice(1, 4), CPU, dtype)
    assert (x.dtype, y.dtype) == (dtype, dtype)
    assert (x.shape, y.shape) == ((3, 2), (3,))
    assert rows.n_samples == 5


def test_read_shares_memory_where_nothing_is_cast():
    X, y = torch.ones(5, 2, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    part_x, part_y = ArrayRows(X, y).read(slice(0, 5), CPU, torch.float64)
    assert part_x.data_ptr() == X.data_ptr()
    assert part_y.data_ptr() == y.data_ptr()


def test_read_leaves_tokens_as_they_are_and_casts_targets():
    rows = ArrayRows(torch.arange(6).reshape(3, 2), torch.arange(3), cast_features=False)
    x, y = rows.read(slice(0, 2), CPU, torch.float64)
    assert x.dtype == torch.int64
    assert y.dtype == torch.float64


def test_read_squeezes_a_single_feature():
    rows = ArrayRows(torch.arange(4.0)[:, None], None, squeeze=True)
    x, y = rows.read(slice(1, 3), CPU, torch.float64)
    assert x.tolist() == [1.0, 2.0]
    assert y is None


def test_read_keeps_complex_numbers():
    rows = ArrayRows(torch.ones(3, 1, dtype=torch.complex128), torch.ones(3))
    assert rows.read(slice(0, 3), CPU, torch.float64)[0].dtype == torch.complex128


def test_read_by_row_numbers():
    rows = ArrayRows(torch.arange(10.0), torch.arange(10.0))
    x, y = rows.read(torch.tensor([7, 2]), CPU, torch.float64)
    assert x.tolist() == y.tolist() == [7.0, 2.0]
