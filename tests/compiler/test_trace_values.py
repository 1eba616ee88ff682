"""Tracing: values that decide, random numbers, writes in place, closures: right, or refused."""

from __future__ import annotations

import copy
import random
from random import randint

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from toys import ROWS, WIDTH, run_chain
from traced import checks_of, programs, refused

RIGHT, right = programs()
REFUSED, refuse = refused()
test_gradients_are_those_of_autograd, test_refused_with_the_way_out = checks_of(RIGHT, REFUSED)

# ------------------------------------------------------------------ values that decide

RIGHT |= {
    "item of a constant": lambda p, x: run_chain(p, x).sum() * torch.tensor(2.0).item(),
}  # fmt: skip

REFUSED |= {
    "branch": (lambda p, x: run_chain(p, x).sum() if x.sum() > 0 else x.sum(), "depends on a tensor's value"),
    "numpy of a batch leaf": (
        lambda p, x: run_chain(p, x).sum() * float(x.numpy().sum()),
        "depends on a tensor's value",
    ),
}  # fmt: skip


# ------------------------------------------------------------------ random numbers

RIGHT |= {
    "lstm in eval mode": lambda p, x: _lstm_eval(run_chain(p, x)[None])[0].sum(),
}  # fmt: skip

REFUSED |= {
    "poisson": (
        lambda p, x: run_chain(p, x).sum() + torch.poisson(x.abs()).sum(),
        "draws random numbers with aten.poisson.*torch.randn",
    ),
    "lstm with dropout": (
        lambda p, x: _lstm(run_chain(p, x)[None])[0].sum(),
        "draws random numbers with aten.lstm",
    ),
}  # fmt: skip


_lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5).requires_grad_(False)
_lstm_eval = copy.deepcopy(_lstm).eval()


@refuse(r"sets torch's random state.*seed=")
def manual_seed(p, x):
    torch.manual_seed(0)
    return (run_chain(p, x) * torch.rand(WIDTH)).sum()


# ------------------------------------------------------------------ writing in place

REFUSED |= {
    "embedding max norm": (
        lambda p, x: F.embedding(torch.tensor([0, 1]), p["layers.0.w"], max_norm=1.0).sum(),
        "changes 1 leaf in place.*embedding_renorm",
    ),
    "resize in place": (
        lambda p, x: (run_chain(p, x) * x.new_zeros(2).resize_(ROWS, WIDTH).zero_()).sum(),
        "what memory a tensor has by aten.resize_",
    ),
}  # fmt: skip


@refuse(r"changes 1 leaf in place.*params\['layers.0.w'\] by aten.mul_")
def leaf_data_in_place(p, x):
    p["layers.0.w"].data.mul_(2)
    return run_chain(p, x).sum()


@right
def detached_alias_in_place(p, x):
    y = x @ p["layers.0.w"]
    y.detach().zero_()
    return (y * x).sum()


@right
def writes_between_results_of_one_op(p, x):
    largest, at = (x @ p["layers.0.w"]).max(0)
    largest[1:].mul_(at[1:] * p["layers.1.w"][0, 1:])
    real = torch.view_as_complex((x @ p["layers.2.w"]).view(ROWS, -1, 2)).real
    real.add_(largest[: WIDTH // 2])
    return (largest.sum() * real).sum()


@right
def other_shapes_in_place(p, x):
    y = x @ p["layers.0.w"]
    row, turned = y[0], y.t()
    y.t_().unsqueeze_(0).mul_(p["layers.1.w"][0][:, None])
    y.squeeze_(0).swapaxes_(0, 1)
    return (y * row).sum() + turned.pow(2).sum()


@refuse(r"aten.mul.out with an out= .*\[0\] for \[4, 8\]")
def out_of_another_shape(p, x):
    with torch.no_grad():
        out = torch.mul(x, 2, out=x.new_empty(0))
    return (run_chain(p, x) * out).sum()


# ------------------------------------------------------------------ what fn closes over

RIGHT |= {
    "small constant": lambda p, x: (run_chain(p, x) * _small).sum() + (x * torch.tensor([2.0] * WIDTH)).sum(),
}  # fmt: skip

REFUSED |= {
    "constant that requires grad": (
        lambda p, x: (run_chain(p, x) * _trained).sum(),
        "closes over 1 tensor.*that requires grad",
    ),
    "large constant": (
        lambda p, x: run_chain(p, x).sum() + _large[0].sum(),
        "closes over 1 tensor.*1 MB.*trainable=False",
    ),
}  # fmt: skip


_small = torch.arange(float(WIDTH))
_trained = torch.ones(WIDTH, requires_grad=True)
_large = torch.ones(600, 600)


@refuse("writes in place to 1 tensor.*closes over.*clone it")
def constant_that_is_written_to(p, x):
    _counter.add_(1)
    return (run_chain(p, x) * _counter).sum()


_counter = torch.ones(WIDTH)


@right
def literal_in_place(p, x):
    fresh = torch.tensor([1.0] * WIDTH)
    fresh.add_(1)
    return (run_chain(p, x) * fresh).sum()


# ------------------------------------------------------------------ the host's random numbers

REFUSED |= {
    "pythons random numbers": (
        lambda p, x: (run_chain(p, x) * random.gauss(0, 1)).sum(),
        "draws random numbers by Python's random.*draw with torch.*pass the numbers as tensors",
    ),
    "numpys random numbers": (
        lambda p, x: (run_chain(p, x) * torch.from_numpy(np.random.rand(WIDTH)).float()).sum(),
        "draws random numbers by numpy.random,",
    ),
    "a function imported by its name": (
        lambda p, x: (run_chain(p, x) * randint(0, 3)).sum(),
        "draws random numbers by Python's random",
    ),
    "a generator of ones own": (
        lambda p, x: (run_chain(p, x) * _python.random()).sum(),
        "draws random numbers by a Random that it closes over",
    ),
    "a generator of numpys": (
        lambda p, x: (run_chain(p, x) * _numpy.normal()).sum(),
        "draws random numbers by a Generator that it closes over",
    ),
    "bits of numpys": (
        lambda p, x: (run_chain(p, x) * _bits.random_raw()).sum(),
        "draws random numbers by a PCG64 that it closes over",
    ),
}  # fmt: skip

_python, _numpy, _bits = random.Random(0), np.random.default_rng(0), np.random.PCG64(0)


@right
def a_seeded_generator_made_anew(p, x):
    return (run_chain(p, x) * np.random.default_rng(0).normal() * random.Random(0).random()).sum()
