"Who sees whom, how distance counts, and kernels that agree: attention without a model around it."

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bertlab.model.attention as attention
from bertlab.model.attention import (
    device_capability,
    ATTENTION_KERNELS,
    AttentionMaskSpec,
    KernelRequest,
    attend,
    check_kernel,
    choose_kernel,
    document_mask,
    pad_input,
    document_position_ids,
    repeat_kv,
    unpad_input,
    make_flex_mask,
    make_varlen_metadata,
)

TOLERANCE = dict(rtol=0, atol=1e-5)
L = 12
# Rows of document lengths; what is missing to L is padding.
ROWS = [[5, 4, 3], [1, 7, 1], [12], [6, 3], []]
DOCUMENTS = torch.tensor(
    [[d for d, n in enumerate(ns, 1) for _ in range(n)] + [0] * (L - sum(ns)) for ns in ROWS]
)
HALF = torch.bfloat16


# ---- masks, positions, distances -------------------------------------------------------------


def test_document_mask_is_equal_numbers_that_are_not_zero():
    mask = document_mask(torch.tensor([[1, 1, 2, 0]]))
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == want


@given(st.lists(st.integers(1, 6), max_size=6), st.integers(0, 4))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_positions_equal_counting_by_hand(lengths, padding):
    documents = [d for d, n in enumerate(lengths, 1) for _ in range(n)] + [0] * (padding + 1)
    want = [i for n in lengths for i in range(n)] + [0] * (padding + 1)
    assert document_position_ids(torch.tensor([documents])).tolist() == [want]


def test_alibi_bias_by_hand():
    bias = attention.alibi_bias(torch.tensor([0.5, 2.0]), 3)
    assert bias[0, 0].tolist() == [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]
    assert bias[0, 1].tolist() == [[0, -2, -4], [-2, 0, -2], [-4, -2, 0]]


def test_neighbouring_queries_share_a_head_of_keys():
    kv = torch.arange(3.0).view(1, 3, 1, 1)
    assert repeat_kv(kv, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert repeat_kv(kv, 3) is kv


# ---- kernels agree ---------------------------------------------------------------------------


def one_by_one(q, k, v, metadata):
    "Compute what a variable-length kernel does, as softmax over one document after the other."
    groups, parts = q.shape[1] // k.shape[1], []
    for a, b in itertools.pairwise(metadata.cu_lengths.tolist()):
        assert 0 < b - a <= metadata.max_length
        distance = (torch.arange(b - a)[:, None] - torch.arange(b - a)).abs()
        k_heads, v_heads = (t[0, :, a:b].repeat_interleave(groups, 0) for t in (k, v))
        scores = q[0, :, a:b] @ k_heads.mT / q.shape[-1] ** 0.5
        if metadata.slopes_H is not None:
            scores = scores - metadata.slopes_H[:, None, None] * distance
        if metadata.window is not None:
            scores = scores.masked_fill(distance > metadata.window, -torch.inf)
        parts.append(scores.softmax(-1) @ v_heads)
    return torch.cat(parts, 1)[None] if parts else q[:, :, :0]


def run(kernel, q, k, v, documents, window=None, slopes=None, attend_varlen=one_by_one):
    "Attend with any kernel on padded rows; `varlen` unpads first and is imitated."
    if kernel != "varlen":
        return attend(q, k, v, AttentionMaskSpec(documents, window, slopes), kernel)
    places, numbers = unpad_input(documents)
    flat = [t.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1)[None] for t in (q, k, v)]
    spec = AttentionMaskSpec(numbers, window, slopes, documents.shape[1])
    y = attend_varlen(*flat, make_varlen_metadata(spec)).transpose(1, 2).flatten(2)
    return pad_input(y, places, documents.shape).unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def some_heads(num_heads, groups, grad=False):
    g = torch.Generator().manual_seed(0)
    shapes = [(5, heads, L, 8) for heads in (num_heads, groups, groups)]
    return [torch.randn(shape, generator=g).requires_grad_(grad) for shape in shapes]


