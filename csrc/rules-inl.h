// The arithmetic of every update rule, on one vector of each array.
//
// Note [One formula]. One rounding per operation, built with -ffp-contract=off: so every instruction set, the numba
// kernel and an update in torch operations agree bit for bit, whatever the layout: arrays are decoded to float32, and
// what the rule makes of them is encoded. With g = float(grad) * grad_scale and
// lerp(a, b, w) = a + (b - a) * w, or b - (b - a) * (1 - w) where w >= 0.5, as torch has it:
//   adam     p = p * decay;  g = g + l2 * p  (L2 only);  m = lerp(m, g, 1 - beta1)
//            v = v * beta2 + ((1 - beta2) * g) * g
//            p = p + ((-lr / (1 - beta1^t)) * m) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)
//   lion     p = p * decay;  p = p + -lr * sign(lerp(m, g, 1 - beta1));  m = lerp(m, g, 1 - beta2)
//   sgd      g = g + l2 * p;  b = b * momentum + g * (1 - dampening), g in the first step
//            g = b, or g + b * momentum (Nesterov);  p = p + -lr * g
//   adagrad  g = g + l2 * p;  s = s + g * g;  p = p + (-lr * g) / (sqrt(s) + eps)
//   sign     p = p * decay;  b = lerp(b, g, 1 - momentum);  p = p + -lr * sign(b)
// Adam's order is that of torch's single-tensor path, but that the correction multiplies where torch divides: a
// division takes as long as four multiplications. An update in torch operations takes the root in float64: torch.sqrt
// of float32 on the CPU comes from MKL, an ulp off for one value in six. torch's own optimizer differs by that, by the
// correction, and by the fused multiply-adds in its lerp, add and addcmul. Decoupled decay is torch's as well, though
// subtracting (lr * decay) * p would be nearer to float64: 1 - lr * decay is rounded once for all steps, to the same
// number here and there, and taking another would double the distance to torch.
#pragma once

#include "kernels-inl.h"

namespace offload {
namespace {

// The rules: a vector of each array in, updated in place; scalars in every lane, as a local copy that stores to the
// arrays cannot alias. kStates says how many states the rule reads, kRoot whether the last is a sum of squares.

template <class V>
OFFLOAD_INLINE typename V::F lerp(typename V::F from, typename V::F to, typename V::F weight, bool from_end) {
  return from_end ? to - (to - from) * weight : from + (to - from) * weight;
}

template <class V>
OFFLOAD_INLINE typename V::F sign(typename V::F x) {
  const typename V::F zero = V::set1(0), one = V::set1(1);
  const typename V::F negative = x < zero ? -one : x;
  return x > zero ? one : negative;
}

template <class V>
struct Adam {
  using F = typename V::F;
  static constexpr size_t kStates = 2;
  static constexpr bool kRoot = true;
  F grad_scale, decay, l2, weight, beta2, one_minus_beta2, correction2, eps, negative_step_size;
  bool lerp_from_grad, has_l2;

  explicit Adam(const UpdateScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        decay(V::set1(s.decay)),
        l2(V::set1(s.l2)),
        weight(V::set1(s.lerp)),
        beta2(V::set1(s.beta2)),
        one_minus_beta2(V::set1(s.one_minus_beta2)),
        correction2(V::set1(s.correction2)),
        eps(V::set1(s.eps)),
        negative_step_size(V::set1(s.negative_step_size)),
        lerp_from_grad(s.lerp_from_grad),
        has_l2(s.l2 != 0) {}

  OFFLOAD_INLINE void moments(F& p, F& m, F& v, F g) const {
    g = g * grad_scale;
    p = p * decay;
    if (has_l2) g = g + l2 * p;
    m = lerp<V>(m, g, weight, lerp_from_grad);
    v = v * beta2 + (one_minus_beta2 * g) * g;
  }
  OFFLOAD_INLINE F step(F m, F root) const { return (negative_step_size * m) / (root * correction2 + eps); }
  OFFLOAD_INLINE void operator()(F& p, F& m, F& v, F g) const {
    moments(p, m, v, g);
    p = p + step(m, V::sqrt(v));
  }
};

template <class V>
struct Lion {
  using F = typename V::F;
  static constexpr size_t kStates = 1;
  static constexpr bool kRoot = false;
  const F grad_scale, decay, weight, weight2, negative_lr;
  const bool from_grad, from_grad2;

  explicit Lion(const UpdateScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        decay(V::set1(s.decay)),
        weight(V::set1(s.lerp)),
        weight2(V::set1(s.lerp2)),
        negative_lr(V::set1(s.negative_step_size)),
        from_grad(s.lerp_from_grad),
        from_grad2(s.lerp2_from_grad) {}

  OFFLOAD_INLINE void operator()(F& p, F& m, F&, F g) const {
    g = g * grad_scale;
    p = p * decay;
    p = p + negative_lr * sign<V>(lerp<V>(m, g, weight, from_grad));
    m = lerp<V>(m, g, weight2, from_grad2);
  }
};

template <class V>
struct Sgd {
  using F = typename V::F;
  static constexpr size_t kStates = 1;
  static constexpr bool kRoot = false;
  const F grad_scale, l2, momentum, one_minus_dampening, negative_lr;
  const bool has_l2, has_momentum, first_step, nesterov;

  explicit Sgd(const UpdateScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        l2(V::set1(s.l2)),
        momentum(V::set1(s.momentum)),
        one_minus_dampening(V::set1(s.one_minus_dampening)),
        negative_lr(V::set1(s.negative_step_size)),
        has_l2(s.l2 != 0),
        has_momentum(s.has_momentum),
        first_step(s.first_step),
        nesterov(s.nesterov) {}

  OFFLOAD_INLINE void operator()(F& p, F& b, F&, F g) const {
    g = g * grad_scale;
    if (has_l2) g = g + l2 * p;
    if (has_momentum) {
      b = first_step ? g : b * momentum + g * one_minus_dampening;
      g = nesterov ? g + b * momentum : b;
    }
    p = p + negative_lr * g;
  }
};

template <class V>
struct Adagrad {
  using F = typename V::F;
  static constexpr size_t kStates = 1;
  static constexpr bool kRoot = true;
  const F grad_scale, l2, eps, negative_lr;
  const bool has_l2;

  explicit Adagrad(const UpdateScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        l2(V::set1(s.l2)),
        eps(V::set1(s.eps)),
        negative_lr(V::set1(s.negative_step_size)),
        has_l2(s.l2 != 0) {}

  OFFLOAD_INLINE void operator()(F& p, F& s, F&, F g) const {
    g = g * grad_scale;
    if (has_l2) g = g + l2 * p;
    s = s + g * g;
    p = p + (negative_lr * g) / (V::sqrt(s) + eps);
  }
};

template <class V>
struct Sign {
  using F = typename V::F;
  static constexpr size_t kStates = 1;
  static constexpr bool kRoot = false;
  const F grad_scale, decay, weight, negative_lr;
  const bool from_grad, has_momentum;

  explicit Sign(const UpdateScalars& s)
      : grad_scale(V::set1(s.grad_scale)),
        decay(V::set1(s.decay)),
        weight(V::set1(s.lerp)),
        negative_lr(V::set1(s.negative_step_size)),
        from_grad(s.lerp_from_grad),
        has_momentum(s.has_momentum) {}

  OFFLOAD_INLINE void operator()(F& p, F& b, F&, F g) const {
    g = g * grad_scale;
    p = p * decay;
    if (has_momentum) g = b = lerp<V>(b, g, weight, from_grad);
    p = p + negative_lr * sign<V>(g);
  }
};

}  // namespace
}  // namespace offload
