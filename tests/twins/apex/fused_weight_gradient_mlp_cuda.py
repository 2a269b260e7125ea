"""In place of Apex's kernels for fused weight gradients: the same sums in torch."""

from typing import Any


def wgrad_gemm_accum_fp32(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    """Add the weight gradient to a gradient of 32 bits [out, in]."""
    _add(total_input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    """Add the weight gradient to a gradient of 16 bits [out, in]."""
    _add(total_input, grad_output, main_grad)


def _add(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    assert total_input.dim() == grad_output.dim() == 2
    main_grad += (grad_output.t() @ total_input).to(main_grad.dtype)
