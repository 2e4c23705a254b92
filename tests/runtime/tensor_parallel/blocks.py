"""Small blocks with inputs for the tests of tensor parallelism; also read by the worker processes."""

import torch
from torch import nn
from torch.nn import functional

BATCH, SEQUENCE, HIDDEN, HEADS, WIDTH = 2, 12, 48, 6, 96


class NanoAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(self.hidden, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoBlock(nn.Module):
    """Knows nothing of any library: fused query-key-value weight, sizes from x.size()."""

    def __init__(self, hidden=HIDDEN, heads=HEADS, dropout=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = NanoAttention(hidden, heads)
        self.fc, self.proj = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.inner_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.proj(self.inner_dropout(functional.gelu(self.fc(self.ln_2(x))))))


class FullNorm(nn.Module):
    """A norm over the whole width between the two linears: nothing can be sharded."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        return x + self.b(self.norm(self.a(x)))


def llama(kv_heads, heads=4, hidden=64, width=96, implementation="sdpa", batch=BATCH, sequence=SEQUENCE, device="cpu"):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        num_hidden_layers=1,
        vocab_size=32,
        max_position_embeddings=64,
    )
    config._attn_implementation = implementation
    with torch.device(device):
        block = LlamaDecoderLayer(config, 0)
    x = torch.randn(batch, sequence, hidden)
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(sequence)[None])
    mask = torch.full((1, 1, sequence, sequence), float("-inf")).triu(1) if implementation == "eager" else None
    return block, (x,), {"attention_mask": mask, "position_embeddings": rotary}


def gpt2(batch=BATCH, sequence=SEQUENCE):
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(
        n_embd=64,
        n_head=4,
        n_layer=1,
        vocab_size=32,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    config._attn_implementation = "sdpa"
    return GPT2Block(config, layer_idx=0), (torch.randn(batch, sequence, 64),), {"attention_mask": None}


def encoder(batch=BATCH, sequence=SEQUENCE):
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    return layer, (torch.randn(batch, sequence, 64),), {}


def nano(heads=HEADS, dropout=0.0, batch=BATCH, sequence=SEQUENCE):
    return NanoBlock(heads=heads, dropout=dropout), (torch.randn(batch, sequence, HIDDEN),), {}


def make(name, seed=0):
    """A block in training mode with its inputs, the same on every rank."""
    torch.manual_seed(seed)
    makers = {
        "llama": lambda: llama(4),
        "llama_kv2": lambda: llama(2),
        "llama_eager": lambda: llama(2, implementation="eager"),
        "gpt2": gpt2,
        "nano": lambda: nano(heads=4),
        "nano6": lambda: nano(heads=6),
        "encoder": encoder,
    }
    block, args, kwargs = makers[name]()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return block.train(), args, kwargs
