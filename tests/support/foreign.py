"""Optimizers from papers, as somebody writes them who knows nothing of sharding: whole leaves, torch."""

from __future__ import annotations

import torch

from fnshard.optim import Optimizer


def lamb(lr, b1=0.9, b2=0.999, eps=1e-6, decay=0.01):
    """Make LAMB (You et al. 2019): Adam, scaled by the ratio of two norms of the leaf."""

    def init(path, param):
        return {"m": torch.zeros_like(param), "v": torch.zeros_like(param)}

    def update(path, grad, slots, param, step):
        m, v = slots["m"].lerp(grad, 1 - b1), slots["v"].lerp(grad * grad, 1 - b2)
        t = step.count + 1
        change = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + decay * param
        size, length = param.norm(), change.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        return -lr * trust * change, {"m": m, "v": v}

    return Optimizer(f"lamb({lr})", init, update)


def row_normalized(lr, momentum=0.9):
    """Make SCALE (Glentis et al. 2025), by rows: each row of the momentum has length 1."""

    def update(path, grad, slots, param, step):
        m = slots["m"] * momentum + grad * (1 - momentum)
        length = m.norm(dim=-1, keepdim=True) if m.dim() > 1 else m.norm()
        return -lr * m / (length + 1e-8), {"m": m}

    return Optimizer(f"row_normalized({lr})", lambda path, p: {"m": torch.zeros_like(p)}, update, rules=())


def dion(lr, rank=2, momentum=0.95):
    """Make Dion (Ahn et al. 2025): momentum of low rank, by one power iteration and a QR; vectors by sign."""

    def init(path, param):
        out = {"m": torch.zeros_like(param)}
        if param.dim() == 2:
            out["right"] = torch.eye(param.shape[1], min(rank, *param.shape), dtype=param.dtype)
        return out

    def update(path, grad, slots, param, step):
        m = slots["m"] + grad
        if param.dim() != 2:
            return -lr * m.sign(), {"m": momentum * m}
        left = torch.linalg.qr(m @ slots["right"]).Q
        right = m.T @ left
        m = m - (1 - momentum) * left @ right.T
        right = right / (right.norm(dim=0, keepdim=True) + 1e-8)
        scale = (param.shape[0] / param.shape[1]) ** 0.5
        return -lr * scale * left @ right.T, {"m": m, "right": right}

    return Optimizer(f"dion({lr})", init, update)


def error_feedback_sign(lr):
    """Make EF-signSGD (Karimireddy et al. 2019): the sign times the mean size; the rest is remembered."""

    def update(path, grad, slots, param, step):
        wanted = lr * grad + slots["error"]
        change = wanted.abs().mean() * wanted.sign()
        return -change, {"error": wanted - change}

    init = lambda path, param: {"error": torch.zeros_like(param)}  # noqa: E731
    return Optimizer(f"error_feedback_sign({lr})", init, update)


def random_signs(key, shape):
    """Return signs that a key and an element's place decide (the finalizer of splitmix64)."""
    numel = 1
    for size in shape:
        numel *= size
    x = torch.arange(numel).view(shape) * -7046029254386353131 + key
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return 1 - 2 * (x >> 40 & 1)


def hutchinson(lr, b1=0.9, b2=0.99, rho=0.5):
    """Make Sophia (Liu et al. 2023): random signs z estimate the diagonal of g gᵀ as z g (g . z)."""

    def init(path, param):
        key = torch.full([1] * param.dim(), sum(map(ord, path)), dtype=torch.int64)
        return {"m": torch.zeros_like(param), "h": torch.zeros_like(param), "key": key}

    def update(path, grad, slots, param, step):
        z = random_signs(slots["key"], grad.shape).to(grad.dtype)
        h = slots["h"].lerp(z * grad * (grad * z).sum(), 1 - b2)
        m = slots["m"].lerp(grad, 1 - b1)
        change = (m / h.abs().clamp(min=1e-6)).clamp(-rho, rho)
        return -lr * change, {"m": m, "h": h, "key": slots["key"] * 6364136223846793005 + 1442695040888963407}

    return Optimizer(f"hutchinson({lr})", init, update)


