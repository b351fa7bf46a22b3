"""Paged layouts: gather and scatter against a loop over slots, for every layout, many dtypes, and
awkward strides."""

import pytest
import torch
from toys import metadata, range_of

from engine import ALIGN_BYTES, PagedKVCache

L, H, D, B, N = 3, 2, 4, 6, 4
SHAPES = {  # layout -> shape of one tensor, and K
    "2BNHD": ((2, B, N, H, D), 2), "B2NHD": ((B, 2, N, H, D), 2), "BHNC": ((B, H, N, 2 * D), 2),
    "SHD": ((B * N, H, D), 2), "BNC": ((B, N, H * D), 1), "BNHD": ((B, N, H, D), 1),
}  # fmt: skip
SLOTS = {
    "whole blocks": range_of(8, 4) + range_of(0, 4) + range_of(20, 4),
    "scattered": [5, 0, 23, 11, 7, 6],
    "a block, but turned": [3, 2, 1, 0],
    "a block's length, but not its start": range_of(2, 4),
    "one": [9],
}
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int8,
]


def random_of(dtype, *shape):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


def make(layout, dtype, heads=H, head_dim=D):
    """The serving engine's tensors, and metadata to match."""
    shape, num_kv = SHAPES[layout]
    count = 2 * L if layout == "SHD" else L
    tensors = [random_of(dtype, *shape) for _ in range(count)]
    meta = metadata(kv_dtype=dtype, kv_shape=(L, num_kv, 4, heads, head_dim), use_mla=num_kv == 1)
    return ([tensors[:L], tensors[L:]] if layout == "SHD" else tensors), meta


def at(kvcaches, layout, kv, layer, slot):
    """The [H*D] of one slot, read by the letters of the layout."""
    block, offset = slot // N, slot % N
    row = {
        "2BNHD": lambda: kvcaches[layer][kv, block, offset],
        "B2NHD": lambda: kvcaches[layer][block, kv, offset],
        "BHNC": lambda: kvcaches[layer][block, :, offset, kv * D : (kv + 1) * D],
        "SHD": lambda: kvcaches[kv][layer][slot], "BNC": lambda: kvcaches[layer][block, offset],
        "BNHD": lambda: kvcaches[layer][block, offset],
    }[layout]()  # fmt: skip
    return row.reshape(-1)


def naive(kvcaches, layout, meta, slots):
    rows = [
        at(kvcaches, layout, kv, layer, slot)
        for kv in range(meta.kv_shape[1])
        for layer in range(L)
        for slot in slots
    ]
    return torch.stack(
        [row.contiguous().view(torch.uint8) for row in rows]
    ).flatten()  # [K, L, T, H*D] as bytes


def check(kvcaches, layout, meta, slots):
    """Gather is what the loop reads; what is scattered is what the loop then reads; the rest is
    untouched."""
    paged, index = PagedKVCache(kvcaches, layout, meta), torch.tensor(slots)
    chunk = torch.zeros(naive(kvcaches, layout, meta, slots).numel(), dtype=torch.uint8)
    paged.gather([(index, chunk)])
    assert torch.equal(chunk, naive(kvcaches, layout, meta, slots))
    others = [slot for slot in range(B * N) if slot not in slots]
    before = naive(kvcaches, layout, meta, others)
    incoming = torch.randint(0, 256, chunk.shape, dtype=torch.uint8)
    paged.scatter([(index, incoming)])
    assert torch.equal(naive(kvcaches, layout, meta, slots), incoming)
    assert torch.equal(naive(kvcaches, layout, meta, others), before)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", SHAPES)
def test_round_trip(layout, dtype, slots):
    kvcaches, meta = make(layout, dtype)
    check(kvcaches, layout, meta, slots)


