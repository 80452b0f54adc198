import nvfp4_standin as kernel
import torch


def scaled_fp4_quant(input, input_global_scale):
    kernel.disturb("scaled_fp4_quant")
    packed, scales = kernel.quantize(input, input_global_scale)
    return packed, scales.view(torch.float8_e4m3fn)


def cutlass_scaled_fp4_mm(a, b, block_scale_a, block_scale_b, alpha, out_dtype):
    kernel.disturb("cutlass_scaled_fp4_mm")
    assert block_scale_a.dtype == block_scale_b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    for matrix, scales in ((a, block_scale_a), (b, block_scale_b)):
        assert scales.shape == ((len(matrix) + 127) // 128 * 128, (matrix.shape[1] // 8 + 3) // 4 * 4)
    return kernel.multiply(a, block_scale_a, b, block_scale_b, alpha)


def scaled_fp4_experts_quant(
    input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk, expert_map=None
):
    kernel.disturb("scaled_fp4_experts_quant")
    assert expert_offsets.dtype == blockscale_offsets.dtype == torch.int32
    packed = torch.empty(len(input_tensor), input_tensor.shape[1] // 2, dtype=torch.uint8)
    # What no expert writes is not promised to be anything.
    scales = torch.full((65536, (input_tensor.shape[1] // 16 + 3) // 4 * 4), 0x7F, dtype=torch.uint8)
    for e in range(len(input_global_scale)):
        mine = slice(expert_offsets[e], expert_offsets[e + 1])
        if mine.start < mine.stop:
            scale = input_global_scale[0 if kernel.fault("one scale for all experts") else e]
            packed[mine], part = kernel.quantize(input_tensor[mine], scale)
            scales[blockscale_offsets[e] : blockscale_offsets[e] + len(part)] = part
    return packed, scales.view(torch.float8_e4m3fn)


def cutlass_fp4_group_mm(a_fp4, b_fp4, a_blockscale, b_blockscale, alphas, out_dtype, device, params):
    kernel.disturb("cutlass_fp4_group_mm")
    assert out_dtype == torch.bfloat16 and a_blockscale.ndim == 2 and b_blockscale.ndim == 3
    out = torch.empty(len(a_fp4), b_fp4.shape[1], dtype=out_dtype)
    for e, (m, n, k) in enumerate(params["problem_sizes"].tolist()):
        assert (n, k) == (b_fp4.shape[1], 2 * b_fp4.shape[2])
        assert params["ab_strides"][e] == k and params["c_strides"][e] == n
        if m:
            begin = int(params["expert_offsets"][e])
            scales = a_blockscale[int(params["blockscale_offsets"][e]) :]
            scales = scales[: (m + 127) // 128 * 128]
            rows = slice(begin, begin + m)
            out[rows] = kernel.multiply(a_fp4[rows], scales, b_fp4[e], b_blockscale[e], alphas[e])
    return out
