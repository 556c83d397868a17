"""Linear layers for one-token steps on a CPU. The maths and the weights are `nn.Linear`'s, only the calls differ.

A step of one token reads every weight once and does two operations with each, so it runs at the speed of memory, if
all cores read. BLAS does not split a matrix-vector product over cores, but it does split a batch of them; and a
bfloat16 product of more than a few rows is far slower than a float32 one on processors without bfloat16 units. Hence
one layer for each dtype:

    float32    W as blocks of rows, [BLOCKS, out/BLOCKS, in]: a batch of products, which the cores share
    bfloat16   bfloat16 products for a few rows of x, float32 products for many (prefill)

Both keep activations in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = 8  # as many cores have something to read; two are no faster with two blocks
FEW_ROWS = 8  # up to here, W X beats X W^T in float32, and bfloat16 products beat widening the whole matrix


class BlockedLinear(nn.Module):
    """y = x W^T + b in float32, a block of W's rows at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # [out, in], [out]
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        W, even = self.weight, len(self.weight) // BLOCKS * BLOCKS
        if x.requires_grad or even == 0:  # backwards, a batch of blocks would be the slow form
            return F.linear(x, W, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        blocks = W[:even].view(BLOCKS, -1, W.shape[1])
        if len(rows) <= FEW_ROWS:  # as W X
            y = torch.bmm(blocks, rows.mT.expand(BLOCKS, -1, -1)).flatten(0, 1).mT
        else:  # as X W^T, which is faster from here on
            y = torch.bmm(rows.expand(BLOCKS, -1, -1), blocks.mT).transpose(0, 1).flatten(1)
        if even < len(W):
            y = torch.cat([y, rows @ W[even:].mT], dim=1)
        y = y.contiguous().view(*x.shape[:-1], -1)  # attention is slow on what lies in columns
        return y if self.bias is None else y + self.bias


class NarrowLinear(nn.Module):
    """y = x W^T + b with W in bfloat16 and float32 sums; few rows read W as it is, many rows a float32 copy of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # [out, in], [out]
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        if x.numel() <= FEW_ROWS * x.shape[-1]:
            y = F.linear(x.bfloat16(), self.weight).float()
        else:
            y = F.linear(x, self.weight.float())
        return y if self.bias is None else y + self.bias


def pack(model: nn.Module) -> nn.Module:
    """Replace every `nn.Linear` in place by its packed form, for inference in float32 or bfloat16 on a CPU; other
    dtypes stay as they are.

    With bfloat16, embeddings stay bfloat16 and the norms become float32. No weight is copied.
    """
    for name, module in list(model.named_modules()):
        dtype = next((p.dtype for p in module.parameters(recurse=False)), None)
        if isinstance(module, nn.Linear) and dtype in (torch.float32, torch.bfloat16):
            packed = (BlockedLinear if dtype == torch.float32 else NarrowLinear)(module.weight, module.bias)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, packed)
        elif dtype == torch.bfloat16 and not isinstance(module, nn.Embedding):
            module.float()
    return model
