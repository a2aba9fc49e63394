"""One GPT, two blocks: `gpt2` (Radford et al. 2019) and `modern` (as in Llama and Qwen3).

Shapes: B windows, T tokens, D = d_model, H query heads, K key/value heads, C = D / H, V = vocab_size.
The residual stream, the norms and the loss are fp32 under autocast, in every mode of parallelism.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourscale.config import ModelConfig

IGNORE = -100  # a target that is not supervised


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


def rotary_tables(n_tokens: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE, fp32 [n_tokens, head_dim] each, the halves repeated (Su et al. 2021, arXiv:2104.09864)."""
    freq = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(n_tokens, device=device, dtype=torch.float32), freq)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, T, C], in the half-split layout that Hugging Face's Llama uses."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with K key/value heads for H query heads (GQA, Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        bias = cfg.arch == "gpt2"
        self.qkv = nn.Linear(cfg.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(cfg.d_model, cfg.d_model, bias=bias)
        self.q_norm = Norm(self.head_dim, cfg) if cfg.qk_norm else None
        self.k_norm = Norm(self.head_dim, cfg) if cfg.qk_norm else None
        self.dropout = cfg.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # [B, H | K | K, T, C]
        if self.q_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(y.transpose(1, 2).reshape(B, T, D))


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
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm residual block: [B, T, D] fp32 -> [B, T, D] fp32."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn_norm = Norm(cfg.d_model, cfg)
        self.attn = Attention(cfg)
        self.mlp_norm = Norm(cfg.d_model, cfg)
        self.mlp = MLP(cfg)
        self.dropout = cfg.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + F.dropout(self.attn(self.attn_norm(x), rope), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Decoder-only language model. Weights are undefined until `init_weights` or a load."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.padded_vocab, cfg.d_model)
        self.wpe = nn.Embedding(cfg.ctx, cfg.d_model) if cfg.arch == "gpt2" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = Norm(cfg.d_model, cfg)
        # A tied head is the embedding itself, not a second name for it: nothing to re-tie, nothing saved twice.
        self.head = None if cfg.tie else nn.Linear(cfg.d_model, cfg.padded_vocab, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, last_only: bool = False) -> Tensor:
        """Logits, or each window's summed loss.

        idx int64 [B, T], T <= ctx for gpt2. Without targets: fp32 logits [B, T, V] ([B, 1, V] with last_only). With
        targets int64 [B, T], IGNORE where unsupervised: fp32 [B], the sum of each window's token losses in nats. The
        padded rows of the vocabulary take no part in either.
        """
        x = self.wte(idx).float()  # [B, T, D]
        rope = None
        if self.wpe is not None:
            x = x + self.wpe.weight[: idx.shape[1]]
        else:
            rope = rotary_tables(idx.shape[1], self.cfg.head_dim, self.cfg.rope_theta, idx.device)
        x = F.dropout(x, self.cfg.dropout, self.training)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x[:, -1:] if last_only else x)
        head = self.wte.weight if self.head is None else self.head.weight
        logits = F.linear(x, head)[..., : self.cfg.vocab_size].float()  # [B, T, V]: padded ids don't exist from here on
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return losses.view(targets.shape).sum(dim=1)

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