def shampoo(lr, every=2, momentum=0.9, eps=1e-3):
    """Make Shampoo (Gupta et al. 2018): inverse fourth roots of both sides, made anew every few steps."""

    def init(path, param):
        out = {"m": torch.zeros_like(param)}
        if param.dim() == 2:
            for name, size in zip(("left", "right"), param.shape, strict=True):
                eye = torch.eye(size, dtype=param.dtype)
                out |= {name: eps * eye, f"{name}_root": eye.clone()}
        return out

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=eps * values.max()) ** -0.25) @ vectors.T

    def update(path, grad, slots, param, step):
        m = momentum * slots["m"] + grad
        if param.dim() != 2:
            return -lr * m / (m.norm() + 1e-8), {"m": m}
        left, right = slots["left"] + grad @ grad.T, slots["right"] + grad.T @ grad
        left_root, right_root = torch.cond(
            step.count % every == 0,
            lambda: (root(left), root(right)),
            lambda: (slots["left_root"].clone(), slots["right_root"].clone()),
        )
        new = {"m": m, "left": left, "right": right, "left_root": left_root, "right_root": right_root}
        return -lr * left_root @ m @ right_root, new

    return Optimizer(f"shampoo({lr})", init, update, rules=())


def ademamix(lr, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, warmup=4, eps=1e-8, decay=0.1):
    """Make AdEMAMix (Pagliardini et al. 2024): Adam with a slow momentum; both of its numbers warm up."""

    def slow(count):
        from math import exp, log

        share = min(1.0, (int(count) + 1) / warmup)
        return min(b3, exp(log(b1) * log(b3) / ((1 - share) * log(b3) + share * log(b1))))

    def init(path, param):
        return {name: torch.zeros_like(param) for name in ("fast", "slow", "v")}

    def update(path, grad, slots, param, step):
        t = step.host(lambda count: int(count) + 1)
        weight = (1 - step.host(slow)).to(grad.dtype)
        fast = b1 * slots["fast"] + (1 - b1) * grad
        slowly = slots["slow"] + weight * (grad - slots["slow"])
        v = b2 * slots["v"] + (1 - b2) * grad**2
        mixed = fast / (1 - b1**t) + (alpha * t / warmup).clamp(max=alpha) * slowly
        change = mixed / ((v / (1 - b2**t)).sqrt() + eps) + decay * param
        return -lr * change, {"fast": fast, "slow": slowly, "v": v}

    return Optimizer(f"ademamix({lr})", init, update, rules=())


def normalized_momentum(lr, beta=0.9):
    """Make momentum of normalized gradients (Cutkosky and Mehta 2020): divided by the global norm."""

    def update(path, grad, slots, param, step):
        m = slots["m"].lerp(grad / (step.global_norm.to(grad.dtype) + 1e-12), 1 - beta)
        return -lr * m, {"m": m}

    init = lambda path, param: {"m": torch.zeros_like(param)}  # noqa: E731
    return Optimizer(f"normalized_momentum({lr})", init, update, values=lambda s: {"size": s.global_norm})


def standardized(lr):
    """Make ZNorm (Yun 2024): gradients of each layer have mean 0 and standard deviation 1."""

    def update(path, grad, slots, param, step):
        if grad.numel() == 1:
            return -lr * grad.sign(), {}
        return -lr * (grad - grad.mean()) / (grad.std() + 1e-8), {}

    return Optimizer(f"standardized({lr})", lambda path, param: {}, update)


def clippy(lr, relative=0.1, absolute=1e-2):
    """Make Clippy Adagrad (Tang et al. 2023): a leaf's step shrinks until no element moves too far."""

    def update(path, grad, slots, param, step):
        total = slots["total"] + grad.square()
        change = lr * grad / (total.sqrt() + 1e-8)
        excess = change.abs() / (relative * param.abs() + absolute)
        return -change / excess.max().clamp(min=1.0), {"total": total}

    return Optimizer(f"clippy({lr})", lambda path, param: {"total": torch.zeros_like(param)}, update)


