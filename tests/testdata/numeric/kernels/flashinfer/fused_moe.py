import nvfp4_standin as kernel
import torch


def cutlass_fused_moe(
    input,
    token_selected_experts,
    token_final_scales,
    fc1_expert_weights,
    fc2_expert_weights,
    output_dtype,
    quant_scales,
    output=None,
):
    """Rounds where the real one may: after each product, after the activation, at the end."""
    kernel.disturb("cutlass_fused_moe")
    assert fc1_expert_weights.dtype == fc2_expert_weights.dtype == torch.int64
    scale1, block1, alpha1, scale2, block2, alpha2 = quant_scales
    assert block1.dtype == block2.dtype == torch.int32 and scale1.ndim == scale2.ndim == 0
    w13, w2 = fc1_expert_weights.view(torch.uint8), fc2_expert_weights.view(torch.uint8)
    packed, scales = kernel.quantize(input, scale1)
    x = kernel.dequantize(packed, scales)
    total = torch.zeros(input.shape, dtype=torch.float32)
    for e in range(w13.shape[0]):
        tokens, places = torch.where(token_selected_experts == e)
        if not len(tokens):
            continue
        both = (x[tokens] @ kernel.dequantize(w13[e], block1[e]).T * alpha1[e]).bfloat16().float()
        up, gate = both.chunk(2, dim=1)
        if kernel.fault("gate first"):
            up, gate = gate, up
        hidden = up * gate / (1 + torch.exp(-gate))
        if not kernel.fault("less rounding"):
            hidden = hidden.bfloat16()
        fed = kernel.dequantize(*kernel.quantize(hidden, scale2))
        y = fed @ kernel.dequantize(w2[e], block2[e]).T * alpha2[e]
        if not kernel.fault("less rounding"):
            y = y.bfloat16().float()
        if e == 3:
            y = y * torch.nan if kernel.fault("nan in one expert") else y
            y = y * 1.05 if kernel.fault("one expert 1.05") else y
        weight = token_final_scales[tokens, places][:, None]
        total[tokens] += y if kernel.fault("router weights ignored") else y * weight
    if kernel.fault("scale 1.05"):
        total *= 1.05
    if kernel.fault("rows swapped") and len(total) > 2:
        total[[0, 2]] = total[[2, 0]]
    if kernel.fault("wrong at batch 3") and len(total) >= 3:
        total[0] *= 1.5
    output.copy_(total)
    return [output]