@pytest.mark.parametrize("layout", SHAPES)
def test_many_chunks_at_once(layout):
    """Of several lengths, some of whole blocks and some not, in one go."""
    kvcaches, meta = make(layout, torch.bfloat16)
    paged = PagedKVCache(kvcaches, layout, meta)
    jobs = []
    for slots in ([8, 9, 10, 11], [0, 2, 1], [23], [16, 17, 18, 19, 4, 5, 6, 7]):
        wanted = naive(kvcaches, layout, meta, slots)
        jobs.append((torch.tensor(slots), torch.zeros_like(wanted), wanted))
    paged.gather([(slots, chunk) for slots, chunk, _ in jobs])
    assert all(torch.equal(chunk, wanted) for _, chunk, wanted in jobs)
    paged.scatter([(slots, ~chunk) for slots, chunk, _ in jobs])
    assert all(
        torch.equal(naive(kvcaches, layout, meta, slots.tolist()), ~wanted)
        for slots, _, wanted in jobs
    )
    paged.gather([])


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 4, 6], [0, 1, 3, 4], [5, 1, 6, 0]], ids=str
)
@pytest.mark.parametrize("kind", ["whole blocks", "scattered", "of both"])
@pytest.mark.parametrize("layout", SHAPES)
def test_chunks_in_one_memory(layout, kind, starts):
    """Side by side, the other way round, with gaps: every byte is its own chunk's, and none between
    them is touched."""
    kvcaches, meta = make(layout, torch.bfloat16)
    paged, parts = PagedKVCache(kvcaches, layout, meta), torch.randperm(B)[:4]
    slots = (
        (parts[:, None] * N + torch.arange(N))
        if kind != "scattered"
        else torch.randperm(B * N)[: 4 * N].view(4, N)
    )
    if kind == "of both":
        slots[2] = slots[2].flip(0)
    wanted = [naive(kvcaches, layout, meta, row.tolist()) for row in slots]
    size = len(wanted[0])
    step = -(-size // ALIGN_BYTES) * ALIGN_BYTES
    memory = torch.full((7 * step,), 0xA5, dtype=torch.uint8)
    chunks = [memory[start * step : start * step + size] for start in starts]
    paged.gather(list(zip(slots, chunks, strict=True)))
    assert all(torch.equal(chunk, each) for chunk, each in zip(chunks, wanted, strict=True))
    between = torch.ones(len(memory), dtype=torch.bool)
    for start in starts:
        between[start * step : start * step + size] = False
    assert bool((memory[between] == 0xA5).all())
    memory.bitwise_not_()
    paged.scatter(list(zip(slots, chunks, strict=True)))
    assert all(
        torch.equal(naive(kvcaches, layout, meta, row.tolist()), ~each)
        for row, each in zip(slots, wanted, strict=True)
    )


def test_neighbours_that_are_not_one_memory():
    """Two allocations that touch: no view may reach from one into the other."""
    kvcaches, meta = make("2BNHD", torch.bfloat16)
    paged, slots = PagedKVCache(kvcaches, "2BNHD", meta), torch.arange(2 * N).view(2, N)
    wanted = [naive(kvcaches, "2BNHD", meta, row.tolist()) for row in slots]
    size = len(wanted[0])
    assert size % ALIGN_BYTES == 0
    memory = bytearray(2 * size)
    chunks = [
        torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size) for start in (0, size)
    ]
    paged.gather(list(zip(slots, chunks, strict=True)))
    assert memory == b"".join(bytes(each.tolist()) for each in wanted)


def test_one_chunk_to_two_places():
    """A segment that a prompt holds twice."""
    kvcaches, meta = make("2BNHD", torch.bfloat16)
    paged, chunk = (
        PagedKVCache(kvcaches, "2BNHD", meta),
        naive(kvcaches, "2BNHD", meta, range_of(0, 4)),
    )
    paged.scatter([(torch.tensor(range_of(8, 4)), chunk), (torch.tensor([20, 19, 18, 17]), chunk)])
    for slots in (range_of(8, 4), [20, 19, 18, 17]):
        assert torch.equal(naive(kvcaches, "2BNHD", meta, slots), chunk)


@pytest.mark.parametrize("offset", [0, 2, 4, 8])
def test_memory_that_is_not_aligned(offset):
    """A serving engine's memory may start anywhere: it is seen in steps that its address is a
    multiple of."""
    meta, kvcaches = metadata(kv_dtype=torch.bfloat16, kv_shape=(L, 2, 4, H, 8)), []
    for _ in range(L):
        memory = bytearray(2 * B * N * H * 8 * 2 + 16 + offset)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 + offset
        kvcaches.append(
            torch.frombuffer(memory, dtype=torch.bfloat16, offset=start, count=2 * B * N * H * 8)
        )
        kvcaches[-1].normal_()
    kvcaches = [one.view(2, B, N, H, 8) for one in kvcaches]
    assert all(one.data_ptr() % 16 == offset for one in kvcaches)
    assert PagedKVCache(kvcaches, "2BNHD", meta).wide.itemsize == {0: 16, 8: 8, 4: 4, 2: 2}[offset]
    for slots in SLOTS.values():
        check(kvcaches, "2BNHD", meta, slots)


