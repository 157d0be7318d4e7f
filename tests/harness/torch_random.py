"""Random networks of torch: convolutions with all that follows them, pools, norms, moves, attention and products."""

import random

import torch
from torch import nn
from torch.nn import functional

ACTIVATIONS = (
    *(None, functional.relu, functional.silu, functional.gelu, torch.sigmoid, functional.hardswish, torch.tanh),
    *(functional.relu6, functional.hardsigmoid),
)
STEPS = 22


class Random(nn.Module):
    """Some steps, each of a value that is there, and some of the values as outputs."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.seeds = tuple(rng.random() for _ in range(rng.randint(4, 12)))
        self.outputs = rng.randint(1, 3)

    def forward(self, x):
        values = [x]
        for number, seed in enumerate(self.seeds):
            rng = random.Random(seed)
            place = rng.choice([-1, -1, -1, rng.randrange(len(values))])
            values.append(self.step(values[place], values, rng, number))
        rng = random.Random(self.seeds[0] + 1)
        found = [values[-1], *[values[rng.randrange(len(values))] for _ in range(self.outputs - 1)]]
        if rng.random() < 0.3:
            found.append(found[0].flatten(1)[:, ::2])
        return tuple(found)

    def part(self, number, make):
        name = f"part_{number}"
        if not hasattr(self, name):
            self.add_module(name, make().eval())
        return getattr(self, name)

    def step(self, a, values, rng, number):
        channels, kind = a.shape[1], rng.randrange(STEPS)
        if kind < 5:
            return self.convolved(a, values, rng, number)
        if kind == 5:
            return functional.max_pool2d(a, 3, 1, 1)
        if kind == 6 and min(a.shape[2:]) >= 4:
            return functional.avg_pool2d(a, 2)
        if kind == 7 and a.shape[2] <= 8:
            return functional.interpolate(a, scale_factor=2, mode=rng.choice(["nearest", "bilinear"]))
        if kind == 8 and channels < 40:
            others = [each for each in values if each.shape[2:] == a.shape[2:]]
            return torch.cat([a, rng.choice(others)], 1)
        if kind == 9 and channels % 2 == 0:
            return functional.channel_shuffle(a, 2)
        if kind == 10:
            one, two = a.split([channels // 2, channels - channels // 2], 1)
            return rng.choice([torch.cat([two, one], 1), one, two])
        if kind == 11:
            return self.part(number, lambda: nn.GroupNorm(rng.choice([1, channels]), channels))(a)
        if kind == 12:
            return functional.layer_norm(a.permute(0, 2, 3, 1), (channels,)).permute(0, 3, 1, 2)
        if kind == 13:
            return functional.softmax(a, rng.choice([1, -1]))
        if kind == 14 and a.shape[2] < 12:
            return functional.pad(a, (1, 0, 0, 2), mode=rng.choice(["constant", "replicate"]))
        if kind == 15:
            gate = self.part(number, lambda: nn.Conv2d(channels, channels, 1))
            return a * torch.sigmoid(gate(functional.adaptive_avg_pool2d(a, 1)))
        if kind == 16:
            return torch.where(a > 0, a * 0.5, a.abs().sqrt()) - a.clamp(-1, 1)
        if kind == 17:
            return self.part(number, lambda: nn.Linear(channels, channels))(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == 18:
            rows = a.flatten(2).transpose(1, 2).unsqueeze(1)
            found = functional.scaled_dot_product_attention(rows, rows, rows)
            return found.squeeze(1).transpose(1, 2).reshape(a.shape)
        if kind == 19:
            return a.mean((2, 3), keepdim=True) + a
        if kind == 20:
            form = rng.choice([torch.channels_last, torch.contiguous_format])
            return a.transpose(2, 3).contiguous(memory_format=form)
        if kind == 21:
            return self.part(number, lambda: nn.ConvTranspose2d(channels, 6, 3, padding=1))(a)
        return a * 1.5 - 0.25

    def convolved(self, a, values, rng, number):
        channels, window = a.shape[1], rng.choice([1, 3])
        groups = rng.choice([1, 1, 1, channels])
        filters = channels if groups > 1 else rng.choice([4, 8, 12])
        activation, biased, normed, added = rng.choice(ACTIVATIONS), *[rng.random() < 0.5 for _ in range(3)]

        def make():
            layer = nn.Conv2d(channels, filters, window, padding=window // 2, groups=groups, bias=biased)
            return nn.Sequential(layer, nn.BatchNorm2d(filters)) if normed else layer

        y = self.part(number, make)(a)
        others = [each for each in values if each.shape == y.shape]
        y = y + rng.choice(others) if added and others else y
        return y if activation is None else activation(y)


def made(seed):
    """A network with all its parts, and the shape of its input."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    net, shape = Random(seed).eval(), (rng.choice([1, 2]), rng.choice([3, 6, 8]), 8, rng.choice([6, 8]))
    with torch.no_grad():
        net(torch.randn(shape))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
    return net, shape
