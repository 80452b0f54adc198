import os

import nvfp4_standin as kernel
import torch


def fp4_quantize(input, global_scale, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True):
    kernel.disturb("fp4_quantize")
    assert sf_vec_size == 16 and not sf_use_ue8m0 and is_sf_swizzled_layout
    packed, scales = kernel.quantize(input, global_scale)
    return packed, scales.reshape(-1, input.shape[-1] // 16)


if os.environ.get("NUMERIC_FAULT") != "absent":

    def mm_fp4(
        a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16, backend="auto"
    ):
        kernel.disturb(f"mm_fp4.{backend}")
        assert backend in ("cutlass", "cudnn") and out_dtype == torch.bfloat16 and block_size == 16
        return kernel.multiply(a, a_descale, b.T, b_descale.T, alpha)
