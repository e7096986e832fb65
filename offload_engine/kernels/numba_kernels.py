"""The kernels compiled by numba, for machines without a C++ compiler: the same formulas as csrc/rules-inl.h.

Called by `numba_backend` on numpy views of one chunk, with the interpreter lock released. No fastmath: LLVM then keeps
one rounding per operation, so that every result has the bits of the native kernels.
"""

from __future__ import annotations

import math

import numba
import numpy as np

__all__ = [
    "accumulate",
    "adam",
    "bf16_to_float",
    "f16_to_float",
    "float_to_bf16",
    "float_to_f16",
    "square_sum",
]

_compiled = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=False)


@_compiled
def adam(
    p,
    m,
    v,
    g,
    p_out,
    m_out,
    v_out,
    grad_scale,
    decay,
    l2,
    lerp,
    beta2,
    one_minus_beta2,
    correction2,
    eps,
    step_size,
    from_grad,
):
    """Write updated p, m, v, in place when the outputs are the inputs; every array and scalar is float32.

    See Note [One formula] in rules-inl.h.
    """
    has_l2 = l2 != np.float32(0)
    for i in range(p.size):
        grad = g[i] * grad_scale
        param = p[i] * decay
        if has_l2:
            grad = grad + l2 * param
        if from_grad:
            mean = grad - (grad - m[i]) * lerp
        else:
            mean = m[i] + (grad - m[i]) * lerp
        square = v[i] * beta2 + (one_minus_beta2 * grad) * grad
        m_out[i] = mean
        v_out[i] = square
        p_out[i] = param + (step_size * mean) / (math.sqrt(square) * correction2 + eps)


@_compiled
def accumulate(acc, src):
    """Add float32 to float32."""
    for i in range(acc.size):
        acc[i] += src[i]


@_compiled
def square_sum(x):
    """Return the float64 sum of squares of one block: element i goes to sum i % 8; the sums are added as a tree."""
    s = np.zeros(8, np.float64)
    whole = x.size // 8 * 8
    for i in range(0, whole, 8):
        for k in range(8):
            value = np.float64(x[i + k])
            s[k] += value * value
    for i in range(whole, x.size):
        value = np.float64(x[i])
        s[i - whole] += value * value
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))


@_compiled
def bf16_to_float(src, dst):
    """Widen bits (uint16) to float32 bits (uint32)."""
    for i in range(src.size):
        dst[i] = np.uint32(src[i]) << np.uint32(16)


@_compiled
def float_to_bf16(src, dst):
    """Round float32 bits (uint32) to nearest even; every NaN becomes 0x7FC0."""
    for i in range(src.size):
        bits = src[i]
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(
            16
        )
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        dst[i] = np.uint16(0x7FC0) if nan else np.uint16(rounded)


@_compiled
def f16_to_float(src, dst):
    """Widen bits (uint16) to float32; NaNs turn quiet."""
    bits_of = dst.view(np.uint32)
    for i in range(src.size):
        half = np.uint32(src[i])
        sign = (half & np.uint32(0x8000)) << np.uint32(16)
        exponent = (half >> np.uint32(10)) & np.uint32(31)
        mantissa = half & np.uint32(0x3FF)
        if exponent == 31:
            quiet = np.uint32(0x400000) if mantissa else np.uint32(0)
            bits_of[i] = sign | np.uint32(0x7F800000) | (mantissa << np.uint32(13)) | quiet
        elif exponent != 0:
            bits_of[i] = sign | ((exponent + np.uint32(112)) << np.uint32(23)) | (mantissa << np.uint32(13))
        else:
            dst[i] = np.float32(mantissa) * np.float32(2.0**-24)
            bits_of[i] |= sign


@_compiled
def float_to_f16(src, dst):
    """Round float32 to half bits (uint16), to nearest even, as the F16C instruction does."""
    bits_of = src.view(np.uint32)
    word = np.zeros(1, np.float32)
    word_bits = word.view(np.uint32)
    for i in range(src.size):
        bits = bits_of[i]
        sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        if magnitude > np.uint32(0x7F800000):
            half = np.uint32(0x7E00) | ((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
        elif magnitude >= np.uint32(0x47800000):
            half = np.uint32(0x7C00)
        elif magnitude < np.uint32(0x38800000):
            word_bits[0] = magnitude
            word[0] = word[0] + np.float32(0.5)
            half = word_bits[0] - np.uint32(0x3F000000)
        else:
            odd = (magnitude >> np.uint32(13)) & np.uint32(1)
            half = (magnitude + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13)
        dst[i] = np.uint16(sign | half)
