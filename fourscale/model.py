"""One GPT, two blocks: `gpt2` (Radford et al. 2019) and `modern` (as in Llama and Qwen3).

Shapes: B windows, T tokens, D = d_model, H query heads, K key/value heads, C = head_dim, V = vocab_size.
The residual stream, the norms and the loss are fp32 under autocast, in every mode of parallelism.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fourscale.cli import is_rank_zero, say
from fourscale.config import ModelConfig
from fourscale.headloss import IGNORE as IGNORE
from fourscale.headloss import softmax_gradient, summed_loss, token_losses

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Tokens of a window from which torch's CPU kernel is as fast in bf16 as in fp32: below, 1.7 to 3 times slower.
FP32_ATTENTION_BELOW = 256


class Norm(nn.Module):
    """LayerNorm (gpt2) or RMSNorm (modern, Zhang and Sennrich 2019), computed in fp32: [..., width] -> [..., width]."""

    def __init__(self, width: int, cfg: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if cfg.arch == "gpt2" else None
        self.eps = cfg.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # CPU autocast would hand back bf16
            x, w = x.float(), self.weight.float()
            if self.bias is not None:
                return F.layer_norm(x, w.shape, w, self.bias.float(), self.eps)
            return F.rms_norm(x, w.shape, w, self.eps)


def rotary_tables(n_tokens: int, cfg: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE, fp32 [n_tokens, head_dim] each, the halves repeated (Su et al. 2021, arXiv:2104.09864).

    cfg.rope_scaling: linear stretches all wavelengths by a factor (Chen et al. 2023, arXiv:2306.15595); llama3 those
    longer than CTX / LOW tokens, none shorter than CTX / HIGH, and blends between (Grattafiori et al. 2024,
    arXiv:2407.21783, and the code published with it).
    """
    # Operations in transformers' order: at position 100,000, an ulp of a frequency is a hundredth of a radian.
    freq = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2, device=device, dtype=torch.float32) / cfg.head_dim)
    if (stretch := cfg.rope_stretch()) is not None:
        kind, (factor, *bounds) = stretch
        kept = torch.zeros_like(freq)  # share of each frequency that isn't stretched
        if kind == "llama3":
            low, high, ctx = bounds
            kept = ((ctx / (2 * math.pi / freq) - low) / (high - low)).clamp(0, 1)
        freq = (1 - kept) * freq / factor + kept * freq
    angle = torch.outer(torch.arange(n_tokens, device=device, dtype=torch.float32), freq)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, T, C] by [T, C] or [B, 1, T, C], in the half-split layout that Hugging Face's Llama uses."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


# ---- documents within a window (--doc-mask) ------------------------------------------------------------------------


def document_starts(idx: Tensor, eot_id: int) -> Tensor:
    """Index at which each token's document begins within its window: ids int64 [B, T] -> int64 [B, T].

    An end-of-text token opens the next document: it predicts the first token, as where sample.py begins with it alone.
    The start of the window counts as a start.
    """
    opened = torch.where(idx == eot_id, torch.arange(idx.shape[1], device=idx.device), 0)
    return opened.cummax(dim=1).values