PATTERNS = {
    "documents": {},
    "windows": dict(window=3),
    "distances": dict(slopes=torch.tensor([0.5, 0.1, 1.0, 0.02])),
    "windows_and_distances": dict(window=2, slopes=torch.tensor([0.5, 0.1, 1.0, 0.02])),
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_each_kernel_equals_softmax_written_out(kernel, pattern, groups):
    q, k, v = some_heads(4, groups)
    window = PATTERNS[pattern].get("window", L)
    slopes = PATTERNS[pattern].get("slopes", torch.zeros(4))
    got = run(kernel, q, k, v, DOCUMENTS, **PATTERNS[pattern])
    for row, i in itertools.product(range(5), range(L)):
        same = [j for j in range(L) if DOCUMENTS[row, i] == DOCUMENTS[row, j] != 0]
        visible = [j for j in same if abs(i - j) <= window]
        want = torch.zeros(4, 8)
        for h in range(4) if visible else ():
            scores = k[row, h * groups // 4, visible] @ q[row, h, i] / 8**0.5
            scores = scores - slopes[h] * (torch.tensor(visible) - i).abs()
            want[h] = scores.softmax(0) @ v[row, h * groups // 4, visible]
        torch.testing.assert_close(got[row, :, i], want, **TOLERANCE)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_each_kernel_has_the_gradients_of_the_plain_one(kernel, pattern):
    weights = torch.randn(5, 4, L, 8, generator=torch.Generator().manual_seed(1))
    gradients = []
    for name in ("eager", kernel):
        qkv = some_heads(4, 2, grad=True)
        (run(name, *qkv, DOCUMENTS, **PATTERNS[pattern]) * weights).sum().backward()
        gradients.append([t.grad for t in qkv])
    for want, got in zip(*gradients):
        assert got.isfinite().all() and (got[4] == 0).all()  # the last row is padding only
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.1])], ids=["plain", "distances"])
def test_padding_gives_zero_and_no_nan_in_half_precision(kernel, slopes):
    q, k, v = (t.to(HALF).requires_grad_() for t in some_heads(2, 2))
    y = attend(q, k, v, AttentionMaskSpec(DOCUMENTS, None, slopes), kernel)
    y.float().square().sum().backward()
    assert (y.transpose(1, 2)[DOCUMENTS == 0] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


# ---- blocks and unpadding --------------------------------------------------------------------


def test_blocks_between_documents_are_never_computed():
    documents = torch.arange(1, 9).repeat_interleave(128)[None]
    blocks = lambda spec: make_flex_mask(spec).block_mask.to_dense()
    assert torch.equal(blocks(AttentionMaskSpec(documents))[0, 0], torch.eye(8).int())
    assert blocks(AttentionMaskSpec(torch.ones_like(documents), 64)).sum() == 8 + 2 * 7


rows_of_lengths = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4)