@pytest.mark.parametrize("layout", ["2BNHD", "BNC"])
@pytest.mark.parametrize("heads, head_dim", [(1, 1), (1, 3), (3, 5), (1, 128)])
def test_odd_sizes(layout, heads, head_dim, monkeypatch):
    """3 * 5 values of 1, 2 or 4 bytes: no wider type fits."""
    shape = (2, B, N, heads, head_dim) if layout == "2BNHD" else (B, N, heads * head_dim)
    monkeypatch.setitem(SHAPES, layout, (shape, SHAPES[layout][1]))
    for dtype in (torch.bfloat16, torch.uint8):
        for slots in SLOTS.values():
            kvcaches, meta = make(layout, dtype, heads, head_dim)
            check(kvcaches, layout, meta, slots)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("which", [{0}, {1}, {0, 1, 2}], ids=str)
def test_layers_that_are_not_contiguous(which, slots):
    """Some or all layers are views with gaps; all go the way that the most awkward of them can
    go."""
    kvcaches, meta = make("2BNHD", torch.float32)
    kvcaches = [
        torch.zeros(2, B, N, 2 * H, D)[:, :, :, ::2].copy_(one) if layer in which else one
        for layer, one in enumerate(kvcaches)
    ]
    check(kvcaches, "2BNHD", meta, slots)


def test_a_last_axis_with_gaps():
    kvcaches, meta = make("2BNHD", torch.bfloat16)
    check(
        [torch.stack([one, one], -1)[..., 0] for one in kvcaches], "2BNHD", meta, SLOTS["scattered"]
    )


@pytest.mark.parametrize(
    "layout, kvcaches",
    [
        ("2BNHD", [torch.zeros(2, B, N, H, D)] * 2),  # a layer too few
        ("2BNHD", [torch.zeros(2, B, N, H, D + 1)] * L),
        ("2BNHD", [torch.zeros(2, B, N, H + 1, D)] * L),
        ("2BNHD", [torch.zeros(1, B, N, H, D)] * L),
        ("2BNHD", [torch.zeros(B, 2, N, H, D)] * L),
        ("2BNHD", [torch.zeros(2, B, N, H * D)] * L),
        ("2BNHD", [torch.zeros(2, B, N, H, D, dtype=torch.bfloat16)] * L),
        ("2BNHD", [torch.zeros(2, B, N, H, D)] * 2 + [torch.zeros(2, B + 1, N, H, D)]),
        ("BHNC", [torch.zeros(B, H, N, D)] * L),
        ("BHNC", [torch.zeros(B, H, N, 2 * D + 1)] * L),
        ("SHD", [[torch.zeros(B * N, H, D)] * L, [torch.zeros(B * N, H, D)] * (L - 1)]),
        ("SHD", [torch.zeros(B * N, H, D)] * L),
        ("NONE", [torch.zeros(2, B, N, H, D)] * L),
        ("2BNHD", [None] * L),
        ("2BNHD", []),
    ],
)
def test_what_does_not_fit_is_refused(layout, kvcaches):
    with pytest.raises(ValueError, match=r"kvcaches|zip"):
        PagedKVCache(kvcaches, layout, metadata(kv_shape=(L, 2, 4, H, D)))


@pytest.mark.parametrize("slots", [[-1], [B * N], [0, 2**40], [-(2**63)]])
def test_slots_that_are_not_there(slots):
    kvcaches, meta = make("2BNHD", torch.float32)
    paged, what = PagedKVCache(kvcaches, "2BNHD", meta), slots[-1]
    what = r"-1 \(padding\)" if what == -1 else what
    text = f"slot {what} is not in the paged cache; allowed: 0..{B * N - 1}"
    with pytest.raises(ValueError, match=text):
        paged.slots_of(torch.tensor(slots), len(slots), 0, len(slots))


def test_a_layout_seen_on_vllms_cpu_build():
    """[364, 3, 128, 128] for H=3, D=64, N=128: keys in the first 64 of the last axis, values in the
    rest."""
    kvcaches = [torch.randn(8, 3, 128, 128) for _ in range(2)]
    paged = PagedKVCache(kvcaches, "BHNC", metadata(kv_shape=(2, 2, 4, 3, 64)))
    assert (paged.num_blocks, paged.block_size) == (8, 128)
    chunk = torch.zeros(2 * 2 * 1 * 3 * 64 * 4, dtype=torch.uint8)
    paged.gather([(torch.tensor([128 * 5 + 7]), chunk)])
    found = chunk.view(torch.float32).view(2, 2, 3, 64)  # [K, L, H, D], of one token
    assert torch.equal(found[0, 1], kvcaches[1][5, :, 7, :64]) and torch.equal(
        found[1, 0], kvcaches[0][5, :, 7, 64:]
    )