def visible_from(starts: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule (window, head, query, key) -> bool: a token sees its document up to itself. It's a mask_mod of flex."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (starts[b, q] <= kv) & (kv <= q)

    return visible


@functools.cache
def compiled_flex() -> tuple[Callable[..., BlockMask], Callable[..., Tensor]] | None:
    """(create_block_mask, flex_attention), compiled; None, said once, where this machine can't compile for its GPU.

    Dong et al. 2024, "Flex Attention", arXiv:2412.05496: blocks that lie wholly in other documents are skipped.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    build, attend = (torch.compile(f, dynamic=False) for f in (create_block_mask, flex_attention))
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            q, k, v = (torch.zeros(1, 1, 128, 16, device="cuda", requires_grad=True) for _ in range(3))
            starts = torch.zeros(1, 128, dtype=torch.int64, device="cuda")
            attend(q, k, v, block_mask=build(visible_from(starts), 1, None, 128, 128, device="cuda")).sum().backward()
    except Exception as e:  # no Triton, no compiler, a card too old: each has an exception of its own
        if is_rank_zero():
            first = (str(e).strip() or type(e).__name__).splitlines()[0]
            say(f"note: --doc-mask without flex_attention, not compiled here ({first}): slower, same result")
        return None
    return build, attend


def fits_flex(starts: Tensor, head_dim: int, dropout: float) -> bool:
    """True where flex_attention pays and can be used: long windows in training on CUDA, without dropout.

    Without gradients (held-out loss, sampling) shapes vary, and each would be compiled anew.
    """
    long = starts.shape[1] >= 128 and head_dim >= 16  # a block of the mask, and the kernel's least width
    return starts.is_cuda and torch.is_grad_enabled() and long and dropout == 0


def document_mask(starts: Tensor, head_dim: int, dropout: float) -> Tensor | BlockMask:
    """What each token may see, for all blocks of a forward: 0 or -inf, [B, 1, T, T], or flex's BlockMask.

    In the dtype of the queries: of a boolean mask, each block would make such a copy and keep it for the backward.
    """
    (B, T), device = starts.shape, starts.device
    if fits_flex(starts, head_dim, dropout) and (compiled := compiled_flex()) is not None:
        create_block_mask, _ = compiled
        return create_block_mask(visible_from(starts), B, None, T, T, device=device)
    window, token = torch.arange(B, device=device).view(B, 1, 1, 1), torch.arange(T, device=device)
    seen = visible_from(starts)(window, None, token[:, None], token)
    return torch.zeros_like(seen, dtype=attention_dtype(device)).masked_fill_(~seen, -math.inf)


def attention_dtype(device: torch.device) -> torch.dtype:
    """Of queries, keys and values: autocast's where that is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


def attend_causal(q: Tensor, k: Tensor, v: Tensor, gqa: bool, dropout: float) -> Tensor:
    """Attention of [B, H | K | K, T, C], each token to itself and those before it -> [B, H, T, C]."""
    if q.device.type == "cpu" and q.shape[2] < FP32_ATTENTION_BELOW and dropout == 0:
        q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa, dropout_p=dropout)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, gqa: bool) -> Tensor:
    """flex_attention of [B, H | K | K, T, C] -> [B, H, T, C]; inside a compiled block it becomes part of its graph."""
    if torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention as attend
    else:
        _, attend = compiled_flex()
    return attend(q, k, v, block_mask=mask, enable_gqa=gqa)


# ---- reading token by token ----------------------------------------------------------------------------------------


