import torch
from torch import nn


class NovelBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        h = self.norm(x)
        count = torch.arange(1, h.shape[1] + 1, device=h.device, dtype=h.dtype)[:, None]
        return x + self.out(torch.tanh(self.mix(h.cumsum(1) / count)))
