"""The Triton kernels: on a GPU where there is one, else through Triton's interpreter on tiny shapes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from vllm_subspec.cpu.attention import tree_attention
from vllm_subspec.round.attention.tree_kernel import paged_tree_attention
from vllm_subspec.round.commit import move_kv

pytestmark = pytest.mark.kernels

WHOLE, SPLIT, MANY = 1, 600, 1 << 20  # values of max_keys: one split, about five, and as many as are ever made
PAGE = 16
OTHER_GPUS = Path(__file__).with_name("other_gpus.py")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_ancestors(rnd: random.Random, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestor mask [n, n] bool, nodes being their own ancestors, and depths [n] of a random tree."""
    ancestors, depths = torch.eye(num_nodes, dtype=torch.bool), torch.zeros(num_nodes, dtype=torch.int64)
    for node in range(1, num_nodes):
        parent = rnd.randrange(max(0, node - 20), node)
        ancestors[node] |= ancestors[parent]
        depths[node] = depths[parent] + 1
    return ancestors, depths


def empty_cache(num_blocks: int, kv_heads: int, size: int, page: int, by_token: bool, **kwargs) -> torch.Tensor:
    """[num_blocks, kv_heads, page, 2 * size] of NaN; in memory heads before tokens, or tokens before heads."""
    if by_token:
        return torch.full((num_blocks, page, kv_heads, 2 * size), torch.nan, **kwargs).transpose(1, 2)
    return torch.full((num_blocks, kv_heads, page, 2 * size), torch.nan, **kwargs)