class Cache:
    """Keys and values of the tokens that B rows have read, so that a forward reads new ones alone (Pope et al. 2022,
    arXiv:2211.05102). Rows have lengths of their own; cache[a:b] is the cache of those rows, in the same memory.

    All memory is taken at once: 2 n_layers B K size C numbers in attention's dtype, for at most `size` tokens a row.
    """

    def __init__(self, cfg: ModelConfig, rows: int, size: int, device: torch.device) -> None:
        shape = (cfg.n_layers, 2, rows, cfg.n_kv_heads, size, cfg.head_dim)
        # Zeros: what stands beyond a row's length has no weight, but 0 times NaN is NaN.
        self.kv = torch.zeros(shape, dtype=attention_dtype(device), device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64)  # on the CPU, where keys are cut to the longest
        self.starts = torch.zeros(rows, dtype=torch.int64, device=device)  # where each row's document begins
        self.rope = rotary_tables(size, cfg, device) if cfg.arch == "modern" else None
        self.eot_id = cfg.eot_id if cfg.doc_mask else None

    def __getitem__(self, rows: slice) -> Cache:
        part = copy.copy(self)
        part.kv, part.lengths, part.starts = self.kv[:, :, rows], self.lengths[rows], self.starts[rows]
        return part

    def clear(self) -> None:
        """Forget all that was read."""
        self.lengths.zero_()
        self.starts.zero_()

    def copy_row(self, source: int, target: int) -> None:
        """Let one row hold what another does."""
        n = int(self.lengths[source])
        self.kv[:, :, target, :, :n] = self.kv[:, :, source, :, :n]
        self.lengths[target], self.starts[target] = n, self.starts[source]

    def places(self, idx: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]:
        """`GPT.places` of one more token a row, int64 [B, 1]: positions [B, 1], the rotary tables [B, 1, 1, C], and a
        mask [B, 1, 1, L] over the L slots of the longest row: a token sees its document up to itself."""
        device = idx.device
        self.at = self.lengths.to(device)  # slot of the new token
        self.longest = int(self.lengths.max()) + 1
        if self.eot_id is not None:
            self.starts.copy_(torch.where(idx[:, 0] == self.eot_id, self.at, self.starts))
        slots, positions = torch.arange(self.longest, device=device), (self.at - self.starts)[:, None]
        seen = (self.starts[:, None] <= slots) & (slots <= self.at[:, None])
        mask = torch.zeros_like(seen, dtype=self.kv.dtype).masked_fill_(~seen, -math.inf)[:, None, None]
        return positions, self.rope and tuple(table[positions][:, None] for table in self.rope), mask

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v of new tokens, [B, K, T, C] each; returns those of all that is held, [B, K, L, C] each.

        One token goes to its row's slot `at`; several are the first of rows that hold nothing.
        """
        keys, values = self.kv[layer]
        if (T := k.shape[2]) > 1:
            keys[:, :, :T], values[:, :, :T] = k, v
            return k, v
        rows = torch.arange(len(k), device=k.device)
        keys[rows, :, self.at], values[rows, :, self.at] = k[:, :, 0], v[:, :, 0]
        return keys[:, :, : self.longest], values[:, :, : self.longest]

    def advance(self, idx: Tensor) -> None:
        """Count idx, int64 [B, T], as read."""
        if self.eot_id is not None and idx.shape[1] > 1:
            self.starts.copy_(document_starts(idx, self.eot_id)[:, -1])
        self.lengths += idx.shape[1]


# ---- the network ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with K key/value heads for H query heads (GQA, Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        bias = cfg.arch == "gpt2"
        self.qkv = nn.Linear(cfg.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(self.heads * self.head_dim, cfg.d_model, bias=bias)
        self.q_norm = Norm(self.head_dim, cfg) if cfg.qk_norm else None
        self.k_norm = Norm(self.head_dim, cfg) if cfg.qk_norm else None
        self.dropout = cfg.dropout

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | BlockMask | None = None,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # [B, H | K | K, T, C]
        if self.q_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if extend is not None:
            k, v = extend(k, v)  # [B, K, L, C] with all that was read before
        dropout = self.dropout if self.training else 0.0
        gqa = self.kv_heads != self.heads
        if mask is None:
            y = attend_causal(q, k, v, gqa, dropout)
        elif isinstance(mask, Tensor):
            if gqa and T == 1:  # the heads of a group are so many queries of the same keys: nothing is copied
                q = q.reshape(B, self.kv_heads, -1, self.head_dim)
            elif gqa:  # CUDA's kernels that save memory take a mask or grouped heads, not both
                k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
            y = y.reshape(B, self.heads, T, self.head_dim)
        else:
            y = attend_flex(q, k, v, mask, gqa)
        return self.out(y.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415), elementwise.

    0.5 (1 + tanh z) is sigmoid(2 z), of which compiled code makes a fraction of what a CPU's tanh costs.
    """
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """GELU in its tanh form (gpt2), or SwiGLU (modern, Shazeer 2020, arXiv:2002.05202): [B, T, D] -> [B, T, D]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        bias = cfg.arch == "gpt2"
        self.up = nn.Linear(cfg.d_model, cfg.d_ff, bias=bias)
        self.gate = None if cfg.arch == "gpt2" else nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.down = nn.Linear(cfg.d_ff, cfg.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ---- activation checkpointing (--act-ckpt) -------------------------------------------------------------------------

_aten = torch.ops.aten
PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default]
ATTENTION = [
    *(_aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default),
    *(_aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default),
    torch.ops.higher_order.flex_attention,
]


def keep_products() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a forward and its recomputation: results of matrix products are kept, the rest is computed again."""
    return create_selective_checkpoint_contexts(PRODUCTS)