@given(rows_of_lengths, st.booleans(), st.sampled_from([1, 7, 100]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unpadding_keeps_every_token_and_every_border(rows, padding_left, first_number):
    width = max(1, max(map(sum, rows)))
    documents = torch.zeros(len(rows), width, dtype=torch.long)
    for row, lengths in zip(documents, rows):
        numbers = [first_number + d for d, n in enumerate(lengths) for _ in range(n)]
        start = width - len(numbers) if padding_left else 0
        row[start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    places, numbers = unpad_input(documents)
    x = torch.randn(len(rows), width, 3)
    back = pad_input(x.flatten(0, 1)[places][None], places, documents.shape)
    assert torch.equal(back, x * (documents > 0)[..., None])
    got = make_varlen_metadata(AttentionMaskSpec(numbers, max_length=width))
    want = [0, *itertools.accumulate(itertools.chain(*rows))]
    assert got.cu_lengths.tolist() == want and got.cu_lengths.dtype == torch.int32


def test_a_batch_of_padding_only_unpads_to_nothing():
    places, numbers = unpad_input(torch.zeros(2, 3, dtype=torch.long))
    metadata = make_varlen_metadata(AttentionMaskSpec(numbers))
    assert len(places) == 0 and metadata.cu_lengths.tolist() == [0]
    q = torch.zeros(1, 2, 0, 8)
    assert ATTENTION_KERNELS["varlen"].attend(q, q, q, metadata).shape == q.shape
    assert (pad_input(torch.zeros(1, 0, 4), places, (2, 3)) == torch.zeros(2, 3, 4)).all()


# ---- choice and refusals ---------------------------------------------------------------------


every_request = st.builds(
    KernelRequest,
    device=st.sampled_from(["cpu", "cuda", "mps", "xla"]),
    dtype=st.sampled_from([torch.float32, HALF, torch.float16]),
    row_length=st.sampled_from([16, 128, 512, 513, 8192]),
    head_dim=st.sampled_from([4, 8, 12, 64, 264]),
    dropout=st.sampled_from([0.0, 0.1]),
    alibi=st.booleans(),
    trains=st.booleans(),
    weights=st.booleans(),
    compiled=st.booleans(),
    capability=st.sampled_from([(7, 5), (8, 0), (9, 0)]),
)


@given(every_request)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_chosen_kernel_can_run(setting):
    name, reason = choose_kernel(setting)
    check_kernel(name, setting)
    assert reason and not (setting.compiled and ATTENTION_KERNELS[name].unpads)
    assert not setting.weights or name == "eager"
    assert setting.device in ("cpu", "cuda") or setting.weights or name == "sdpa"


@pytest.mark.parametrize("setting, want", [
    (KernelRequest("cuda", HALF), "varlen"),
    (KernelRequest("cuda", torch.float16, capability=(7, 5)), "sdpa"),  # not tried on a T4
    (KernelRequest("cuda", HALF, compiled=True), "flex"),
    (KernelRequest("cuda", HALF, compiled=True, trains=False), "sdpa"),  # wrong in torch 2.11
    (KernelRequest("cuda", torch.float32), "sdpa"),  # flex was not timed there
    (KernelRequest("cuda", HALF, compiled=True, head_dim=128), "sdpa"),  # too wide for small GPUs
    (KernelRequest("cuda", HALF, compiled=True, row_length=128), "sdpa"),  # one block: all is read
    (KernelRequest("cuda", HALF, dropout=0.1), "sdpa"),
    (KernelRequest("cuda", HALF, weights=True), "eager"),
    (KernelRequest("cpu", trains=False), "sdpa"),
    (KernelRequest("cpu", HALF, row_length=128), "eager"),
    (KernelRequest("cpu", dropout=0.1, trains=False), "eager"),  # drops as the second pass will
])  # fmt: skip
def test_fastest_kernel_of_a_setting(setting, want, monkeypatch):
    monkeypatch.setattr(attention, "_FLASH", False)
    monkeypatch.setattr(attention, "_VARLEN", True)
    assert choose_kernel(setting)[0] == want


@pytest.mark.parametrize("kernel, setting, message", [
    ("flex", KernelRequest("cuda", dropout=0.1), "attention_dropout 0.1 to 0.*'sdpa'"),
    ("flex", KernelRequest("cpu"), "backward.*no_grad.*'eager' or 'sdpa'"),
    ("flex", KernelRequest("cuda", head_dim=8), "16 numbers.*8"),
    ("varlen", KernelRequest("cpu", HALF), "CUDA.*cpu.*'eager' or 'sdpa'"),
    ("varlen", KernelRequest("cuda"), "16 bits.*float32.*bf16-mixed.*'flex'"),
    ("varlen", KernelRequest("cuda", HALF, head_dim=20), "multiple of 8.*20"),
    ("sdpa", KernelRequest("cpu", weights=True), "output_attentions.*'eager'"),
    ("fast", KernelRequest("cpu"), "'fast'.*eager, sdpa, flex, varlen"),
])  # fmt: skip
def test_a_kernel_that_cannot_run_is_named_with_others(kernel, setting, message):
    with pytest.raises(ValueError, match=message):
        check_kernel(kernel, setting)


# ---- on a GPU --------------------------------------------------------------------------------


def on_gpu(kernel, dtype, pattern):
    "Return outputs and gradients of a kernel on CUDA, for rows of several blocks."
    documents = torch.zeros(3, 400, dtype=torch.long)
    for row, lengths in zip(documents, ([150, 1, 249], [400], [77, 3])):
        numbers = torch.arange(1, len(lengths) + 1)
        row[: sum(lengths)] = numbers.repeat_interleave(torch.tensor(lengths))
    g, real = torch.Generator().manual_seed(0), (documents > 0)[:, None, :, None].cuda()
    shapes = [(3, heads, 400, 32) for heads in (4, 2, 2, 4)]
    *qkv, weights = (torch.randn(shape, generator=g).to("cuda", dtype) for shape in shapes)
    qkv = [t.requires_grad_() for t in qkv]
    slopes = pattern["slopes"].cuda() if "slopes" in pattern else None
    varlen = lambda *args: ATTENTION_KERNELS["varlen"].attend(*args)
    y = run(kernel, *qkv, documents.cuda(), pattern.get("window"), slopes, varlen)
    (y * weights * real).sum().backward()
    return [y.detach().float() * real, *(t.grad.float() for t in qkv)]


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_trains_on_a_gpu_like_the_plain_kernel(pattern):
    want = on_gpu("eager", torch.float32, PATTERNS[pattern])
    for a, b in zip(on_gpu("flex", torch.float32, PATTERNS[pattern]), want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_padding_leaves_no_nan_in_the_fused_kernel_on_a_gpu(pattern, dtype):
    "cuDNN's attention gives queries that may look nowhere NaN as their gradient, where they were not opened."
    want = on_gpu("eager", torch.float32, PATTERNS[pattern])
    for a, b in zip(on_gpu("sdpa", dtype, PATTERNS[pattern]), want):
        assert a.isfinite().all()
        assert (a - b).abs().mean() < (1e-4 if dtype == torch.float32 else 0.02) * b.abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["documents", "windows"])
def test_varlen_trains_on_a_gpu_close_to_the_plain_kernel(pattern):
    want = on_gpu("eager", torch.float32, PATTERNS[pattern])
    for a, b in zip(on_gpu("varlen", HALF, PATTERNS[pattern]), want):
        assert a.isfinite().all()
        assert (a - b).abs().mean() < 0.02 * b.abs().mean()  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_score_is_large_enough_to_reach_another_document(dtype):
    q = torch.full((1, 1, 4, 4), 200.0, dtype=dtype)  # -32,000 within, 32,000 across
    k = torch.tensor([-80.0, -80.0, 80.0, 80.0])[:, None].expand(1, 1, 4, 4).to(dtype)
    mask = attention.make_dense_mask(AttentionMaskSpec(torch.tensor([[1, 1, 2, 2]])))
    weights = attention.attention_weights(q, k, mask)[0, 0]
    assert (weights[:2, 2:] == 0).all() and (weights[2:, :2] == 0).all()
    assert torch.equal(weights.sum(-1), torch.ones(4))


def test_a_compiler_sees_the_capability_of_an_older_card(monkeypatch):
    card = SimpleNamespace(major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    compiled = torch.compile(
        lambda x: x * device_capability(torch.device("cuda", 0))[0], backend="eager"
    )
    assert compiled(torch.ones(1)).item() == 7