class Problem:
    """Random rows of a random tree after a random context. Cache slots that no row may see hold NaN, as does `out`."""

    def __init__(
        self, device, context_len, num_nodes, num_rows, heads=(2, 1), size=64, window=None, cap=0.0,
        dtype=torch.float32, page=PAGE, by_token=False, seed=0,
    ):  # fmt: skip
        rnd = random.Random(seed)
        torch.manual_seed(seed)
        (num_heads, kv_heads), self.device, self.window, self.cap = heads, device, window, cap
        self.scale = size**-0.5
        ancestors, depths = random_ancestors(rnd, num_nodes)
        rows = torch.tensor(sorted(rnd.sample(range(num_nodes), num_rows)))
        self.mask = ancestors[rows].to(device)
        self.node_positions = (context_len + depths).to(device)
        self.row_positions = self.node_positions[rows.to(device)]

        total = context_len + num_nodes
        num_pages = -(-total // page)
        self.table = torch.randperm(num_pages + 3, device=device)[:num_pages].to(torch.int32)
        self.cache = empty_cache(num_pages + 3, kv_heads, size, page, by_token, dtype=dtype, device=device)
        self.query = torch.randn(num_rows, num_heads + 1, size, device=device).to(dtype)[:, 1:] * 2
        self.keys, self.values = torch.randn(2, total, kv_heads, size, device=device).to(dtype)
        self.visible = torch.cat([self.mask.new_ones(num_rows, context_len), self.mask], dim=1)
        if window is not None:
            positions = torch.cat([torch.arange(context_len, device=device), self.node_positions])
            self.visible &= positions[None, :] > self.row_positions[:, None] - window
        seen = self.visible.any(0).nonzero()[:, 0]
        pages, offsets = self.table[seen // page].long(), seen % page
        self.cache[pages, :, offsets] = torch.cat([self.keys, self.values], dim=-1)[seen]
        self.context_len = torch.tensor(context_len, device=device)

    def attend(self, max_keys: int) -> torch.Tensor:
        shape = self.query.shape
        out = torch.full((shape[0], shape[1] + 2, shape[2]), torch.nan, dtype=self.query.dtype, device=self.device)
        paged_tree_attention(
            self.query, self.cache, self.table, self.context_len, self.mask, self.row_positions, self.node_positions,
            out[:, 1:-1], self.scale, self.cap, self.window, max_keys=max_keys,
        )  # fmt: skip
        assert out[:, [0, -1]].isnan().all(), "wrote beyond out"
        assert not out[:, 1:-1].isnan().any(), "NaN written, or nothing"
        return out[:, 1:-1]

    def expected(self) -> torch.Tensor:
        query, keys, values = (t.double() for t in (self.query, self.keys, self.values))
        return tree_attention(query, keys, values, self.visible, self.scale, self.cap)

    def check(self, max_keys: int) -> None:
        got, expected = self.attend(max_keys).double(), self.expected()
        if self.query.dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        else:
            assert float((got - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("max_keys", [WHOLE, SPLIT])
@pytest.mark.parametrize("context_len", [0, 1, 15, 16, 17, 63, 64, 65, 150, 400])
def test_context_and_tree_meet_anywhere(device, context_len, max_keys):
    """Catches: keys lost or doubled where context meets tree, at page, block and split borders; empty splits as NaN;
    unseen nodes' stale slots leaking in."""
    Problem(device, context_len, num_nodes=12, num_rows=4, seed=context_len).check(max_keys)


@pytest.mark.parametrize("by_token, max_keys", [(False, WHOLE), (True, SPLIT)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (14, 2)])
@pytest.mark.parametrize("size", [64, 96])
def test_head_groups_and_sizes_in_either_layout(device, size, heads, by_token, max_keys):
    """Catches: a query head on the wrong kv head, keys taken for values, strides mixed up, padding of a head size that
    is no power of two read or written, tiles that cut through a row's heads."""
    Problem(device, 37, num_nodes=30, num_rows=11, heads=heads, size=size, by_token=by_token).check(max_keys)


@pytest.mark.parametrize("max_keys", [WHOLE, SPLIT])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("window", [1, 5, 40, 1000])
@pytest.mark.parametrize("context_len", [3, 64, 170])
def test_window_and_soft_cap(device, context_len, window, cap, max_keys):
    """Catches: a window by slot instead of position or off by one, blocks skipped that a row sees, freed blocks below
    the window leaking in, a cap applied after the softmax's scale to base 2."""
    Problem(device, context_len, num_nodes=20, num_rows=9, window=window, cap=cap, seed=window).check(max_keys)


@pytest.mark.parametrize("max_keys", [WHOLE, SPLIT])
def test_trees_of_many_tiles_and_blocks(device, max_keys):
    """Catches: rows or nodes past the first tile addressed wrongly, a block skipped that some row of the tile sees."""
    Problem(device, 20, num_nodes=150, num_rows=100, heads=(2, 1)).check(max_keys)


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("page", [16, 32, 272])
def test_large_heads_and_other_pages(device, size, page):
    """Catches: block sizes that do not follow the head size, a page size taken for a power of two."""
    Problem(device, 100, num_nodes=7, num_rows=1, heads=(3, 1), size=size, page=page).check(SPLIT)


def test_as_many_splits_as_the_kernel_makes(device):
    """Catches: the combining kernel going wrong where splits are no power of two, or it takes few dimensions a time."""
    Problem(device, 70, num_nodes=5, num_rows=2, heads=(2, 2)).check(MANY)


@pytest.mark.parametrize("max_keys", [WHOLE, SPLIT])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision(device, dtype, max_keys):
    """Catches: accumulation or partial results in half precision, output cast wrongly."""
    Problem(device, 100, num_nodes=12, num_rows=6, heads=(6, 2), dtype=dtype).check(max_keys)


@pytest.mark.parametrize("max_keys", [WHOLE, SPLIT])
def test_row_that_sees_nothing_gets_zeros(device, max_keys):
    """Catches: 0 / 0 in rows that only pad a batch, which would spread through the cache."""
    problem = Problem(device, 0, num_nodes=5, num_rows=3)
    problem.mask[1] = False
    got = problem.attend(max_keys)
    assert (got[1] == 0).all() and (got[[0, 2]] != 0).any()


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_context_grows_under_one_set_of_arguments(device, integer):
    """Catches: a grid or workspace that depends on the context's length; context_len of shape [1] or int32 refused."""
    small, large = (Problem(device, context_len, num_nodes=6, num_rows=2) for context_len in (5, 200))
    context_len = torch.tensor([0], dtype=integer, device=device)
    for problem in (small, large):
        problem.context_len = context_len.fill_(int(problem.context_len))
        problem.check(SPLIT)


@pytest.mark.parametrize("heads", [(2, 1), (12, 2)])
def test_smaller_trees_share_the_kernels_of_the_largest(monkeypatch, heads):
    """Catches: a kernel compiled in the middle of an answer, because its last trees have fewer rows."""
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(constants)

    for kernel in ("_attention_kernel", "_combine_kernel"):
        monkeypatch.setattr(f"vllm_subspec.round.attention.tree_kernel.{kernel}", Recorder())
    for rows in (1, 2, 7, 40, 289):
        problem = Problem("cpu", 50, num_nodes=289, num_rows=rows, heads=heads)
        paged_tree_attention(
            problem.query, problem.cache, problem.table, problem.context_len, problem.mask, problem.row_positions,
            problem.node_positions, problem.query.clone(), problem.scale, max_keys=2048, max_rows=289,
        )  # fmt: skip
    assert len(launched) in (5, 10)
    assert len({str(constants) for constants in launched}) == len(launched) // 5


@pytest.mark.parametrize("num_rows", [3, 40])
def test_few_rows_of_a_large_tree(device, num_rows):
    """Catches: tiles that do not follow from the rows there are, partial results mixed up."""
    problem = Problem(device, 100, num_nodes=60, num_rows=num_rows, heads=(6, 2))
    out = torch.full_like(problem.query, torch.nan)
    paged_tree_attention(
        problem.query, problem.cache, problem.table, problem.context_len, problem.mask, problem.row_positions,
        problem.node_positions, out, problem.scale, max_keys=SPLIT, max_rows=300,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), problem.expected(), rtol=1e-5, atol=1e-5)


def move_by_definition(cache, table, context_len, path, length):
    page = cache.shape[2]
    before = cache.clone()
    for j in range(1, length + 1):
        source, target = context_len + path[j], context_len + j
        cache[table[target // page], :, target % page] = before[table[source // page], :, source % page]


def check_move(device, seed, num_nodes, kv_heads, size, dtype, by_token):
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    context_len, depth = rnd.randrange(0, 40), rnd.randrange(1, num_nodes)
    length = rnd.randrange(0, depth + 1)
    path = [0, *sorted(rnd.sample(range(1, num_nodes), length))]
    path += [rnd.randrange(num_nodes) for _ in range(depth - length)]
    num_pages = -(-(context_len + num_nodes) // PAGE)
    table = torch.randperm(num_pages + 2)[:num_pages].to(torch.int32).to(device)
    shape = (num_pages + 2, kv_heads, size, PAGE, by_token)
    got = [empty_cache(*shape, dtype=dtype, device=device).normal_() for _ in range(2)]
    expected = [cache.clone() for cache in got]
    for cache in expected:
        move_by_definition(cache, table.tolist(), context_len, path, length)
    move_kv(got, table, *(torch.tensor(x, device=device) for x in (context_len, path, length)))
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("size", [64, 40])
@pytest.mark.parametrize("seed", range(6))
def test_move_kv_reads_all_then_writes(device, seed, size, by_token):
    """Catches: a slot overwritten before it was read, another slot touched, the root or padding moved, a page border
    missed, a head or a part of one left behind."""
    check_move(device, seed, num_nodes=40, kv_heads=2, size=size, dtype=torch.float32, by_token=by_token)


def test_move_kv_of_a_root_alone(device):
    """Catches: a launch over no steps."""
    cache = torch.zeros(2, 1, PAGE, 8, device=device)
    zero = torch.tensor(0, device=device)
    move_kv([cache], torch.zeros(1, dtype=torch.int32, device=device), zero, zero[None], zero)
    assert (cache == 0).all()


@pytest.mark.parametrize("capability, kib", [(75, 64), (86, 99)])
def test_tiles_fit_the_shared_memory_of_other_gpus(capability, kib):
    """Catches: a kernel that only an H200, with 227 KiB, can launch. Needs no GPU: it is only compiled."""
    done = subprocess.run([sys.executable, OTHER_GPUS, str(capability)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 16 * 1024 < int(done.stdout.split()[-1]) <= kib * 1024


@pytest.mark.gpu
def test_kernels_are_compiled():
    """Catches: GPU tests that pass through the interpreter."""
    assert not triton.knobs.runtime.interpret


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, size", [((32, 8), 128), ((28, 4), 128), ((9, 3), 64), ((32, 32), 96), ((8, 4), 256)])
@pytest.mark.parametrize("context_len, num_nodes, num_rows", [(5000, 73, 6), (32000, 289, 64), (3000, 289, 289)])
def test_model_shapes(context_len, num_nodes, num_rows, heads, size, dtype):
    """Catches: a tile that does not fit the GPU's shared memory, warps or pipelining that break what one thread does
    right."""
    Problem("cuda", context_len, num_nodes, num_rows, heads, size, dtype=dtype).check(context_len + num_nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("window, cap", [(None, 0.0), (1024, 50.0)])
def test_large_tree(window, cap):
    """Catches: offsets into a mask of 67 million entries, and one split for many tiles, gone wrong."""
    Problem("cuda", 2000, 8193, 8193, heads=(4, 2), size=128, window=window, cap=cap, dtype=torch.bfloat16).check(10193)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 512])
def test_replayed_graph_follows_the_context(window):
    """Catches: anything of the context's length baked into a captured graph."""
    problems = [
        Problem("cuda", n, 73, 6, heads=(32, 8), size=128, window=window, dtype=torch.bfloat16) for n in (9000, 0, 777)
    ]
    static = problems[0]
    out = torch.full_like(static.query, torch.nan)

    def attend():
        paged_tree_attention(
            static.query, static.cache, static.table, static.context_len, static.mask, static.row_positions,
            static.node_positions, out, static.scale, static.cap, window, max_keys=10000,
        )  # fmt: skip

    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for problem in problems[1:]:
        static.cache[: len(problem.cache)] = problem.cache
        static.table[: len(problem.table)] = problem.table
        for name in ("query", "context_len", "mask", "row_positions", "node_positions"):
            getattr(static, name).copy_(getattr(problem, name))
        out.fill_(torch.nan)
        graph.replay()
        expected = problem.expected()
        assert float((out - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(50))
def test_move_kv_across_warps(seed, dtype):
    """Catches: a warp that stores before another has loaded."""
    check_move("cuda", seed, num_nodes=300, kv_heads=8, size=128, dtype=dtype, by_token=seed % 2 == 1)