def keep_products_and_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The same with the results of attention kept too. Not with dropout: an attention that isn't computed again draws
    no random numbers, and those drawn after it would be others than in the forward."""
    return create_selective_checkpoint_contexts(PRODUCTS + ATTENTION)


class Block(nn.Module):
    """Pre-norm residual block: [B, T, D] fp32 -> [B, T, D] fp32.

    act_ckpt, in training: none keeps what the backward needs; block keeps the input alone and computes the rest again
    (Chen et al. 2016, arXiv:1604.06174); selective keeps the results of matrix products and attention too (Korthikanti
    et al. 2022, arXiv:2205.05198). The gradients are the same.
    """

    def __init__(self, cfg: ModelConfig, act_ckpt: str = "none"):
        super().__init__()
        self.attn_norm = Norm(cfg.d_model, cfg)
        self.attn = Attention(cfg)
        self.mlp_norm = Norm(cfg.d_model, cfg)
        self.mlp = MLP(cfg)
        self.dropout = cfg.dropout
        self.act_ckpt = act_ckpt

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | BlockMask | None = None,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        # Two names, so that --compile can replace what training runs, whose shapes never change, and leave the rest.
        if self.training and torch.is_grad_enabled():
            return self.train_forward(x, rope, mask)
        return self.plain_forward(x, rope, mask, extend)

    def train_forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | BlockMask | None = None
    ) -> Tensor:
        if self.act_ckpt == "none":
            return self.plain_forward(x, rope, mask)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.dropout > 0}
        if self.act_ckpt == "selective":
            options["context_fn"] = keep_products if self.dropout > 0 else keep_products_and_attention
        return checkpoint(self.plain_forward, x, rope, mask, **options)

    def plain_forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | BlockMask | None = None,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        x = x + F.dropout(self.attn(self.attn_norm(x), rope, mask, extend), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Decoder-only language model. Weights are undefined until `init_weights` or a load. act_ckpt: see `Block`."""

    def __init__(self, cfg: ModelConfig, act_ckpt: str = "none"):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.padded_vocab, cfg.d_model)
        self.wpe = nn.Embedding(cfg.ctx, cfg.d_model) if cfg.arch == "gpt2" else None
        self.blocks = nn.ModuleList(Block(cfg, act_ckpt) for _ in range(cfg.n_layers))
        self.norm = Norm(cfg.d_model, cfg)
        # A tied head is the embedding itself, not a second name for it: nothing to re-tie, nothing saved twice.
        self.head = None if cfg.tie else nn.Linear(cfg.d_model, cfg.padded_vocab, bias=False)
        self.softmax_gradient = softmax_gradient  # --compile replaces it

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        last_only: bool = False,
        cache: Cache | None = None,
        per_window: bool = False,
    ) -> Tensor:
        """Logits, or the summed loss.

        idx int64 [B, T], T <= ctx for gpt2. Without targets: fp32 logits [B, T, V] ([B, 1, V] with last_only). With
        targets int64 [B, T], IGNORE where unsupervised: fp32 [], the sum of all token losses in nats, or fp32 [B], that
        of each window, with per_window. The padded rows of the vocabulary take no part in either. With cfg.doc_mask,
        attention and positions begin anew at each end-of-text token of idx.

        With a cache, in evaluation mode: idx are new tokens of its rows, and see what those have read. One token a row,
        or several as the first of rows that have read nothing; ValueError otherwise.
        """
        cfg, T = self.cfg, idx.shape[1]
        if cache is not None and (self.training or (T > 1 and cache.lengths.any())):
            raise ValueError("a cache takes one token a row, or the first tokens of empty rows, in evaluation mode")
        x = self.wte(idx).float()  # [B, T, D]
        positions, rope, mask = self.places(idx) if cache is None or T > 1 else cache.places(idx)
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if positions is None else self.wpe(positions))
        x = F.dropout(x, cfg.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, mask) if cache is None else block(x, rope, mask, functools.partial(cache.extend, i))
        if cache is not None:
            cache.advance(idx)
        x = self.norm(x[:, -1:] if last_only else x)
        head = self.wte.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, head)[..., : cfg.vocab_size].float()  # [B, T, V]: padded ids don't exist from here on
        if per_window:
            return token_losses(x, head, targets, cfg.vocab_size).sum(dim=1)  # [B]
        return summed_loss(x, head, targets, cfg.vocab_size, self.softmax_gradient)  # []

    def places(self, idx: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None, Tensor | BlockMask | None]:
        """What the blocks know of positions and documents in idx, int64 [B, T]: positions within documents int64 [B, T]
        (None: 0 .. T - 1), the rotary tables (None for gpt2), and the document mask (None without cfg.doc_mask)."""
        cfg, T = self.cfg, idx.shape[1]
        rope = mask = positions = None
        if cfg.doc_mask:
            starts = document_starts(idx, cfg.eot_id)
            positions = torch.arange(T, device=idx.device) - starts
            mask = document_mask(starts, cfg.head_dim, cfg.dropout if self.training else 0.0)
        if self.wpe is None:
            rope = rotary_tables(T, cfg, idx.device)
            if positions is not None:
                rope = tuple(table[positions][:, None] for table in rope)  # [B, 1, T, C] each
        return positions, rope, mask

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter in place, the same on any topology: sharded (DTensor) or whole, on any device.

        | parameter                                   | initial value                |
        |---------------------------------------------|------------------------------|
        | wte, wpe, head, qkv, up, gate               | N(0, 0.02)                   |
        | attn.out, mlp.down (onto the residual)      | N(0, 0.02 / sqrt(2 n_layers))|
        | biases                                      | 0                            |
        | norm weights                                | 1                            |

        (Radford et al. 2019.) Each parameter has a CPU generator of its own, seeded by its name, so that its values
        depend neither on other parameters nor on who holds which shard; a rank holds one full matrix at a time.
        """
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * self.cfg.n_layers)
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            full = torch.empty(p.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            set_full(p, full)


def set_full(p: Tensor, full: Tensor) -> None:
    """Copy a full CPU tensor into a parameter in place; a DTensor takes the part that this rank holds."""
    if hasattr(p, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
        p.to_local().copy_(full.to_local())
    else:
        p.copy_(full)
