"""A convolutional network of the kinds of layers that ResNets and MobileNets are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Inverted (Howard et al., ICCV 2019): expand, depthwise, squeeze and excite, project; and a residual.

    Args:
        norm: makes a norm of so many channels.
    """

    def __init__(self, width: int, out: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        wide = 2 * width
        self.expand, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), norm(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        self.norm2 = norm(wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project, self.norm3 = nn.Conv2d(wide, out, 1, bias=False), norm(out)
        self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm1(self.expand(x)))
        y = F.hardswish(self.norm2(self.depthwise(y)))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return F.relu(self.norm3(self.project(y)) + self.skip(x))


class Residual(nn.Module):
    """[B, channels, S, S] -> [B, classes]: a stem with max-pooling, two bottlenecks, a head."""

    def __init__(self, channels: int, classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, 4, 3, padding=1, bias=False), norm(4)
        self.blocks = nn.ModuleList([Bottleneck(4, 6, 2, norm), Bottleneck(6, 6, 1, norm)])
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 3, 1, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