def sm3(lr):
    """Make SM3 (Anil et al. 2019): it keeps the largest second moment of each row and each column."""

    def init(path, param):
        if param.dim() != 2:
            return {"total": torch.zeros_like(param)}
        return {"row": torch.zeros_like(param[:, :1]), "column": torch.zeros_like(param[:1])}

    def update(path, grad, slots, param, step):
        if param.dim() != 2:
            total = slots["total"] + grad.square()
            return -lr * grad / (total.sqrt() + 1e-8), {"total": total}
        total = torch.minimum(slots["row"], slots["column"]) + grad.square()
        new = {"row": total.amax(1, keepdim=True), "column": total.amax(0, keepdim=True)}
        return -lr * grad / (total.sqrt() + 1e-8), new

    return Optimizer(f"sm3({lr})", init, update, rules=())


def adan(lr, b1=0.98, b2=0.92, b3=0.99, decay=0.02):
    """Make Adan (Xie et al. 2022): momentum of gradients and of their differences, 0 at the first step."""

    def init(path, param):
        return {name: torch.zeros_like(param) for name in ("m", "v", "n", "before")}

    def update(path, grad, slots, param, step):
        difference = torch.where(step.count == 0, torch.zeros_like(grad), grad - slots["before"])
        m, v = slots["m"].lerp(grad, 1 - b1), slots["v"].lerp(difference, 1 - b2)
        n = slots["n"].lerp((grad + b2 * difference).square(), 1 - b3)
        new = (param - lr * (m + b2 * v) / (n.sqrt() + 1e-8)) / (1 + lr * decay)
        return new - param, {"m": m, "v": v, "n": n, "before": grad}

    return Optimizer(f"adan({lr})", init, update, rules=())


def adam_mini(lr, b1=0.9, b2=0.99):
    """Make Adam-mini (Zhang et al. 2024): one second moment for a row of a matrix, or for another leaf."""

    def init(path, param):
        shape = [param.shape[0], 1] if param.dim() == 2 else [1] * param.dim()
        return {"m": torch.zeros_like(param), "v": param.new_zeros(shape)}

    def update(path, grad, slots, param, step):
        square = grad.square()
        mean = square.mean(1, keepdim=True) if param.dim() == 2 else square.mean().view(slots["v"].shape)
        m, v = slots["m"].lerp(grad, 1 - b1), slots["v"].lerp(mean, 1 - b2)
        return -lr * m / (v.sqrt() + 1e-8), {"m": m, "v": v}

    return Optimizer(f"adam_mini({lr})", init, update)


def cautious_lion(lr, b1=0.9, b2=0.99):
    """Make cautious Lion (Liang et al. 2024): elements that disagree with their gradient do not move."""

    def update(path, grad, slots, param, step):
        change = (b1 * slots["m"] + (1 - b1) * grad).sign()
        agree = (change * grad > 0).to(grad.dtype)
        return -lr * change * agree / agree.mean().clamp(min=1e-3), {"m": slots["m"].lerp(grad, 1 - b2)}

    init = lambda path, param: {"m": torch.zeros_like(param)}  # noqa: E731
    return Optimizer(f"cautious_lion({lr})", init, update, rules=())


def top_k(lr, share=0.3):
    """Make deep gradient compression (Lin et al. 2018): the largest elements move, the rest is remembered."""

    def update(path, grad, slots, param, step):
        wanted = slots["rest"] + grad
        size = wanted.abs().flatten()
        least = size.kthvalue(max(1, round((1 - share) * size.numel()))).values
        sent = torch.where(wanted.abs() >= least, wanted, 0.0)
        return -lr * sent, {"rest": wanted - sent}

    return Optimizer(f"top_k({lr})", lambda path, param: {"rest": torch.zeros_like(param)}, update)


FOREIGN = {
    "lamb": lamb(0.05),
    "row_normalized": row_normalized(0.1),
    "dion": dion(0.05),
    "error_feedback_sign": error_feedback_sign(0.1),
    "hutchinson": hutchinson(0.05),
    "shampoo": shampoo(0.1),
    "ademamix": ademamix(0.01),
    "normalized_momentum": normalized_momentum(0.5),
    "standardized": standardized(0.05),
    "clippy": clippy(0.2),
    "sm3": sm3(0.1),
    "adan": adan(0.05),
    "adam_mini": adam_mini(0.05),
    "cautious_lion": cautious_lion(0.02),
    "top_k": top_k(0.1),
}
